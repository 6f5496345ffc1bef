"""What a job is sent: the exact requests, the bundle, the limits, and what is missing without an account."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, train_py
from hypothesis import given
from hypothesis import strategies as st

from lm.catalog.checks import choose
from lm.compose import compose
from lm.failure import classify
from lm.plan import make_plan
from lm.refusal import ConfigError
from lm.report import StepDisplay, make_console
from lm.sagemaker import bundle
from lm.sagemaker.bundle import LIMIT_BYTES, is_secret, make_bundle
from lm.sagemaker.metrics import DEFINITIONS, read_line
from lm.sagemaker.places import NAME_CHARACTERS, job_name
from lm.sagemaker.request import make_request

DEFAULT = compose([])
GOLDEN = ROOT / "tests/golden/sagemaker"
JOBS = {
    "smp": ["model=1b", "parallel=smp", "cluster=p3x10"],
    "sdp": ["model=350m", "parallel=sdp", "cluster=p4dx2", "dataset=pile", "cluster.dataset_uri=s3://pile/prepared"],
    "horovod": [
        "parallel=horovod",
        "cluster=g5x1",
        "cluster.spot=true",
        "cluster.max_run_seconds=3600",
        "cluster.file_system_id=fs-0123456789abcdef0",
        "cluster.file_system_path=/prepared/pile",
        "cluster.subnets=[subnet-0a]",
        "cluster.security_groups=[sg-0b]",
        "cluster.environment=['NCCL_DEBUG=INFO']",
    ],
    "single": ["cluster=sagemaker", "cluster.instance_type=ml.m5.xlarge", "cluster.warm_pool_seconds=600"],
}
ACCOUNT = ["cluster.region=us-east-1", "cluster.bucket=bucket", "cluster.role=arn:aws:iam::123456789012:role/training"]


def request(*overrides: str) -> dict[str, Any]:
    """The request of a command, the job's name and the commit, which no two have alike, replaced."""
    config = compose([*ACCOUNT, *overrides])
    choice, problems = choose(config, make_plan(config))
    assert not problems
    made = make_request(config, choice, "lm-golden")
    commit = next(tag for tag in made["Tags"] if tag["Key"] == "lm:git-commit")
    assert re.fullmatch(r"([0-9a-f]{40}(-modified)?|unknown)", commit["Value"])
    commit["Value"] = "COMMIT"
    return made


@pytest.mark.parametrize("name", JOBS)
def test_the_request_is_the_golden_one(name: str) -> None:
    """UPDATE_GOLDEN=1 writes them anew; what changed is then to be read in the commit."""
    made = json.dumps(request(*JOBS[name]), indent=1) + "\n"
    path = GOLDEN / f"{name}.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(made)
    assert made == path.read_text()


def test_a_dry_run_needs_neither_account_nor_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command shows and saves the request; a socket that is opened fails it."""
    guard = tmp_path / "guard/sitecustomize.py"
    guard.parent.mkdir()
    guard.write_text("import socket\ndef no(*a, **k): raise RuntimeError('network')\nsocket.getaddrinfo = no\n")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "SAGEMAKER_"))}
    environment = {**clean, "HOME": str(tmp_path), "PYTHONPATH": str(guard.parent), "AWS_EC2_METADATA_DISABLED": "true"}
    command = [sys.executable, str(ROOT / "train.py"), "model=1b", "parallel=smp", "cluster=p3x10"]
    done = subprocess.run(
        [*command, "cluster.dry_run=true"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (saved,) = tmp_path.glob("outputs/default/*/sagemaker/dry-request.json")
    shown = json.loads(saved.read_text())
    assert json.dumps(shown, indent=1) in done.stdout
    assert shown["ResourceConfig"]["InstanceCount"] == 10
    assert "SET-cluster.role" in shown["RoleArn"]
    without = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert without.returncode == 2
    assert "no AWS credentials were found" in without.stderr
    assert "cluster.region=us-east-1, or AWS_REGION" in without.stderr
    assert "cluster.role" in without.stderr
    assert "cluster.dry_run=true shows the request without an account" in without.stderr
    assert "Traceback" not in without.stderr


def test_a_sweep_makes_a_request_a_point() -> None:
    sweep = ["-m", "optimizer.learning_rate=1e-4,3e-4", "cluster=g5x1", "cluster.dry_run=true", "cluster.bucket=b-1"]
    done = train_py(*sweep)
    assert done.returncode == 0, done.stderr
    assert len(list(Path("outputs/default").glob("*/sagemaker/dry-request.json"))) == 2


def test_the_launcher_wants_a_cluster_of_its_own() -> None:
    done = train_py("-m", "hydra/launcher=sagemaker", "run.seed=1,2")
    assert done.returncode == 2
    assert "hydra/launcher=sagemaker with cluster=local, which names no machines" in done.stderr
    assert "Traceback" not in done.stderr


def test_detach_is_an_option_of_the_command() -> None:
    done = train_py("cluster=g5x1", "parallel=horovod", "cluster.dry_run=true", "--detach")
    assert done.returncode == 0, done.stderr


def test_no_limit_of_the_api_is_passed() -> None:
    """S01: the configuration is a file, so however long it is the request is not; what is a user's own is checked."""
    long = request(*JOBS["smp"], f"dataset.source='{'x' * 5000}'", "dataset=pile", "parallel.partitions=4")
    assert len(long["HyperParameters"]) < 20
    assert max(map(len, long["HyperParameters"].values())) < 2500
    for variable, said in (
        (f"A={'v' * 513}", "cluster.environment.A: its value has 513 characters, and SageMaker takes 512"),
        (f"{'K' * 513}=v", "its name has 513 characters"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            request(*JOBS["single"], f'cluster.environment=["{variable}"]')
    many = ",".join(f'"V{number}=x"' for number in range(101))
    with pytest.raises(ConfigError, match="has 101 variables, and SageMaker takes 100"):
        request(*JOBS["single"], f"cluster.environment=[{many}]")


@given(name=st.from_regex(r"[A-Za-z0-9._-]{1,80}", fullmatch=True))
def test_job_names_are_valid_unique_and_readable(name: str) -> None:
    config = dataclasses.replace(DEFAULT, run=dataclasses.replace(DEFAULT.run, name=name))
    first, second = job_name(config), job_name(config)
    for made in (first, second):
        assert len(made) <= NAME_CHARACTERS
        assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", made)
        assert made.startswith("lm-")
        assert config.hash() in made
    assert first != second


def test_the_bundle_is_what_git_knows_less_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = tmp_path / "checkout"
    package = checkout / "lm"
    (package / "sagemaker").mkdir(parents=True)
    for name in ("loop.py", "new.py", ".env", "credentials.json", "ignored.bin", "sagemaker/requirements.txt"):
        (package / name).write_text("omegaconf\nmlflow-skinny\n")
    (checkout / ".gitignore").write_text("ignored.bin\n")
    for command in (["init", "-q"], ["add", "lm/loop.py", "lm/.env"]):
        subprocess.run(["git", *command], cwd=checkout, check=True)
    monkeypatch.setattr(bundle, "PACKAGE", package)
    monkeypatch.setattr(bundle, "__file__", str(package / "sagemaker/bundle.py"))
    left_out = make_bundle(compose(["cluster=g5x1"]), tmp_path / "bundle")
    sent = sorted(str(path.relative_to(tmp_path / "bundle")) for path in (tmp_path / "bundle").rglob("*.*"))
    assert [name for name in sent if name.startswith("lm/")] == [
        "lm/loop.py",
        "lm/new.py",
        "lm/sagemaker/requirements.txt",
    ]
    assert sorted(path.name for path in left_out) == [".env", "credentials.json"]
    assert (tmp_path / "bundle/requirements.txt").read_text() == "omegaconf\n"  # MLflow's is a file of this machine
    keyed = compose(["cluster=g5x1", 'cluster.environment=["API_KEY=secret-value"]'])
    make_bundle(keyed, tmp_path / "keyed")
    assert not [path for path in (tmp_path / "keyed").rglob("*.*") if "secret-value" in path.read_text()]
    (package / "big.bin").write_bytes(bytes(LIMIT_BYTES))
    with pytest.raises(ConfigError, match=r"the largest: lm/big\.bin 16\.0 MiB"):
        make_bundle(compose(["cluster=g5x1"]), tmp_path / "bundle")


@pytest.mark.parametrize("name", [".env", ".env.local", "server.pem", "id_rsa", "credentials", ".aws/config"])
def test_secrets_are_known_by_their_names(name: str) -> None:
    assert is_secret(bundle.PACKAGE / name)
    assert not is_secret(bundle.PACKAGE / "environment.py")


def test_the_sdks_telemetry_is_off_unless_the_user_turns_it_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lm.sagemaker.aws import sdk_settings

    def opted_out() -> bool:
        return sdk_settings()["SageMaker"]["PythonSDK"]["Modules"]["TelemetryOptOut"]

    assert opted_out() is True
    own = tmp_path / "config.yaml"
    own.write_text("SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: false\n")
    monkeypatch.setenv("SAGEMAKER_USER_CONFIG_OVERRIDE", str(own))
    assert opted_out() is False


def test_the_patterns_read_the_lines_that_a_run_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """SageMaker's regular expressions and ours are the same, and meet what lm.report writes."""
    import logging

    from lm.report import open_log

    console = make_console()
    open_log(None, console, chief=True)
    display = StepDisplay(console, 500, 0, chief=True)
    line = dict(step=7, loss=8.25, learning_rate=3e-4, grad_norm=0.5, tokens_per_second=6050.0, mfu=0.44)
    display.logged({**line, "data_wait_fraction": 0.003})
    display.evaluated(7, {"val_loss": 4.5, "val_bits_per_byte": 1.875}, 1.9)
    logging.getLogger("lm").handlers.clear()
    training, evaluation = capsys.readouterr().out.splitlines()
    plan = make_plan(compose([]))
    assert read_line(training, plan, 1.0) == {
        **line,
        "time": 1.0,
        "tokens": 7 * plan.tokens_per_step,
        "data_wait_fraction": 0.003,
    }
    assert read_line(evaluation, plan, 1.0) == {
        "step": 7,
        "time": 1.0,
        "tokens": 7 * plan.tokens_per_step,
        "val_loss": 4.5,
        "val_bits_per_byte": 1.875,
    }
    assert read_line("something else", plan, 1.0) is None
    for definition in DEFINITIONS:
        assert re.search(definition["Regex"], training) or re.search(definition["Regex"], evaluation)


@pytest.mark.parametrize(
    ("kind", "reason", "cause"),
    [  # texts that people met in public
        ("capacity", "CapacityError: Unable to provision requested ML compute capacity. Please retry.", ""),
        (
            "quota",
            "An error occurred (ResourceLimitExceeded) when calling the CreateTrainingJob operation: The account-level "
            "service limit 'ml.p3.2xlarge for training job usage' is 0 Instances",
            "",
        ),
        ("data", "ClientError: Data download failed:Unable to download object s3://a/b (AccessDenied)", ""),
        ("spot", "MaxWaitTimeExceeded", ""),
        ("time", "MaxRuntimeExceeded", ""),
        ("account", "An error occurred (AccessDenied) when calling the CreateTrainingJob operation: iam:PassRole", ""),
        ("service", "InternalServerError: We encountered an internal error. Please try again.", ""),
        (
            "out of memory",
            "AlgorithmError: ExecuteUserScriptError:\nExitCode 1",
            "Traceback (most recent call last)\nResourceExhaustedError: OOM when allocating tensor with shape[2,1023]",
        ),
        ("out of memory", "ClientError: Please use an instance type with more memory, or reduce the size", ""),
        ("out of memory", "AlgorithmError: mpirun noticed that process rank 7 exited on signal 9 (Killed).", ""),
        ("code", "AlgorithmError: ExecuteUserScriptError:\nExitCode 1", "Traceback\nTypeError: unsupported operand"),
        ("configuration", "AlgorithmError: ExecuteUserScriptError:\nExitCode 2", "refused: 1 problem"),
    ],
)
def test_reasons_have_their_class(kind: str, reason: str, cause: str) -> None:
    assert classify(reason, cause).kind == kind
