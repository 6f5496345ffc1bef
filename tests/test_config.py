"""Configuration: types, limits, agreement; every problem at once, before TensorFlow is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, train_py
from omegaconf import OmegaConf

from lm.compose import CONF, compose
from lm.config import load
from lm.plan import make_plan
from lm.refusal import ConfigError


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make_plan(compose(overrides))
    return str(caught.value)


@pytest.mark.parametrize("model", options("model"))
@pytest.mark.parametrize("parallel", options("parallel"))
@pytest.mark.parametrize("cluster", ["local", "local2", "local4", "slurm", "tf_hosts"])
def test_every_combination_composes_and_plans(model: str, parallel: str, cluster: str) -> None:
    overrides = [f"model={model}", f"parallel={parallel}", f"cluster={cluster}"]
    if cluster == "tf_hosts":
        assert "cluster=tf_hosts has no hosts" in refusal(*overrides)
        overrides.append("cluster.hosts=[10.0.0.4:4100,10.0.0.5:4100]")
    if cluster == "tf_hosts" and parallel != "smp":
        said = f"cluster.hosts is for partitions on other hosts, and parallel={parallel} has none"
        assert said in refusal(*overrides)
    elif parallel == "single" and cluster in ("local2", "local4"):
        assert "parallel=single trains in 1 process" in refusal(*overrides)
    elif parallel == "smp" and cluster in ("local2", "local4"):
        assert "parallel.horovod=false has one" in refusal(*overrides, "parallel.horovod=false")
        assert make_plan(compose(overrides)).replicas > 1
    else:
        config = compose(overrides)
        plan = make_plan(config)
        assert plan.replicas == config.cluster.processes
        assert plan.microbatch_sequences * plan.accumulation * plan.replicas == plan.global_batch_sequences


@pytest.mark.parametrize(
    "overrides",
    [[f"{group}={option}"] for group in ("dataset", "optimizer", "schedule", "profiling") for option in options(group)]
    + [[f"experiment={option}"] for option in options("experiment")],
    ids=lambda overrides: overrides[0],
)
def test_every_other_option_composes_and_plans(overrides: list[str]) -> None:
    assert make_plan(compose(overrides)).parameters > 0


def test_all_problems_are_told_at_once_each_with_both_numbers_and_a_fix() -> None:
    text = refusal(
        "model=tyni",
        "model.heads=5",
        "optimizer.learning_rat=1e-3",
        "train.steps=10",
        "schedule.warmup_steps=10",
        "checkpoint.every_steps=0",
        "train.precision=float8",
    )
    assert "6 problems" in text
    assert "model=tyni is not an option of the group model\n     -> did you mean tiny?" in text
    assert "optimizer.learning_rat is not a setting\n     -> did you mean optimizer.learning_rate?" in text
    assert "model.heads=5 does not divide model.width=192\n     -> model.heads=4" in text
    assert "schedule.warmup_steps=10 is not below train.steps=10\n     -> train.steps=11 or more" in text
    assert "checkpoint.every_steps=0 must be at least 1\n     -> checkpoint.every_steps=1" in text
    assert "train.precision=float8 must be one of float32, bfloat16, float16" in text


def test_a_setting_of_one_optimizer_is_a_typo_under_another() -> None:
    assert compose(["optimizer=sgd", "optimizer.momentum=0.5"]).optimizer.momentum == 0.5
    assert "optimizer.momentum is not a setting" in refusal("optimizer=adamw", "optimizer.momentum=0.5")
    assert "model.extra is not a setting" in refusal("+model.extra=1")


def test_batch_problems_are_told_with_the_others() -> None:
    batch = ["train.global_batch_sequences=8", "train.microbatch_sequences=3"]
    text = refusal("model.heads=5", "parallel=horovod", "cluster.processes=3", *batch)
    assert "3 problems" in text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [  # what Hydra itself would answer with a traceback
        (["model=tiny,10m"], "model has several values, and this is one run\n     -> -m model=tiny,10m"),
        (["model=null"], "model=None is not an option of the group model"),
        (["~model"], "model is left out\n     -> model=OPTION"),
        (["hydra/launcher=joblb"], "Hydra does not take hydra/launcher=joblb"),
        (["hydra.mode=FOO"], "Hydra does not take hydra.mode=FOO"),
        (["run.name=${foo.bar}"], "an interpolation has no value"),
        (["model.heads=0"], "model.heads=0 must be at least 1"),
        (["model.heads=-5"], "model.heads=-5 must be at least 1"),
        (["experiment=smok"], "did you mean smoke?"),
        (["optimizer.no_decay=[norms]"], "must be of norm, bias, embedding\n     -> did you mean norm?"),
        (["justaword"], "justaword is not an override"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_odd_overrides_are_refused_in_words(overrides: list[str], said: str) -> None:
    assert said in refusal(*overrides)


def test_a_sweep_over_an_unknown_option_is_refused_before_its_first_job() -> None:
    done = train_py("-m", "model=tiny,tinny", "train.steps=1")
    assert done.returncode == 2
    assert "model=tinny is not an option of the group model\n     -> did you mean tiny?" in done.stderr
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [  # C08: refused with both values, before data
        (["model.width=16", "model.heads=3"], "model.heads=3 does not divide model.width=16"),
        (["schedule.warmup_steps=10", "train.steps=10"], "schedule.warmup_steps=10 is not below train.steps=10"),
        (["schedule.warmup_steps=20", "train.steps=10"], "schedule.warmup_steps=20 is not below train.steps=10"),
        (["train.steps=0"], "train.steps=0 must be at least 1"),
        (["train.global_batch_sequences=0"], "train.global_batch_sequences=0 must be at least 1"),
        (["model.context=1"], "model.context=1 must be at least 2"),
        (["optimizer.learning_rate=-1"], "optimizer.learning_rate=-1.0 must be above 0"),
        (["optimizer.learning_rate=inf"], "optimizer.learning_rate=inf must be finite"),
        (["model.dropout=1.0"], "model.dropout=1.0 must be below 1"),
        (["run.name='a=b'"], "run.name=a=b must be letters, digits, dots, dashes and underscores only"),
        (["model.positions=rotary", "model.width=30", "model.heads=2"], "the head width 15 is odd"),
        (
            ["parallel=horovod", "cluster=local4", "train.global_batch_sequences=6"],
            "train.global_batch_sequences=6 does not divide among 4 replicas\n     -> train.global_batch_sequences=8",
        ),
        (
            ["train.global_batch_sequences=8", "train.microbatch_sequences=3"],
            "train.microbatch_sequences=3 does not divide a replica's 8 sequences",
        ),
        (["schedule=wsd", "train.steps=120"], "schedule.warmup_steps=50 + schedule.decay_steps=100 is not below"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_impossible_values_are_refused(overrides: list[str], said: str) -> None:
    assert said in refusal(*overrides)


def test_no_warm_up_is_fine() -> None:
    assert make_plan(compose(["schedule.warmup_steps=0", "train.steps=1"])).steps == 1


# --- C02: 1e-4 is a number wherever it is written ---------------------------------------------------


def test_rates_in_exponent_form_are_floats_everywhere(tmp_path: Path) -> None:
    for text, value in (("1e-3", 1e-3), ("1e-5", 1e-5), ("3e-4", 3e-4)):
        config = compose([f"optimizer.learning_rate={text}"])
        assert type(config.optimizer.learning_rate) is float
        assert config.optimizer.learning_rate == value
        file = tmp_path / "config.yaml"
        file.write_text(OmegaConf.to_yaml(OmegaConf.create(config.as_dict())))
        again = load(OmegaConf.load(file))  # what a worker reads  # type: ignore[arg-type]
        assert again == config
        assert type(again.optimizer.learning_rate) is float
    assert type(compose(["optimizer.epsilon=1e-8"]).optimizer.epsilon) is float
    hand_written = tmp_path / "hand.yaml"
    hand_written.write_text(file.read_text().replace("0.0003", "3e-4"))
    assert load(OmegaConf.load(hand_written)).optimizer.learning_rate == 3e-4  # type: ignore[arg-type]


def test_wrong_types_name_the_key_and_the_type() -> None:
    text = refusal("optimizer.learning_rate=abc", "train.steps=1e3", "model.bias=maybe")
    assert "optimizer.learning_rate='abc' is not a number (type float)" in text
    assert "train.steps=1000.0 is not a whole number (type int)\n     -> train.steps=1000" in text
    assert "model.bias='maybe' is not true or false (type bool)" in text


# --- C01: = in a value -------------------------------------------------------------------------------


def test_an_unquoted_equals_sign_is_refused_with_the_quoted_form() -> None:
    text = refusal("run.directory=out/epoch=9-step=10")
    assert """'run.directory="out/epoch=9-step=10"'""" in text


def test_a_quoted_equals_sign_arrives_as_it_is(tmp_path: Path) -> None:
    for value in ("out/epoch=9-step=10", "s3://b/year=2020/month=1/"):
        config = compose([f'dataset.source="{value}"'])
        assert config.dataset.source == value
        file = tmp_path / "config.yaml"
        file.write_text(OmegaConf.to_yaml(OmegaConf.create(config.as_dict())))
        assert load(OmegaConf.load(file)).dataset.source == value  # type: ignore[arg-type]


# --- status and imports --------------------------------------------------------------------------------


def test_a_refusal_has_status_2_no_traceback_and_starts_nothing() -> None:
    done = train_py("modle=tiny", "train.steps=abc")
    assert done.returncode == 2
    assert "did you mean model?" in done.stderr
    assert "train.steps='abc'" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert not Path("outputs").exists()


def test_composing_planning_and_refusing_import_no_tensorflow() -> None:
    code = (
        "import sys; sys.argv = ['train.py', 'model.heads=5']\n"
        "import runpy\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 2, end.code\n"
        "from lm.compose import compose\nfrom lm.plan import make_plan\nmake_plan(compose([]))\n"
        "import lm.cli, hydra_plugins.lm_launchers._local\n"
        "heavy = {'tensorflow', 'mlflow', 'sagemaker', 'horovod', 'keras'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_shows_groups_and_examples() -> None:
    done = train_py("--help")
    assert done.returncode == 0
    assert "model: 10m, 125m" in done.stdout
    assert "python train.py parallel=horovod cluster=local2" in done.stdout


def test_the_hash_covers_what_changes_the_result_and_nothing_else() -> None:
    base = compose([]).hash()
    assert compose(["parallel=horovod", "cluster=local2"]).hash() == base
    same = ["dataset.shard_bytes=1000", "checkpoint.keep=9", "train.log_every_steps=1", "run.resume=must", "run.name=x"]
    other = ["run.seed=1", "train.steps=501", "optimizer.learning_rate=1e-3", "model.dropout=0.1"]
    assert all(compose([override]).hash() == base for override in same)
    hashes = {compose([override]).hash() for override in other}
    assert len(hashes) == len(other)
    assert base not in hashes


def test_the_number_of_replicas_is_in_the_hash_where_it_changes_the_rate() -> None:
    scaled = ["parallel=horovod", "parallel.lr_scaling=linear"]
    two, four = (compose([*scaled, f"cluster={cluster}"]).hash() for cluster in ("local2", "local4"))
    assert two != four


def test_files_differ_from_the_schema_only_where_they_say_so() -> None:
    """No model or dataset file repeats a default."""
    from lm.config import defaults

    for group in ("model", "dataset"):
        for name in options(group):
            values = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"), resolve=False)
            for key, value in values.items():  # type: ignore[union-attr]
                if key in ("defaults", "name", "source"):
                    continue
                assert defaults()[group][key] != value, f"{group}/{name}.yaml repeats {key}={value}"


@pytest.mark.parametrize(
    ("overrides", "said", "fix"),
    [
        (
            ["cluster=local2", "parallel.horovod=false"],
            "cluster.processes=2 are as many replicas",
            "parallel.horovod=true, or cluster=local",
        ),
        (["parallel.partitions=9"], "parallel.partitions=9 is more than model.layers=4", "4 or fewer"),
        (
            ["parallel.microbatches=3", "train.global_batch_sequences=8"],
            "does not divide a replica's 8 sequences",
            "parallel.microbatches=2",
        ),
        (["train.microbatch_sequences=2"], "parallel.microbatches cuts the batch", "train.microbatch_sequences=null"),
    ],
)
def test_what_partitions_and_microbatches_cannot_do(overrides: list[str], said: str, fix: str) -> None:
    shown = refusal("parallel=smp", *overrides)
    assert said in shown
    assert fix in shown


@pytest.mark.parametrize(
    ("overrides", "precision"),
    [
        ([], "float32"),
        (["cluster=sagemaker", "cluster.instance_type=ml.m5.xlarge"], "float32"),
        (["cluster=p3x1", "parallel=horovod"], "float16"),
        (["cluster=g5x1", "parallel=horovod"], "bfloat16"),
        (["cluster=p4dx2", "parallel=smp"], "float16"),  # TensorFlow 2.6 has few bfloat16 kernels for GPUs
        (["cluster=p3x1", "parallel=horovod", "train.precision=float32"], "float32"),
    ],
)
def test_gpus_train_in_half_precision_unless_told(overrides: list[str], precision: str) -> None:
    assert compose(overrides).train.precision == precision
