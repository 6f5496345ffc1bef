"""The catalog: its rows, what it refuses and what it offers instead, and what it picks."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.catalog import TABLES, images, instances, libraries, price, replicas
from lm.catalog.checks import choose
from lm.catalog.choice import Choice
from lm.compose import CONF, compose
from lm.plan import make_plan
from lm.refusal import ConfigError
from lm.schema import PARALLELS

SAGEMAKER = ("p3x1", "p3x10", "p3dnx2", "p4dx2", "p4dex2", "g4dnx1", "g5x1", "p5x1")


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(overrides)
    return str(caught.value)


def choice(*overrides: str) -> Choice:
    config = compose(overrides)
    chosen, problems = choose(config, make_plan(config))
    assert not problems
    return chosen


def test_every_row_has_its_source_and_date() -> None:
    for path in TABLES.glob("*.yaml"):
        rows = yaml.safe_load(path.read_text())
        for row in rows.values() if isinstance(rows, dict) else rows:
            assert row["source"], path
            assert re.fullmatch(r"20\d\d-\d\d-\d\d", row["verified_on"]), path


def test_the_tables_name_one_anothers_rows() -> None:
    assert set(libraries()) == set(PARALLELS)
    for library in libraries().values():
        assert set(library.instances) <= set(instances())
    for image in images():
        assert set(image.strategies) <= set(libraries())
    for row in yaml.safe_load((TABLES / "prices.yaml").read_text()):
        assert set(row["usd_per_hour"]) <= set(instances())
    for name in SAGEMAKER:
        values = yaml.safe_load((CONF / f"cluster/{name}.yaml").read_text())
        assert values.get("instance_type", "ml.p3.16xlarge") in instances()


def test_the_sdk_knows_every_image() -> None:
    """The SDK's own table gives each row's image; what the catalog calls Python the SDK takes."""
    from lm.sagemaker.aws import import_sagemaker

    sagemaker = import_sagemaker()
    for image in images():
        uri = sagemaker.image_uris.retrieve(
            "tensorflow",
            region="us-east-1",
            version=image.framework_version,
            py_version=image.python,
            instance_type="ml.p3.16xlarge",
            image_scope="training",
        )
        assert uri.endswith(f"tensorflow-training:{image.framework_version}-gpu-{image.python}")


@pytest.mark.parametrize("cluster", SAGEMAKER)
@pytest.mark.parametrize("parallel", list(PARALLELS))
def test_what_runs_where(parallel: str, cluster: str) -> None:
    """AWS's two support pages, as a table of its own: p3, p4 and g4dn have SMP, eight GPUs and no p5 have SDP."""
    overrides = [f"parallel={parallel}", f"cluster={cluster}"]
    runs = {
        "single": cluster not in ("p3x10", "p3dnx2", "p4dx2", "p4dex2"),
        "horovod": True,
        "sdp": cluster in ("p3x1", "p3x10", "p3dnx2", "p4dx2", "p4dex2"),
        "smp": cluster in ("p3x1", "p3x10", "p3dnx2", "p4dx2", "g4dnx1"),
    }[parallel]
    if not runs:
        assert f"parallel={parallel}" in refusal(*overrides)
        return
    config = compose(overrides)
    gpus = config.cluster.instance_count * config.cluster.gpus_per_host
    assert config.cluster.processes == {"single": 1, "smp": gpus // 2}.get(parallel, gpus)
    image = choice(*overrides).image
    assert image is not None
    assert image.framework_version == ("2.6.0" if cluster != "p5x1" else "2.12.0")


def test_the_articles_job_is_accepted() -> None:
    """model=1b parallel=smp cluster=p3x10: 80 GPUs, 40 replicas, 1.2 billion parameters in 16 GiB."""
    config = compose(["model=1b", "parallel=smp", "cluster=p3x10"])
    assert config.cluster.processes == 40
    assert config.parallel.horovod
    assert config.train.global_batch_sequences == 160
    assert make_plan(config).memory_per_device.total < 16 * 2**30


SMALL_PASSES = ["train.global_batch_sequences=16", "train.microbatch_sequences=1"]


@pytest.mark.parametrize(
    ("overrides", "said", "fix"),
    [
        (
            ["parallel=smp", "cluster=p3x10", "cluster.framework_version=2.11"],
            "model parallelism for TensorFlow ended at 2.6",
            "cluster.framework_version=2.6.0",
        ),
        (
            ["parallel=sdp", "cluster=p3x1", "cluster.framework_version=2.12"],
            "data parallelism for TensorFlow ended at 2.11",
            "cluster.framework_version=2.6.0",
        ),
        (["parallel=sdp", "cluster=g5x1"], "starts 8 processes a host, and ml.g5.12xlarge has 4", "ml.p3.16xlarge"),
        (
            ["parallel=horovod", "cluster=p3x1", "cluster.framework_version=2.13"],
            "AWS's images have Horovod up to TensorFlow 2.12",
            "or an image of your own: cluster.image_uri=...",
        ),
        (["parallel=smp", "cluster=p5x1"], "parallel=smp does not run on ml.p5.48xlarge", "ml.p4d.24xlarge"),
        (
            ["parallel=horovod", "cluster=p5x1", "cluster.framework_version=2.6"],
            "has CUDA 11.2, and ml.p5.48xlarge's H100 needs 11.8",
            "cluster.framework_version=2.12.0",
        ),
        (
            ["parallel=smp", "cluster=p3x1", "parallel.partitions=3"],
            "parallel.partitions=3 does not divide the 8 GPUs",
            "parallel.partitions=2",
        ),
        (
            ["model=1b", "parallel=sdp", "cluster=p3x10"],
            "1.22 billion parameters under adamw need 18.2 GiB a device before activations, and a V100 of",
            "train.global_batch_sequences=160, or cluster.instance_type=ml.p3dn.24xlarge",
        ),
        (
            ["model=7b", "parallel=smp", "cluster=p3x10"],
            "a V100 of ml.p3.16xlarge has 14.5 GiB for it",
            "cluster.instance_type=ml.p3dn.24xlarge parallel.partitions=8",
        ),
        (
            [*SMALL_PASSES, "model=760m", "parallel=horovod", "cluster=p3x1"],
            "the plan has",
            "model.recompute=block train.microbatch_sequences=2",
        ),
        (
            ["parallel=horovod", "cluster=p3x1", "train.precision=bfloat16"],
            "train.precision=bfloat16, and a V100 of ml.p3.16xlarge has no units for it",
            "train.precision=float16",
        ),
        (
            ["parallel=horovod", "cluster=g5x1", "cluster.fallback_instance_types=[ml.p3.8xlarge]"],
            "on the fallback ml.p3.8xlarge: train.precision=bfloat16",
            "train.precision=float16",
        ),
        (
            ["cluster=p3x1", "cluster.spot=true", "checkpoint.every_steps=500"],
            "checkpoint.every_steps=500 saves none of the 500",
            "checkpoint.every_steps=50",
        ),
        (
            ["cluster=p3x1", "cluster.spot=true", "cluster.max_run_seconds=3600", "cluster.max_wait_seconds=600"],
            "cluster.max_wait_seconds=600 is below cluster.max_run_seconds=3600",
            "cluster.max_wait_seconds=7200",
        ),
        (
            ["cluster=p3x1", "cluster.max_wait_seconds=600"],
            "cluster.max_wait_seconds is for spot instances",
            "cluster.spot=true",
        ),
        (
            ["cluster=p3x1", "cluster.warm_pool_seconds=3601"],
            "cluster.warm_pool_seconds=3601 is above SageMaker's 3600",
            "cluster.warm_pool_seconds=3600",
        ),
        (
            ["cluster=p3x1", "cluster.warm_pool_seconds=600", "cluster.spot=true"],
            "SageMaker does not keep spot instances",
            "cluster.spot=false",
        ),
        (
            ["cluster=p3x1", "cluster.file_system_id=fs-0123456789abcdef0", "cluster.file_system_path=/pile"],
            "is reached from a VPC alone, and none is given",
            "cluster.subnets=[subnet-...]",
        ),
        (["cluster=p3x1", "cluster.subnets=[subnet-0a]"], "a VPC needs both", "both, or neither"),
        (["cluster=sagemaker"], "cluster.instance_type has no value", "cluster=p3x1"),
        (["cluster=g5x1", "cluster.subnets=subnet-1"], "is not a list", "cluster.subnets=[subnet-1]"),
        (["parallel=single", "cluster=p3x10"], "pays for 10 hosts", "parallel=horovod"),
        (["parallel=horovod", "cluster=p3x1", "cluster.processes=4"], "1 x 8 GPUs are 8 replicas", "leave"),
        (["cluster.spot=true"], "cluster.spot is not a setting", "cluster=sagemaker has it"),
        (["cluster=p3x1", "cluster.role=me"], "must be like arn:aws:iam::123456789012:role/NAME", ""),
        (["cluster=p3x1", 'cluster.environment=["A-b=c"]'], "must be like NAME=VALUE, which A-b=c is not", ""),
    ],
    ids=lambda value: "-".join(value)[:60] if isinstance(value, list) else None,
)
def test_what_cannot_work_is_refused_with_the_nearest_that_does(overrides: list[str], said: str, fix: str) -> None:
    shown = refusal(*overrides)
    assert said in shown
    assert fix in shown


def test_what_the_refusal_offers_is_accepted() -> None:
    """The overrides after the arrow, typed, compose."""
    for overrides in (
        ["model=1b", "parallel=sdp", "cluster=p3x10"],
        ["model=7b", "parallel=smp", "cluster=p3x10"],
        ["model=760m", "parallel=horovod", "cluster=g4dnx1"],
        ["model=350m", "parallel=horovod", "cluster=p3x1", "train.global_batch_sequences=256"],
        ["parallel=smp", "cluster=p5x1"],
        ["parallel=smp", "cluster=p3x10", "cluster.framework_version=2.11"],
        ["cluster=p3x1", "cluster.spot=true", "checkpoint.every_steps=500"],
        ["parallel=horovod", "cluster=p5x1", "cluster.framework_version=2.6"],
    ):
        for offer in refusal(*overrides).split("-> ")[1].split(", or "):
            offered = [word for word in offer.split() if "=" in word]
            said = {word.split("=")[0] for word in offered}
            given = [override for override in overrides if override.split("=")[0] not in said]
            if "..." not in offer:
                assert compose([*given, *offered]).cluster.name == "sagemaker"


def test_a_type_that_the_table_does_not_know_can_be_used_all_the_same() -> None:
    new = ["parallel=horovod", "cluster=sagemaker", "cluster.instance_type=ml.p9.48xlarge"]
    assert "did you mean ml.p5.48xlarge?" in refusal(*new)
    assert "cluster.gpus_per_host=N" in refusal(*new, "cluster.allow_unlisted=true")
    allowed = choice(*new, "cluster.allow_unlisted=true", "cluster.gpus_per_host=16")
    assert "ml.p9.48xlarge is not in lm/catalog/instances.yaml" in allowed.warnings[0]
    assert compose([*new, "cluster.allow_unlisted=true", "cluster.gpus_per_host=16"]).cluster.processes == 16
    fallback = ["parallel=horovod", "cluster=p3x1", "cluster.fallback_instance_types=[ml.p9.48xlarge]"]
    assert "on the fallback ml.p9.48xlarge" in refusal(*fallback)
    assert compose([*fallback, "cluster.allow_unlisted=true"]).cluster.gpus_per_host == 8


def test_an_image_that_the_table_does_not_know_is_given_by_its_address() -> None:
    version = ["cluster=p3x1", "cluster.framework_version=2.99"]
    assert "cluster.framework_version=2.99 is not in lm/catalog/images.yaml" in refusal(*version)
    own = choice(*version, "cluster.image_uri=123456789012.dkr.ecr.us-east-1.amazonaws.com/own:2.99")
    assert own.image is None


def test_a_password_does_not_travel() -> None:
    shown = refusal("cluster=g5x1", "tracking.uri='https://me:secret@mlflow.example.com'")
    assert "tracking.uri has a user's name or password in it" in shown


def test_fallback_types_are_checked_before_anything_is_sent() -> None:
    shown = refusal("parallel=smp", "cluster=p3x1", "cluster.fallback_instance_types=[ml.p5.48xlarge]")
    assert "on the fallback ml.p5.48xlarge: parallel=smp does not run on ml.p5.48xlarge" in shown


def test_money_is_kept_within_its_bound() -> None:
    """10 x 28.152 USD an hour: 281.52. The run's time follows from the bound, a longer one is refused."""
    p3x10 = ["parallel=horovod", "cluster=p3x10", "cluster.region=us-east-1"]
    assert choice(*p3x10).max_run_seconds == 86400
    assert choice(*p3x10, "cluster.max_cost_usd=563.04").max_run_seconds == 7200
    assert choice(*p3x10, "cluster.max_cost_usd=563.04", "cluster.max_run_seconds=3600").max_run_seconds == 3600
    shown = refusal(*p3x10, "cluster.max_cost_usd=100", "cluster.max_run_seconds=3600")
    assert "10 x ml.p3.16xlarge x 28.152 USD an hour for cluster.max_run_seconds=3600 cost 281.52 USD" in shown
    assert "cluster.max_run_seconds=1278, or cluster.max_cost_usd=282" in shown
    assert "no run comes to its first step" in refusal(*p3x10, "cluster.max_cost_usd=1")
    pool = [*p3x10, "cluster.max_cost_usd=563.04", "cluster.warm_pool_seconds=600"]
    assert choice(*pool).max_run_seconds == 6600
    nowhere = [*p3x10[:2], "cluster.region=eu-central-1", "cluster.max_cost_usd=100"]
    assert "no price of ml.p3.16xlarge in eu-central-1" in refusal(*nowhere)
    assert choice(*nowhere, "cluster.allow_unlisted=true").max_run_seconds == 86400


@settings(max_examples=25, deadline=None)  # each composes
@given(cost=st.floats(50, 1e5), hosts=st.integers(1, 20))
def test_no_accepted_run_can_cost_more_than_its_bound(cost: float, hosts: int) -> None:
    bound = ["parallel=horovod", "cluster=g5x1", "cluster.region=us-east-1", f"cluster.max_cost_usd={cost}"]
    chosen = choice(*bound, f"cluster.instance_count={hosts}")
    known = price("ml.g5.12xlarge", "us-east-1")
    assert known is not None
    assert known.usd_per_hour * hosts * chosen.max_run_seconds / 3600 <= cost


@given(hosts=st.integers(1, 50), gpus=st.integers(1, 16), partitions=st.integers(1, 16))
def test_every_gpu_belongs_to_one_replica(hosts: int, gpus: int, partitions: int) -> None:
    assert replicas(hosts, gpus, "horovod", 1) == hosts * gpus
    assert replicas(hosts, gpus, "single", 1) == 1
    if gpus % partitions == 0:
        assert replicas(hosts, gpus, "smp", partitions) * partitions == hosts * gpus
