"""The CreateTrainingJob request of a configuration, built by the SageMaker SDK's TensorFlow estimator."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Optional

from lm.catalog import Instance
from lm.catalog.choice import Choice
from lm.data.shards import output_folder
from lm.refusal import ConfigError, Problem
from lm.run import run_name
from lm.sagemaker.aws import DRY_ROLE, dry_session, import_sagemaker
from lm.sagemaker.bundle import CONFIG, ENTRY, make_bundle
from lm.sagemaker.metrics import DEFINITIONS
from lm.sagemaker.places import Places, tags
from lm.schema import Config

PROFILER_MILLISECONDS = 500  # between system metrics, as in AWS's article
# SageMaker asks a container to stop by SIGTERM, 120 s before it kills it. The toolkit does not pass that on (its issues
# 125 and 173), and as process 1 it does not even see it: this shell does, and tells the ranks by a file (lm.container).
ENTRYPOINT = [
    "bash",
    "-c",
    'train & child=$!; trap "touch ${SAGEMAKER_BASE_DIR:-/opt/ml}/stop" TERM; '
    "while kill -0 $child 2>/dev/null; do wait $child; done; wait $child; exit $?",
]
# For hosts with Elastic Fabric Adapters (SageMaker's guide, model-parallel-customize-tips-pitfalls).
EFA_OPTIONS = "-x FI_EFA_USE_DEVICE_RDMA=1 -x FI_PROVIDER=efa -x RDMAV_FORK_SAFE=1"
# docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
HYPERPARAMETERS, KEY_CHARACTERS, VALUE_CHARACTERS = 100, 256, 2500
VARIABLES, VARIABLE_CHARACTERS = 100, 512


def make_request(config: Config, choice: Choice, job_name: str) -> Dict[str, Any]:
    """The exact request, with no credentials and no network. Raises ConfigError where it breaks the API's limits."""
    with tempfile.TemporaryDirectory() as folder:
        make_bundle(config, Path(folder) / "bundle")
        request = submit(config, choice, job_name, Path(folder) / "bundle", dry_session(config))
    _refuse_beyond_limits(request)
    return request


def submit(config: Config, choice: Choice, job_name: str, bundle: Path, session: Any) -> Dict[str, Any]:
    """Uploads the bundle and creates the job in a session. Returns the request that was sent.

    Raises botocore's ClientError where AWS refuses it.
    """
    sent: Dict[str, Any] = {}
    event = "provide-client-params.sagemaker.CreateTrainingJob"
    keep = lambda params, **_: sent.update(params)  # noqa: E731 - the name is needed again
    session.sagemaker_client.meta.events.register(event, keep)
    try:
        estimator = _estimator(config, choice, bundle, session)
        estimator.fit(_inputs(config, session.default_bucket()), wait=False, job_name=job_name)
    finally:
        session.sagemaker_client.meta.events.unregister(event, keep)
    return sent


def _estimator(config: Config, choice: Choice, bundle: Path, session: Any) -> Any:
    import_sagemaker()
    from sagemaker.debugger import ProfilerConfig
    from sagemaker.tensorflow import TensorFlow

    cluster = config.cluster
    places = Places(session.default_bucket(), run_name(config))
    profiled = choice.has_debugger(cluster)
    version = choice.image.framework_version if choice.image else None
    return TensorFlow(
        entry_point=ENTRY,
        source_dir=str(bundle),
        hyperparameters={"config": CONFIG, "run": places.run},
        container_entry_point=ENTRYPOINT,
        model_dir=False,  # type: ignore[arg-type]  # as the SDK documents it
        role=cluster.role or DRY_ROLE,
        instance_type=cluster.instance_type,
        instance_count=cluster.instance_count,
        volume_size=cluster.volume_gib,
        framework_version=version,
        py_version=choice.image.python if choice.image else "py3",
        image_uri=cluster.image_uri,
        distribution=distribution(config, choice.instance),
        metric_definitions=DEFINITIONS,
        environment=dict(entry.split("=", 1) for entry in cluster.environment) or None,
        code_location=places.code,
        output_path=places.output,
        checkpoint_s3_uri=f"{places.run_folder}/",
        use_spot_instances=cluster.spot,
        max_run=choice.max_run_seconds,
        max_wait=choice.max_wait_seconds if cluster.spot else None,
        keep_alive_period_in_seconds=cluster.warm_pool_seconds,
        subnets=cluster.subnets or None,
        security_group_ids=cluster.security_groups or None,
        tags=tags(config),
        profiler_config=ProfilerConfig(system_monitor_interval_millis=PROFILER_MILLISECONDS) if profiled else None,
        disable_profiler=not profiled,
        debugger_hook_config=False,
        sagemaker_session=session,
    )


def distribution(config: Config, instance: Optional[Instance]) -> Any:
    """What the estimator is told of processes and libraries."""
    cluster, parallel = config.cluster, config.parallel
    options = EFA_OPTIONS if instance is not None and instance.efa else ""
    mpi = {"enabled": True, "processes_per_host": max(1, cluster.gpus_per_host), "custom_mpi_options": options}
    if parallel.name == "horovod":
        return {"mpi": mpi}
    if parallel.name == "sdp":
        return {"smdistributed": {"dataparallel": {"enabled": True}}}
    if parallel.name == "smp":
        ours = ("name", "lr_scaling")  # the rest has the library's names
        parameters = {name: value for name, value in dataclasses.asdict(parallel).items() if name not in ours}
        if not parallel.auto_partition:
            parameters["default_partition"] = 0  # the library wants one; every block names its own
        return {"smdistributed": {"modelparallel": {"enabled": True, "parameters": parameters}}, "mpi": mpi}
    return None


def _inputs(config: Config, bucket: str) -> Dict[str, Any]:
    """A channel for the prepared set, and one for each further set of the mixture: data, set0, set1, ..."""
    from sagemaker.inputs import FileSystemInput, TrainingInput

    def in_s3(uri: str) -> Any:
        return TrainingInput(f"{uri.rstrip('/')}/")  # without the slash, s3://b/pile would bring s3://b/pile2 too

    cluster = config.cluster
    if cluster.file_system_id is not None:

        def mounted(path: str) -> Any:
            return FileSystemInput(cluster.file_system_id, cluster.file_system_type, path, "ro")

        return {name: mounted(path) for name, path in channels(config, cluster.file_system_path).items()}
    if cluster.dataset_uri is not None:
        return {name: in_s3(uri) for name, uri in channels(config, cluster.dataset_uri).items()}
    places = Places(bucket, run_name(config))
    local = channels(config, str(output_folder(config.dataset)))
    return {name: in_s3(places.dataset(Path(folder))) for name, folder in local.items()}


def channels(config: Config, dataset: str) -> Dict[str, str]:
    """The channels' names and what each holds; `lm.container` reads them by these names."""
    sets = [config.mixture.sets[name] for name in sorted(config.mixture.sets)]
    return {"data": dataset, **{f"set{number}": path for number, path in enumerate(sets)}}


def _refuse_beyond_limits(request: Dict[str, Any]) -> None:
    problems: List[Problem] = []

    def refuse(text: str, fix: str) -> None:
        problems.append(Problem(("cluster.environment",), text, fix))

    hyperparameters, variables = request["HyperParameters"], request.get("Environment", {})
    if len(hyperparameters) > HYPERPARAMETERS:
        refuse(f"the job has {len(hyperparameters)} hyperparameters, and SageMaker takes {HYPERPARAMETERS}", "")
    for key, value in hyperparameters.items():
        if len(key) > KEY_CHARACTERS or len(value) > VALUE_CHARACTERS:
            text = f"the hyperparameter {key} has {len(value)} characters, and SageMaker takes {VALUE_CHARACTERS}"
            refuse(text, "a shorter value")
    if len(variables) > VARIABLES:
        refuse(f"cluster.environment has {len(variables)} variables, and SageMaker takes {VARIABLES}", "fewer of them")
    for key, value in variables.items():
        for what, text in (("name", key), ("value", str(value))):
            if len(text) > VARIABLE_CHARACTERS:
                said = f"cluster.environment.{key[:40]}: its {what} has {len(text)} characters"
                refuse(f"{said}, and SageMaker takes {VARIABLE_CHARACTERS}", f"a shorter {what}")
    if problems:
        raise ConfigError(problems)
