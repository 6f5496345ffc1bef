"""What MLflow gets of a run: settings, the lines of metrics.jsonl, files, status.

The run folder is the buffer. mlflow.json remembers the run's id and the last steps that arrived, so that a resumed
run goes on in the same MLflow run and `lm track replay` can send what an outage kept back.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Dict, List

from lm.charts import Line, curves, page
from lm.config import load_file
from lm.run import RunFailed, RunFolder, kind_of
from lm.schema import Config
from lm.tracking.names import KEY_CHARACTERS, VALUE_CHARACTERS, flatten, legal_names
from lm.tracking.sender import Sender

BATCH_METRICS = 1000  # MLflow's limits on one log_batch call: 1,000 metrics, 100 parameters
BATCH_PARAMETERS = 100
TAGS = {"mlflow.source.git.commit": "commit", "lm.dataset": "dataset"}  # by what the summary calls them
STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
log = logging.getLogger("lm")


def loss_lines(run: RunFolder) -> List[Line]:
    """Training and validation loss against tokens, those that there are."""
    logged = [line for line, _ in run.metric_lines()]
    found = []
    for name, key in (("training", "loss"), ("validation", "val_loss")):
        points = [(float(line["tokens"]), line[key]) for line in logged if line.get(key) is not None]
        found += [Line(name, points)] if points else []
    return found


class Tracker(Sender):
    """One run in MLflow. On rank 0 alone."""

    def __init__(self, uri: str, run: RunFolder, config: Config) -> None:
        super().__init__(uri, config.run.experiment, run.tracking, run.path)
        self.run, self.config = run, config
        self.state.setdefault("train_step", -1)
        self.begun = False
        self.file, self.offset = 0, 0  # inode of metrics.jsonl, and bytes of it that have been read and sent

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
        self.remember()

    def _begin(self) -> None:
        """Finds or makes the experiment and the run, and logs the parameters; once."""
        if self.begun:
            return
        self.open()
        if self.state["run_id"] is None:
            name = f"{self.config.run.name}-{self.config.hash()}"
            began = self.run.began()
            run = self.client.create_run(
                self.experiment_id(),
                start_time=int(began * 1000) if began is not None else None,
                tags={"mlflow.runName": name, "lm.run_folder": str(self.run.path.resolve())},
            )
            self.state["run_id"] = run.info.run_id
            self.remember()
        else:
            self.client.update_run(self.state["run_id"], "RUNNING")
        self._log_parameters()
        for file in (self.run.config, self.run.plan):
            self.client.log_artifact(self.state["run_id"], str(file))
        self.begun = True

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
