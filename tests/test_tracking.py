"""MLflow on sqlite and behind a real server: names and limits, resuming, outages, statuses."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest
from conftest import free_port, only_run, run_here, train_lines, train_py

from lm.cli import main
from lm.run import RunFailed, RunFolder
from lm.schema import Config
from lm.tracking import sender
from lm.tracking.names import absolute, flatten, legal_names
from lm.tracking.run import replay

pytestmark = pytest.mark.tracked


def client(uri: str = "sqlite:///outputs/mlflow.db") -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(absolute(uri))


def runs_of(mlflow: Any, experiment: str = "default") -> List[Any]:
    return mlflow.search_runs([mlflow.get_experiment_by_name(experiment).experiment_id])


def test_a_run_arrives_whole(small: List[str]) -> None:
    run_here(small)
    (run,) = runs_of(client())
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.learning_rate"] == "0.003"
    assert run.data.params["model.width"] == "32"
    history = client().get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [
        (line["step"], line["loss"]) for line in train_lines(only_run())
    ]
    assert len(client().get_metric_history(run.info.run_id, "val_loss")) == 2
    shares = [value for name, value in run.data.metrics.items() if name.startswith("goodput/")]
    assert sum(shares) == pytest.approx(1)
    names = {artifact.path for artifact in client().list_artifacts(run.info.run_id)}
    assert names == {"config.yaml", "plan.json", "summary.json", "sample.txt", "loss_curve.html"}
    curve = Path(client().download_artifacts(run.info.run_id, "loss_curve.html")).read_text()
    assert curve.count('class="line"') == 2
    assert run.data.tags["lm.dataset"] == json.loads((only_run() / "summary.json").read_text())["dataset"]


def test_the_commit_that_a_run_was_made_at_is_its_tag(small: List[str]) -> None:
    for words in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x", "--allow-empty"]):
        subprocess.run(["git", *words], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    run_here([*small, "train.steps=6"])
    (run,) = runs_of(client())
    assert run.data.tags["mlflow.source.git.commit"] == head


def test_a_failed_run_is_failed(small: List[str]) -> None:
    with pytest.raises(RunFailed):
        run_here([*small, "optimizer.learning_rate=1e6", "train.steps=60"])
    (run,) = runs_of(client())
    assert run.info.status == "FAILED"
    values = [point.value for point in client().get_metric_history(run.info.run_id, "grad_norm")]
    assert all(math.isfinite(value) for value in values)  # what is not finite is in metrics.jsonl alone


def test_a_resumed_run_keeps_its_id_and_records_what_changed(small: List[str]) -> None:
    """ML03: no parameter is written twice, no step either; the changed setting is a tag."""
    constant = [*small, "schedule=constant", "schedule.warmup_steps=1"]
    run_here([*constant, "train.steps=5"])
    summary = run_here([*constant, f"run.directory={only_run()}", "train.steps=20", "optimizer.weight_decay=0"])
    assert summary["step"] == 20
    (run,) = runs_of(client())
    assert run.info.status == "FINISHED"
    assert run.data.params["train.steps"] == "5"
    assert run.data.tags["changed.train.steps"] == "5 -> 20"
    assert run.data.tags["changed.optimizer.weight_decay"] == "0.1 -> 0.0"
    steps = [point.step for point in client().get_metric_history(run.info.run_id, "loss")]
    assert steps == list(range(1, 21))


# --- limits (ML01) -----------------------------------------------------------------------------------


def test_names_that_mlflow_refuses_are_changed_and_stay_apart() -> None:
    names = ["a.b", "acc@5", "acc+5", "x[0]", "k=v", "n" * 300, "n" * 299 + "m", "val/acc@5"]
    legal = legal_names(names)
    assert legal["a.b"] == "a.b"
    assert len(set(legal.values())) == len(names)
    assert all(len(name) <= 250 for name in legal.values())


def test_a_big_configuration_with_odd_names_arrives_and_training_goes_on(
    small: List[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd: Dict[str, Any] = {str(i): i for i in range(150)}
    odd.update({"key@[+=]": 1, "k" * 300: 2, "long": "v" * 7000})
    as_dict = Config.as_dict
    monkeypatch.setattr(Config, "as_dict", lambda self: {**as_dict(self), "extra": odd})
    assert run_here(small)["status"] == "finished"
    (run,) = runs_of(client())
    assert run.info.status == "FINISHED"
    assert run.data.params["extra.149"] == "149"
    assert len(run.data.params) == len(flatten(stored_config())) > 150
    assert len(run.data.params["extra.long"]) == 6000
    assert "takes these parameters under other names" in (only_run() / "log.txt").read_text()
    artifact = client().download_artifacts(run.info.run_id, "config.yaml")
    assert Path(artifact).read_text() == (only_run() / "config.yaml").read_text()


def stored_config() -> Dict[str, Any]:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(only_run() / "config.yaml"))  # type: ignore[return-value]


# --- outages -----------------------------------------------------------------------------------------


def test_an_outage_stops_nothing_and_replay_sends_what_it_kept(
    small: List[str], server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "CLOSE_SECONDS", 6.0)
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    assert run_here([*small, f"tracking.uri={uri}"])["status"] == "finished"
    log = (only_run() / "log.txt").read_text()
    assert "training goes on" in log
    assert "lm track replay" in log
    with pytest.raises(RunFailed, match="does not take it"):
        replay(only_run())
    server(port)
    assert "is up to step 20" in replay(only_run())
    (run,) = runs_of(client(uri))
    assert run.info.status == "FINISHED"
    assert len(client(uri).get_metric_history(run.info.run_id, "loss")) == 20
    replay(only_run())  # again changes nothing
    assert len(client(uri).get_metric_history(run.info.run_id, "loss")) == 20


@pytest.fixture
def postgresql() -> Iterator[str]:
    """A PostgreSQL of Debian's package, of its own, as SQLAlchemy names it. It does not run as root."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1]
    user = "postgres" if os.getuid() == 0 else None
    folder, port = Path(tempfile.mkdtemp()), free_port()
    if user:
        shutil.chown(folder, user)
    subprocess.run(
        [programs / "initdb", "-D", folder / "data", "-U", "lm", "--auth=trust"], user=user, cwd=folder, check=True
    )
    command = [programs / "postgres", "-D", folder / "data", "-p", str(port), "-k", folder, "-h", "127.0.0.1"]
    server = subprocess.Popen(command, user=user, cwd=folder, stderr=subprocess.DEVNULL)
    ready = [programs / "pg_isready", "-h", "127.0.0.1", "-p", str(port)]
    while subprocess.run(ready, stdout=subprocess.DEVNULL, check=False).returncode:
        assert server.poll() is None
        time.sleep(0.1)
    yield f"postgresql+psycopg2://lm@127.0.0.1:{port}/postgres"
    server.send_signal(signal.SIGINT)
    server.wait()
    shutil.rmtree(folder)


def test_a_server_on_postgresql_gets_a_sweep_of_two(small: List[str], server: Any, postgresql: str) -> None:
    """The whole way by HTTP: parent, children, metrics, system metrics, artifacts."""
    port = free_port()
    server(port, postgresql)
    words = [*small, "optimizer.learning_rate=1e-3,2e-3", "run.experiment=pg", "train.steps=6"]
    done = train_py("-m", *words, f"tracking.uri=http://127.0.0.1:{port}")
    assert done.returncode == 0, done.stdout + done.stderr
    mlflow = client(f"http://127.0.0.1:{port}")
    runs = runs_of(mlflow, "pg")
    (parent,) = [run for run in runs if "lm.sweep_folder" in run.data.tags]
    children = [run for run in runs if run is not parent]
    assert [run.info.status for run in runs] == ["FINISHED"] * 3
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {run.data.params["optimizer.learning_rate"] for run in children} == {"0.001", "0.002"}
    for run in children:
        assert len(mlflow.get_metric_history(run.info.run_id, "loss")) == 6
        assert 0 < run.data.metrics["system/system_memory_usage_percentage"] < 100
        assert "config.yaml" in {artifact.path for artifact in mlflow.list_artifacts(run.info.run_id)}
    assert parent.data.metrics["best/val_loss"] == min(run.data.metrics["val_loss"] for run in children)


def test_the_arn_of_sagemakers_server_is_a_tracking_uri(
    small: List[str], server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sagemaker-mlflow signs the requests to a server in AWS's place, which like it leaves artifacts to the client."""
    port = free_port()
    server(port, proxy=False)
    monkeypatch.setenv("SAGEMAKER_MLFLOW_CUSTOM_ENDPOINT", f"http://127.0.0.1:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    arn = "arn:aws:sagemaker:us-east-1:123456789012:mlflow-tracking-server/mine"
    assert run_here([*small, f"tracking.uri='{arn}'", "train.steps=6"])["status"] == "finished"
    (run,) = runs_of(client(f"http://127.0.0.1:{port}"))
    assert run.info.status == "FINISHED"
    assert json.loads((only_run() / "mlflow.json").read_text())["uri"] == arn


def test_a_sweep_without_its_server_is_replayed(
    small: List[str], server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    words = [*small, "optimizer.learning_rate=1e-3,-1", "train.steps=6", f"tracking.uri=http://127.0.0.1:{port}"]
    done = train_py("-m", *words)
    assert done.returncode == 1
    assert "lm track replay outputs/default/sweep-" in done.stdout + done.stderr
    server(port)
    (ledger,) = Path("outputs/default").glob("sweep-*/ledger.json")
    (run,) = Path("outputs/default").glob("*/summary.json")
    assert run.exists()
    assert main(["track", "replay", str(ledger.parent)]) == 0
    assert "is the parent of 2 jobs" in capsys.readouterr().out
    runs = runs_of(client(f"http://127.0.0.1:{port}"))
    assert sorted(run.info.status for run in runs) == ["FAILED", "FAILED", "FINISHED"]


def test_a_server_that_answers_slowly_holds_no_step_up(small: List[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and never answers: the run's time is its own, and nothing is lost."""
    monkeypatch.setattr(sender, "CLOSE_SECONDS", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        summary = run_here([*small, f"tracking.uri=http://127.0.0.1:{silent.getsockname()[1]}"])
    assert summary["status"] == "finished"
    lines = train_lines(only_run())
    assert len(lines) == 20
    assert lines[-1]["time"] - lines[1]["time"] < 10  # a request's time-out, which a step that waits would reach
    assert "nothing is lost: lm track replay" in (only_run() / "log.txt").read_text()


def test_tracking_can_be_turned_off(small: List[str]) -> None:
    assert run_here([*small, "tracking.uri=null"])["status"] == "finished"
    assert not Path("outputs/mlflow.db").exists()


# --- the run folder as the buffer --------------------------------------------------------------------


def test_numbers_that_are_not_finite_are_null_and_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.append_metrics({"step": 1, "loss": math.nan, "grad_norm": 2.0})
    assert json.loads(run.metrics.read_text()) == {
        "step": 1,
        "loss": None,
        "grad_norm": 2.0,
        "nonfinite": ["loss"],
    }


def test_a_line_that_a_kill_cut_short_is_left_out_and_later_steps_are_forgotten(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in range(1, 6):
        run.append_metrics({"step": step})
    with open(run.metrics, "a") as file:
        file.write('{"step": 6, "lo')
    assert [line["step"] for line, _ in run.metric_lines()] == [1, 2, 3, 4, 5]
    run.forget_metrics_after(3)
    run.append_metrics({"step": 4})
    assert [line["step"] for line, _ in run.metric_lines()] == [1, 2, 3, 4]
