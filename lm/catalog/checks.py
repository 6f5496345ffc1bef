"""What the catalog says against a SageMaker job, before anything is uploaded, and the image and the limits it picks."""

from __future__ import annotations

import math
from typing import List, Optional, Tuple

from lm.catalog import Image, Instance, Price, gpus, images, instances, libraries, price, replicas, usual_precision
from lm.catalog.choice import Choice
from lm.catalog.fitting import memory_problems, with_instance_type
from lm.disagreements import disagreements
from lm.plan import Plan, make_plan
from lm.refusal import ConfigError, Problem, did_you_mean
from lm.schema import Config, SageMaker
from lm.schema.cluster import DAY_SECONDS

LEAST_RUN_SECONDS = 600  # less than that is spent before the first step
WARM_POOL_SECONDS = 3600  # at most (docs.aws.amazon.com/sagemaker/latest/dg/train-warm-pools.html)
DEFAULT_REGION = "us-east-1"  # for a dry run and for prices where no region is known
LAST_HOROVOD = "2.12"  # of TensorFlow, in AWS's images


def choose(config: Config, plan: Plan) -> Tuple[Choice, List[Problem]]:
    """The choice for a configuration whose cluster is a SageMaker job, and everything that stands against it."""
    cluster = config.cluster
    problems: List[Problem] = []
    warnings: List[str] = []
    instance = _instance(cluster, problems, warnings)
    unsuited = _library_problems(config, instance) if instance is not None else []
    problems += unsuited
    image = _image(config, None if unsuited else instance, problems, warnings)
    if instance is not None and not unsuited:
        problems += memory_problems(config, plan, instance)
    problems += _shape_problems(config, warnings) + _precision_problems(config, instance)
    problems += _account_problems(config)
    if "@" in (config.tracking.uri or "").partition("://")[2].partition("/")[0]:
        text = "tracking.uri has a user's name or password in it, and the configuration is written to S3"
        fix = "cluster.environment=['MLFLOW_TRACKING_USERNAME=...','MLFLOW_TRACKING_PASSWORD=...']"
        problems.append(Problem(("tracking.uri",), text, fix))
    region = cluster.region or DEFAULT_REGION
    known = price(cluster.instance_type or "", region)
    max_run, max_wait = _limits(cluster, known, region, problems, warnings)
    return Choice(instance, image, known, region, max_run, max_wait, tuple(warnings)), problems


def refuse_unworkable(config: Config) -> None:
    """Raises ConfigError with everything that the catalog has against a SageMaker job, fallback types included."""
    if not isinstance(config.cluster, SageMaker):
        return
    _, problems = choose(config, make_plan(config))
    for instance_type in config.cluster.fallback_instance_types:
        moved = with_instance_type(config, instance_type)
        found = disagreements(moved) or choose(moved, make_plan(moved))[1]
        if moved.hash() != config.hash():
            text = f"parallel.lr_scaling gives {moved.cluster.processes} replicas another learning rate"
            found.append(Problem(("parallel.lr_scaling",), text, "parallel.lr_scaling=none"))
        problems += [Problem(p.keys, f"on the fallback {instance_type}: {p.text}", p.fix) for p in found]
    if problems:
        raise ConfigError(problems)


def _instance(cluster: SageMaker, problems: List[Problem], warnings: List[str]) -> Optional[Instance]:
    key = ("cluster.instance_type",)
    if cluster.instance_type is None:
        text = "cluster.instance_type has no value, and a SageMaker job runs on one"
        problems.append(Problem(key, text, "cluster=p3x1, or cluster.instance_type=ml.g5.12xlarge"))
        return None
    found = instances().get(cluster.instance_type)
    if found is None:
        text = f"{cluster.instance_type} is not in lm/catalog/instances.yaml"
        if cluster.allow_unlisted and cluster.gpus_per_host:
            warnings.append(f"{text}: neither its memory nor its libraries were checked")
        else:
            count = "" if cluster.gpus_per_host else " cluster.gpus_per_host=N"
            near = did_you_mean(cluster.instance_type, instances())
            problems.append(Problem(key, text, f"{near}; cluster.allow_unlisted=true{count} goes on without the table"))
    return found


def _image(
    config: Config, instance: Optional[Instance], problems: List[Problem], warnings: List[str]
) -> Optional[Image]:
    """The image: the one that was asked for, or the first that has the strategy's library and suits the GPUs."""
    cluster, strategy = config.cluster, config.parallel.name
    if cluster.image_uri is not None:
        if strategy in ("sdp", "smp"):
            warnings.append(f"whether {cluster.image_uri} has {strategy}'s library is not known here")
        return None

    def suits(image: Image) -> bool:
        return strategy in image.strategies and (instance is None or image.cuda >= instance.cuda_at_least)

    wanted = cluster.framework_version
    able = next((image for image in images() if suits(image)), None)
    if wanted is None:
        if able is None:
            listed = ", ".join(image.framework_version for image in images() if strategy in image.strategies)
            assert instance is not None
            text = (
                f"parallel={strategy} is in AWS's images of TensorFlow {listed} alone, whose CUDA is too old for "
                f"{instance.name}'s {instance.gpu} (from CUDA {instance.cuda_at_least})"
            )
            problems.append(Problem(("parallel", "cluster.instance_type"), text, _nearest(strategy, instance)))
        return able
    found = next((image for image in images() if _is_version(image.framework_version, wanted)), None)
    if found is None:
        text = f"cluster.framework_version={wanted} is not in lm/catalog/images.yaml"
        listed = ", ".join(image.framework_version for image in images())
        fix = f"one of {listed}, or any image by cluster.image_uri=ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG"
        problems.append(Problem(("cluster.framework_version",), text, fix))
        return None
    if strategy not in found.strategies:
        why = {
            "smp": "SageMaker's model parallelism for TensorFlow ended at 2.6",
            "sdp": "SageMaker's data parallelism for TensorFlow ended at 2.11",
            "horovod": f"AWS's images have Horovod up to TensorFlow {LAST_HOROVOD}",
        }[strategy]
        fix = f"cluster.framework_version={able.framework_version}" if able else _nearest(strategy, instance)
        if strategy == "horovod":
            fix += ", or an image of your own: cluster.image_uri=..."
        text = f"parallel={strategy} with {found.name}: {why}"
        problems.append(Problem(("cluster.framework_version", "parallel"), text, fix))
    elif instance is not None and found.cuda < instance.cuda_at_least:
        needed = f"{instance.name}'s {instance.gpu} needs {instance.cuda_at_least}"
        text = f"{found.name} has CUDA {found.cuda}, and {needed}"
        fix = f"cluster.framework_version={able.framework_version}" if able else _nearest(strategy, instance)
        problems.append(Problem(("cluster.framework_version", "cluster.instance_type"), text, fix))
    return found


def _is_version(listed: str, wanted: str) -> bool:
    """Whether a listed version is the wanted one: 2.6 is any 2.6.x."""
    return listed.split(".")[: wanted.count(".") + 1] == wanted.split(".")


def _library_problems(config: Config, instance: Instance) -> List[Problem]:
    strategy, cluster = config.parallel.name, config.cluster
    library = libraries()[strategy]
    keys = ("parallel", "cluster.instance_type")
    if library.gpus_a_host and cluster.gpus_per_host != library.gpus_a_host:
        text = (
            f"parallel={strategy} starts {library.gpus_a_host} processes a host, and {instance.name} has "
            f"{cluster.gpus_per_host} GPUs"
        )
        return [Problem(keys, text, _nearest(strategy, instance))]
    if library.instances and instance.name not in library.instances:
        listed = ", ".join(library.instances)
        text = f"parallel={strategy} does not run on {instance.name}: its library knows {listed}"
        return [Problem(keys, text, _nearest(strategy, instance))]
    return []


def _nearest(strategy: str, instance: Optional[Instance]) -> str:
    """The instance type, of those that a strategy runs on, whose GPUs have most nearly as much memory."""
    library = libraries()[strategy]
    cuda = max((image.cuda for image in images() if strategy in image.strategies), default=0.0)
    able = [
        one
        for one in instances().values()
        if one.gpus and one.cuda_at_least <= cuda and library.runs_on(one)
    ]
    wanted = instance.gpus * instance.gpu_gib if instance else 0
    best = min(able, key=lambda one: abs(math.log((one.gpus * one.gpu_gib or 1) / (wanted or 1))))
    other = " or parallel=horovod" if strategy == "sdp" else ""
    return f"cluster.instance_type={best.name}{other}"


def _shape_problems(config: Config, warnings: List[str]) -> List[Problem]:
    """What the numbers of hosts, GPUs, processes and partitions say against each other."""
    cluster, strategy = config.cluster, config.parallel.name
    gpus, hosts = cluster.gpus_per_host, cluster.instance_count
    problems = []
    partitions = getattr(config.parallel, "partitions", 1)
    if strategy == "smp" and gpus and gpus % partitions:
        fits = max(n for n in range(1, gpus + 1) if gpus % n == 0 and n <= partitions)
        text = f"parallel.partitions={partitions} does not divide the {gpus} GPUs of a {cluster.instance_type}"
        problems.append(Problem(("parallel.partitions",), text, f"parallel.partitions={fits}"))
    elif strategy == "single":
        if hosts > 1:
            text = f"parallel=single trains in 1 process and cluster.instance_count={hosts} pays for {hosts} hosts"
            problems.append(Problem(("parallel", "cluster.instance_count"), text, "parallel=horovod"))
        elif gpus > 1:
            warnings.append(f"parallel=single uses 1 of the {gpus} GPUs; parallel=horovod uses them all")
    expected = replicas(hosts, gpus, strategy, partitions)
    if not problems and cluster.processes != expected:
        text = f"cluster.processes={cluster.processes}, and {hosts} x {gpus or 1} GPUs are {expected} replicas"
        problems.append(Problem(("cluster.processes",), text, "leave cluster.processes out"))
    return problems


def _precision_problems(config: Config, instance: Optional[Instance]) -> List[Problem]:
    """Half precision that the instance's GPUs have no units for, and would be slower in than in float32."""
    gpu = gpus().get(instance.gpu) if instance is not None else None
    precision = config.train.precision
    if instance is None or gpu is None or precision in gpu.peak_tflops:
        return []
    text = f"train.precision={precision}, and a {instance.gpu} of {instance.name} has no units for it"
    return [Problem(("train.precision",), text, f"train.precision={usual_precision(instance.name, '')}")]


def _account_problems(config: Config) -> List[Problem]:
    """Storage, network and spot settings that SageMaker would refuse, or that would lose a run."""
    cluster = config.cluster
    problems = []

    def refuse(keys: Tuple[str, ...], text: str, fix: str) -> None:
        problems.append(Problem(keys, text, fix))

    if cluster.file_system_id is not None:
        if not cluster.subnets or not cluster.security_groups:
            text = f"cluster.file_system_id={cluster.file_system_id} is reached from a VPC alone, and none is given"
            refuse(("cluster.subnets",), text, "cluster.subnets=[subnet-...] cluster.security_groups=[sg-...]")
        if cluster.file_system_path is None:
            text = "cluster.file_system_id has no cluster.file_system_path"
            refuse(("cluster.file_system_path",), text, "cluster.file_system_path=/FOLDER, of the prepared set")
        if cluster.dataset_uri is not None:
            text = "cluster.dataset_uri and cluster.file_system_id both say where the data is"
            refuse(("cluster.dataset_uri", "cluster.file_system_id"), text, "one of them")
    if bool(cluster.subnets) != bool(cluster.security_groups):
        text = "a VPC needs both cluster.subnets and cluster.security_groups, and one is empty"
        refuse(("cluster.subnets", "cluster.security_groups"), text, "both, or neither")
    if cluster.spot and config.checkpoint.every_steps >= config.train.steps:
        text = (
            f"cluster.spot=true may be interrupted at any step, and checkpoint.every_steps="
            f"{config.checkpoint.every_steps} saves none of the {config.train.steps}"
        )
        fix = f"checkpoint.every_steps={max(1, config.train.steps // 10)}, or cluster.spot=false"
        refuse(("checkpoint.every_steps", "cluster.spot"), text, fix)
    if cluster.warm_pool_seconds is not None and cluster.warm_pool_seconds > WARM_POOL_SECONDS:
        text = f"cluster.warm_pool_seconds={cluster.warm_pool_seconds} is above SageMaker's {WARM_POOL_SECONDS}"
        refuse(("cluster.warm_pool_seconds",), text, f"cluster.warm_pool_seconds={WARM_POOL_SECONDS}")
    if cluster.warm_pool_seconds is not None and cluster.spot:
        text = "cluster.warm_pool_seconds keeps machines, and SageMaker does not keep spot instances"
        refuse(("cluster.warm_pool_seconds", "cluster.spot"), text, "cluster.spot=false, or no warm pool")
    if cluster.max_wait_seconds is not None and not cluster.spot:
        text = "cluster.max_wait_seconds is for spot instances, and cluster.spot=false"
        refuse(("cluster.max_wait_seconds",), text, "cluster.spot=true, or cluster.max_wait_seconds=null")
    return problems


def _limits(
    cluster: SageMaker, known: Optional[Price], region: str, problems: List[Problem], warnings: List[str]
) -> Tuple[int, int]:
    """max_run and max_wait in seconds, within what cluster.max_cost_usd pays for."""
    max_run = cluster.max_run_seconds or DAY_SECONDS
    if cluster.max_cost_usd is not None and cluster.instance_type is not None:
        hosts, cost = cluster.instance_count, cluster.max_cost_usd
        if known is None:
            text = f"cluster.max_cost_usd={cost:g} cannot be kept: no price of {cluster.instance_type} in {region}"
            if cluster.allow_unlisted:
                warnings.append(text)
            else:
                fix = "cluster.max_run_seconds in its place, or cluster.allow_unlisted=true"
                problems.append(Problem(("cluster.max_cost_usd",), text, fix))
        else:
            kept = cluster.warm_pool_seconds or 0  # billed like the run
            paid = max(0, int(cost / (known.usd_per_hour * hosts) * 3600) - kept)
            sum_of = f"{hosts} x {cluster.instance_type} x {known.usd_per_hour:g} USD an hour"
            if cluster.max_run_seconds is None:
                max_run = min(max_run, paid)
            if max_run > paid:
                total = known.cost_usd(hosts, max_run)
                text = f"{sum_of} for cluster.max_run_seconds={max_run} cost {total:,.2f} USD, above {cost:g}"
                fix = f"cluster.max_run_seconds={paid}, or cluster.max_cost_usd={math.ceil(total)}"
                problems.append(Problem(("cluster.max_cost_usd", "cluster.max_run_seconds"), text, fix))
            elif max_run < LEAST_RUN_SECONDS and cluster.max_run_seconds is None:
                least = math.ceil(known.cost_usd(hosts, LEAST_RUN_SECONDS))
                text = f"cluster.max_cost_usd={cost:g} pays for {paid} s of {sum_of}: no run comes to its first step"
                problems.append(Problem(("cluster.max_cost_usd",), text, f"cluster.max_cost_usd={least} or more"))
    max_wait = cluster.max_wait_seconds or 2 * max_run
    if cluster.spot and max_wait < max_run:
        text = f"cluster.max_wait_seconds={max_wait} is below cluster.max_run_seconds={max_run}, which it includes"
        problems.append(Problem(("cluster.max_wait_seconds",), text, f"cluster.max_wait_seconds={2 * max_run}"))
    return max_run, max_wait
