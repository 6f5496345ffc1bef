"""MLflow, fed from metrics.jsonl by a thread: a step never waits for it, and an outage loses nothing.

The run folder is the buffer. mlflow.json remembers the run's id and the last steps that arrived, so that a resumed
run goes on in the same MLflow run and `lm track replay` can send what an outage kept back.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

from lm.charts import Line, curves, page
from lm.config import load_file
from lm.run import OUTPUTS, RunFailed, RunFolder, kind_of, write_whole
from lm.schema import Config

SYNC_SECONDS = 2.0
CLOSE_SECONDS = 30.0
BATCH_METRICS = 1000  # MLflow's limits on one log_batch call: 1,000 metrics, 100 parameters
BATCH_PARAMETERS = 100
KEY_CHARACTERS, VALUE_CHARACTERS = 250, 6000
TAGS = {"mlflow.source.git.commit": "commit", "lm.dataset": "dataset"}  # by what the summary calls them
STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
log = logging.getLogger("lm")


def flatten(values: Dict[str, Any], prefix: str = "") -> Dict[str, Any]:
    """Nested settings by their dotted names."""
    flat: Dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def legal_names(names: List[str]) -> Dict[str, str]:
    """A name that MLflow takes for each name: other characters replaced, none too long, no two alike."""
    legal: Dict[str, str] = {}
    for name in names:
        short = re.sub(r"[^\w. /:-]", "_", name, flags=re.ASCII)
        if short != name or len(short) > KEY_CHARACTERS:
            mark = hashlib.sha256(name.encode()).hexdigest()[:8]
            short = f"{short[: KEY_CHARACTERS - 9]}_{mark}"
        legal[name] = short
    return legal


def absolute(uri: str) -> str:
    """A sqlite file by its whole path: MLflow keeps a store by its URI, and a process may change its folder."""
    head, separator, path = uri.partition("sqlite:///")
    return f"{separator}{Path(path).resolve()}" if separator and not head else uri


def loss_lines(run: RunFolder) -> List[Line]:
    """Training and validation loss against tokens, those that there are."""
    logged = [line for line, _ in run.metric_lines()]
    found = []
    for name, key in (("training", "loss"), ("validation", "val_loss")):
        points = [(float(line["tokens"]), line[key]) for line in logged if line.get(key) is not None]
        found += [Line(name, points)] if points else []
    return found


class Tracker:
    """One run in MLflow.

    uri: the tracking server's, or sqlite:///FILE. On rank 0 alone.
    """

    def __init__(self, uri: str, run: RunFolder, config: Config) -> None:
        uri = absolute(uri)
        self.uri, self.run, self.config = uri, run, config
        self.state: Dict[str, Any] = {"uri": uri, "run_id": None, "train_step": -1}
        if run.tracking.exists():
            stored = json.loads(run.tracking.read_text())
            if stored["uri"] == uri:
                self.state = stored
        self.client: Any = None
        self.status: Optional[str] = None
        self.begun = False
        self.file, self.offset = 0, 0  # inode of metrics.jsonl, and bytes of it that have been read and sent
        self.trouble = ""
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, status: Optional[str]) -> None:
        """Sends what is left and the run's status; gives up after CLOSE_SECONDS, and says what to do then.

        status: None for a run that goes on elsewhere.
        """
        self.status = status
        self._wake.set()
        if self._thread.ident is None:
            self.start()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive() or self.trouble:
            log.warning(
                "MLflow at %s has not got everything (%s); nothing is lost: lm track replay %s",
                self.uri,
                self.trouble or "no answer",
                self.run.path,
            )

    def _work(self) -> None:
        deadline = 0.0
        while True:
            self._wake.wait(SYNC_SECONDS)
            closing = self._wake.is_set()
            deadline = deadline or (time.monotonic() + CLOSE_SECONDS / 2 if closing else 0.0)
            try:
                self.sync()
                if closing and self.status is not None:
                    self.end(self.status)
                self.trouble = ""
                if closing:
                    return
            except Exception as error:  # whatever a tracking server does, training goes on: said once, retried
                if not self.trouble:
                    log.warning("MLflow at %s: %s; training goes on, and it is tried again", self.uri, error)
                self.trouble = f"{type(error).__name__}: {error}"
                if closing and time.monotonic() > deadline:
                    return
                time.sleep(SYNC_SECONDS if closing else 0)

    def sync(self) -> None:
        """Sends every line of metrics.jsonl that has not arrived yet."""
        self._begin()
        from mlflow.entities import Metric

        file = self.run.metrics.stat().st_ino if self.run.metrics.exists() else 0
        if file != self.file:  # another file in its place, as a SageMaker job's that is brought home
            self.file, self.offset = file, 0
        batch: List[Any] = []
        sent, end = dict(self.state), self.offset
        for line, end in self.run.metric_lines(self.offset):
            kind = f"{kind_of(line)}_step"
            mark = line["time"] if kind == "goodput_step" else line["step"]  # an attempt may end before an earlier one
            if mark <= sent.get(kind, -1):
                continue
            sent[kind] = mark
            numbers = {
                key: value
                for key, value in line.items()
                if isinstance(value, (int, float)) and key not in ("step", "time")
            }
            legal = legal_names(list(numbers))
            batch += [
                Metric(legal[key], value, int(line["time"] * 1000), line["step"]) for key, value in numbers.items()
            ]
            if len(batch) > BATCH_METRICS - 50:
                self._send(batch, sent)
                batch, self.offset = [], end
        if batch:
            self._send(batch, sent)
        self.offset = end

    def end(self, status: str) -> None:
        """Sets the run's status and stores its summary, what it was made of, and its loss curve."""
        run_id, summary = self.state["run_id"], self.run.read_summary()
        for file in (self.run.summary, self.run.sample):
            if file.exists():
                self.client.log_artifact(run_id, str(file))
        for tag, key in TAGS.items():
            if summary.get(key) is not None:
                self.client.set_tag(run_id, tag, summary[key])
        lines = loss_lines(self.run)
        if lines:
            self.client.log_text(run_id, page("loss", {"": curves("tokens", "nats a token", lines)}), "loss_curve.html")
        self.client.set_terminated(run_id, STATUS[status])

    def _send(self, batch: List[Any], sent: Dict[str, Any]) -> None:
        self.client.log_batch(self.state["run_id"], metrics=batch)
        self.state = dict(sent)
        self._remember()

    def _remember(self) -> None:
        write_whole(self.run.tracking, json.dumps(self.state) + "\n")

    def _begin(self) -> None:
        """Finds or makes the experiment and the run, and logs the parameters; once."""
        if self.begun:
            return
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # retrying is this thread's own work
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # its sender holds a process up at its end
        from mlflow.tracking import MlflowClient

        for noisy in ("mlflow", "alembic"):  # after the import, which sets their levels
            logging.getLogger(noisy).setLevel(logging.WARNING)
        self.client = MlflowClient(self.uri)
        if self.state["run_id"] is None:
            name = f"{self.config.run.name}-{self.config.hash()}"
            run = self.client.create_run(
                self._experiment_id(), tags={"mlflow.runName": name, "lm.run_folder": str(self.run.path.resolve())}
            )
            self.state["run_id"] = run.info.run_id
            self._remember()
        else:
            self.client.update_run(self.state["run_id"], "RUNNING")
        self._log_parameters()
        for file in (self.run.config, self.run.plan):
            self.client.log_artifact(self.state["run_id"], str(file))
        self.begun = True

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self.config.run.experiment
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        local = "://" not in self.uri or self.uri.startswith(("sqlite:", "file:"))
        location = (OUTPUTS / "mlflow-artifacts" / name).resolve().as_uri() if local else None
        try:
            return self.client.create_experiment(name, artifact_location=location)
        except MlflowException:
            found = self.client.get_experiment_by_name(name)  # another run has just made it
            if found is None:
                raise
            return found.experiment_id

    def _log_parameters(self) -> None:
        """Parameters are written once in MLflow: what a resumed run changes becomes a tag."""
        from mlflow.entities import Param, RunTag

        run_id = self.state["run_id"]
        flat = flatten(self.config.as_dict())
        names = legal_names(list(flat))
        renamed = {name: legal for name, legal in names.items() if name != legal}
        if renamed:
            log.info("MLflow takes these parameters under other names: %s", renamed)
        values = {names[name]: str(value)[:VALUE_CHARACTERS] for name, value in flat.items()}
        known = self.client.get_run(run_id).data.params
        new = [Param(name, value) for name, value in values.items() if name not in known]
        changed = [
            RunTag(f"changed.{name}"[:KEY_CHARACTERS], f"{known[name]} -> {value}"[:VALUE_CHARACTERS])
            for name, value in values.items()
            if name in known and known[name] != value
        ]
        for first in range(0, len(new), BATCH_PARAMETERS):
            self.client.log_batch(run_id, params=new[first : first + BATCH_PARAMETERS])
        if changed:
            self.client.log_batch(run_id, tags=changed)


def replay(folder: Path) -> str:
    """Sends a run's metrics, files and status to the MLflow of its configuration. Returns what was done, in words.

    Raises RunFailed where the server does not take them, and ConfigError for a configuration that does not load.
    """
    config, run = load_file(folder / "config.yaml"), RunFolder(folder)
    stored = json.loads(run.tracking.read_text())["uri"] if run.tracking.exists() else config.tracking.uri
    if stored is None:
        raise RunFailed(f"{folder} was run with tracking.uri=null: there is no server to send it to")
    run.lock()
    tracker = Tracker(stored, run, config)
    summary = run.read_summary()
    try:
        tracker.sync()
        if summary:
            tracker.end(summary["status"])
    except Exception as error:
        raise RunFailed(f"MLflow at {tracker.uri} does not take it: {type(error).__name__}: {error}") from error
    finally:
        run.unlock()
    return f"MLflow run {tracker.state['run_id']} at {tracker.uri} is up to step {tracker.state['train_step']}"
