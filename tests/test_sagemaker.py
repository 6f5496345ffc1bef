"""Jobs, from the command to the result, against SageMaker's API on loopback: tests/sagemaker_service.py runs them."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import only_run, run_here, train_lines, train_py
from rich.console import Console
from sagemaker_service import BUCKET, Service, start_service

from lm.cli import main as lm
from lm.compose import compose
from lm.job import status_of
from lm.refusal import ConfigError
from lm.run import RunFailed
from lm.sagemaker import finish
from lm.sagemaker.follow import Follower
from lm.sagemaker.launch import run_job
from lm.sweep.ledger import Ledger

pytestmark = [pytest.mark.processes, pytest.mark.tracked]
QUICK = {"poll_seconds": 0.2, "retry_seconds": 0.05}


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    started = start_service(tmp_path / "opt-ml", monkeypatch)
    yield started
    for process in started.processes.values():
        process.kill()
    for thread in started.threads:
        thread.join(20)
    started.server.stop()


@pytest.fixture
def job(small: list[str]) -> list[str]:
    """A run of 20 steps on one small instance."""
    return [*small, "cluster=sagemaker", "cluster.instance_type=ml.m5.xlarge", f"cluster.bucket={BUCKET}"]


def submit(overrides: list[str], **how: Any) -> int:
    return run_job(compose(overrides), **{**QUICK, **how})


def keys(service: Service) -> list[str]:
    return [entry["Key"] for entry in service.client("s3").list_objects_v2(Bucket=BUCKET).get("Contents", [])]


def test_a_job_is_submitted_followed_and_brought_home(
    service: Service, job: list[str], small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The losses are those of a run here; what SageMaker left in mid-upload is not brought home."""
    assert submit([*job, "run.experiment=there"]) == 0
    shown = capsys.readouterr().out
    run = only_run("there")
    run_here([*small, "run.experiment=here"])
    there, here = (train_lines(path) for path in (run, only_run("here")))
    assert [line["loss"] for line in there] == [line["loss"] for line in here]
    assert "Training" in shown
    assert "step 20/20  loss" in shown
    assert "step 20, in S3 with the checksums that it was written with" in shown
    assert "USD at the table's price" in shown
    assert [path.name for path in sorted(run.glob("checkpoints/*"))] == ["step-00000020"]
    assert not list(run.rglob("*.sagemaker-uploading"))
    stored = keys(service)
    assert [key for key in stored if key.endswith("/sourcedir.tar.gz")]
    assert [key for key in stored if key.endswith("/output/model.tar.gz")]
    assert sum(key.endswith("/manifest.json") for key in stored) == 1
    # MLflow was fed from here while the job ran
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{Path('outputs/mlflow.db').resolve()}")  # it keeps a store by its URI
    (tracked,) = client.search_runs([client.get_experiment_by_name("there").experiment_id])
    assert tracked.info.status == "FINISHED"
    assert tracked.data.metrics["loss"] == pytest.approx(here[-1]["loss"], abs=5e-5)  # as the log rounds it
    # the same command again says that it is done, and sends no second job
    assert submit([*job, "run.experiment=there"]) == 0
    assert "this run is done" in capsys.readouterr().out
    assert len(service.processes) == 1
    with pytest.raises(ConfigError, match=r"run.resume=never, and s3://training-bucket/lm/runs/there/.* of step 20"):
        submit([*job, "run.experiment=there", "run.resume=never"])


def test_a_stopped_job_goes_on_from_its_checkpoint(
    service: Service, job: list[str], small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """lm stop saves; the same command resumes from S3; the losses are those of a run that nobody stopped."""
    long = ["train.steps=400", "checkpoint.every_steps=400", "train.eval_every_steps=400"]
    slow = [*job, *long, "run.experiment=stopped"]
    service.hold.clear()
    assert submit([*slow, "cluster.detach=true"]) == 0
    (name,) = [word for word in capsys.readouterr().out.split() if word.startswith("lm-")][:1]

    def stop_after_some_steps() -> None:
        service.hold.set()
        metrics = service.folder / name / "checkpoints/metrics.jsonl"
        while not (metrics.exists() and '"step": 30,' in metrics.read_text()):
            time.sleep(0.02)
        lm(["stop", name])

    threading.Thread(target=stop_after_some_steps).start()
    from lm.sagemaker.jobs import attach

    assert attach(name, None, poll_seconds=0.2) == 143
    stopped = json.loads((only_run("stopped") / "summary.json").read_text())
    assert stopped["status"] == "stopped"
    assert 30 <= stopped["checkpoint_step"] < 400
    assert submit(slow) == 0
    assert f"resumed at step {stopped['checkpoint_step']}" in capsys.readouterr().out
    run_here([*small, *long, "run.experiment=whole"])
    there, whole = (train_lines(only_run(name)) for name in ("stopped", "whole"))
    assert [line["loss"] for line in there] == [line["loss"] for line in whole]


def test_a_trial_is_ended_early_by_its_run(service: Service, job: list[str]) -> None:
    """What Optuna's pruning does: the job that trains a configuration saves and stops; where there is none, nothing."""
    from lm.sagemaker.jobs import stop_run

    long = [*job, "train.steps=400", "checkpoint.every_steps=400", "train.eval_every_steps=400"]
    stop_run(compose(long))

    def stop_after_some_steps() -> None:
        while not list(service.folder.glob("*/checkpoints/metrics.jsonl")):
            time.sleep(0.02)
        stop_run(compose(long))

    threading.Thread(target=stop_after_some_steps).start()
    assert submit(long) == 143
    assert json.loads((only_run() / "summary.json").read_text())["status"] == "stopped"


def test_a_failed_job_tells_its_class_and_its_first_traceback(
    service: Service, job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*job, "optimizer.learning_rate=1e30", "optimizer.clip_norm=null", "run.experiment=broken"]
    assert status_of(lambda: submit(overrides)) == 1
    shown = capsys.readouterr()
    assert "failed: non-finite loss: AlgorithmError: step" in shown.err
    assert "a lower optimizer.learning_rate" in shown.err
    assert "first cause:\nfailed: step" in shown.err
    assert "Traceback" not in shown.err
    assert json.loads((only_run("broken") / "summary.json").read_text())["status"] == "failed"


def test_capacity_is_waited_for_and_other_types_are_tried(
    service: Service, job: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    service.no_capacity_for = ["ml.m5.xlarge", "ml.c5.4xlarge", "ml.m5.xlarge"]
    assert submit([*job, "cluster.fallback_instance_types=[ml.c5.4xlarge]"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("no capacity for ml.m5.xlarge") == 2
    assert "retry 1 of 3" in shown
    (name,) = service.processes
    sent = service.client("sagemaker").describe_training_job(TrainingJobName=name)
    assert sent["ResourceConfig"]["InstanceType"] == "ml.c5.4xlarge"
    service.no_capacity_for = ["ml.m5.xlarge"] * 4
    with pytest.raises(RunFailed, match=r"^capacity: CapacityError"):
        submit([*job, "cluster.capacity_retries=1", "run.seed=2"])


def test_jobs_are_listed_attached_to_from_elsewhere_and_compared(
    service: Service,
    job: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    service.hold.clear()
    assert submit([*job, "cluster.detach=true"]) == 0
    name = next(word for word in capsys.readouterr().out.split() if word.startswith("lm-"))
    assert submit([*job, "cluster.detach=true"]) == 0  # two jobs would write over each other's checkpoints
    assert f"{name} is at work on this run already" in capsys.readouterr().out
    service.hold.set()
    assert lm(["diff-request", *job]) == 0
    assert capsys.readouterr().out.startswith("the same request as outputs/default/")
    assert lm(["diff-request", *job, "cluster.volume_gib=7"]) == 0
    changed = capsys.readouterr().out
    assert '-  "VolumeSizeInGB": 100' in changed
    assert '+  "VolumeSizeInGB": 7' in changed
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    terminal = Console(force_terminal=True, width=120, file=io.StringIO())
    monkeypatch.setattr(finish, "make_console", lambda: terminal)
    assert lm(["attach", name]) == 0
    shown = terminal.file.getvalue()
    assert "finished at step 20 of 20" in shown
    assert "20/20" in shown  # the bar
    assert "step 20/20  loss" not in shown  # in place of the line
    assert len(train_lines(only_run())) == 20
    assert lm(["jobs"]) == 0
    listed = capsys.readouterr().out
    assert name in listed
    assert "Completed" in listed
    assert lm(["stop", name]) == 0
    assert "has ended already: Completed" in capsys.readouterr().out
    assert lm(["attach", "lm-none"]) == 2
    assert "there is no job lm-none in us-east-1" in capsys.readouterr().err


def test_data_that_is_not_what_s3_has_is_refused(service: Service, job: list[str], tmp_path: Path) -> None:
    """A set of the same name from other text is never mixed with it; one that is elsewhere has to be there."""
    other = {"Bucket": BUCKET, "Key": "lm/datasets/words/manifest.json", "Body": b"{}"}
    service.client("s3").put_object(**other)
    with pytest.raises(ConfigError, match="lm/datasets/words was prepared from other text"):
        submit(job)
    with pytest.raises(ConfigError, match="s3://training-bucket/none is no prepared dataset"):
        submit([*job, f"cluster.dataset_uri=s3://{BUCKET}/none"])
    assert not service.processes


def test_a_run_that_was_begun_here_goes_on_there(service: Service, job: list[str], small: list[str]) -> None:
    """The newest checkpoint is uploaded with its metrics; steps 1 to 10 are here, the others there."""
    same = ["schedule=constant", "run.directory=outputs/moved"]
    run_here([*small, *same, "train.steps=10", "schedule.warmup_steps=3"])
    assert submit([*job, *same, "schedule.warmup_steps=3"]) == 0
    run_here([*small, "schedule=constant", "schedule.warmup_steps=3", "run.experiment=whole"])
    moved, whole = (train_lines(path) for path in (Path("outputs/moved"), only_run("whole")))
    assert [line["loss"] for line in moved] == [line["loss"] for line in whole]


def test_a_sweep_has_so_many_jobs_at_once_and_is_checked_before_the_first(service: Service, job: list[str]) -> None:
    """Two points at once, both finished; of two points one refused, before the other was made."""
    points = ["train.global_batch_sequences=8,4", "cluster.max_parallel_jobs=2", "run.experiment=sweep"]
    done = train_py("-m", *job, *points)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(Path("outputs/sweep").glob("tiny-*/summary.json"))) == 2
    assert "job 1: step 20/20  loss" in done.stdout
    (ledger,) = Path("outputs/sweep").glob("sweep-*/ledger.json")
    assert [job.status for job in Ledger(ledger.parent).all()] == ["done", "done"]
    again = train_py("-m", *job, *points)
    assert again.stdout.count("is done already") == 2
    assert len(service.processes) == 2
    refused = train_py("-m", *job, "cluster.warm_pool_seconds=600,7200", "cluster.dry_run=true")
    assert refused.returncode == 1
    assert "cluster.warm_pool_seconds=7200 is above SageMaker's 3600" in refused.stderr
    assert "job 1 failed (configuration)" in refused.stderr


def test_a_job_that_was_killed_outright_goes_on_from_the_last_whole_checkpoint(
    service: Service, job: list[str], small: list[str]
) -> None:
    """No summary, a checkpoint whose weights never reached S3, an older summary here: the step before it is the one."""
    overrides = [*job, "train.steps=20", "run.directory=outputs/killed"]
    run_here([*small, "train.steps=10", "run.directory=outputs/killed", "schedule=constant", "schedule.warmup_steps=3"])
    constant = ["schedule=constant", "schedule.warmup_steps=3"]
    config = compose([*overrides, *constant])
    bucket, prefix = BUCKET, f"lm/runs/default/tiny-{config.hash()}/run/checkpoints/step-00000019"
    half = json.loads(Path("outputs/killed/checkpoints/step-00000010/checkpoint.json").read_text())
    service.client("s3").put_object(Bucket=bucket, Key=f"{prefix}/checkpoint.json", Body=json.dumps(half).encode())
    assert submit([*overrides, *constant]) == 0
    run_here([*small, *constant, "run.experiment=whole"])
    killed, whole = (train_lines(path) for path in (Path("outputs/killed"), only_run("whole")))
    assert [line["loss"] for line in killed] == [line["loss"] for line in whole]


def test_following_that_is_interrupted_leaves_the_job_and_its_run_alone(
    service: Service, job: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C: exit status 130, the job goes on, and MLflow's run is not failed."""

    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Follower, "_look", interrupt)
        assert submit(job) == 130
    assert "goes on; lm attach lm-tiny-" in capsys.readouterr().out
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{Path('outputs/mlflow.db').resolve()}")  # it keeps a store by its URI
    (tracked,) = client.search_runs([client.get_experiment_by_name("default").experiment_id])
    assert tracked.info.status == "RUNNING"
    assert submit(job) == 0  # the same job, followed again
    assert len(service.processes) == 1
    assert client.get_run(tracked.info.run_id).info.status == "FINISHED"
    names = {artifact.path for artifact in client.list_artifacts(tracked.info.run_id)}
    assert {"summary.json", "sample.txt"} <= names


def test_values_arrive_as_they_were_composed(service: Service, job: list[str]) -> None:
    """C01, C02, S03: whatever a value looks like, the job's configuration is this one, type for type."""
    overrides = [
        *job,
        "model.tied_head=false",
        "optimizer.learning_rate=1e-4",
        "tracking.uri=null",
        """cluster.environment=["NOTE=a=b, c: {d}\\n'e'","EMPTY="]""",
        "cluster.detach=true",
        "model.activation=swiglu",
        "model.feedforward_width=48",
    ]
    service.hold.clear()
    config = compose(overrides)
    assert submit(overrides) == 0
    from omegaconf import OmegaConf

    service.hold.set()
    for thread in service.threads:
        thread.join(120)
    (folder,) = service.folder.iterdir()
    received = OmegaConf.to_container(OmegaConf.load(folder / "code/config.yaml"))
    sent = config.as_dict()
    sent["cluster"]["environment"] = []  # which may have keys in it, and is in the request alone
    sent["profiling"]["name"] = "none"  # Debugger's agent measures the host there
    assert json.dumps(received) == json.dumps(sent)  # 1 is not 1.0, null is not "null"
    assert config.cluster.environment == ["NOTE=a=b, c: {d}\\n'e'", "EMPTY="]
