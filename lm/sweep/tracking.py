"""What MLflow gets of a sweep: a run of its own, and its name in each job's run, which so become children.

A job's run is made by the job itself; its id is in its run folder. Of a job that never came so far, one is made here.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Dict, Optional

from lm.run import RunFailed
from lm.sweep.ledger import LEDGER, Job, Ledger
from lm.sweep.table import PAGE, best_job
from lm.tracking.names import VALUE_CHARACTERS, legal_names
from lm.tracking.run import STATUS, replay
from lm.tracking.sender import Sender

MEMORY = "mlflow.json"
PARENT = "mlflow.parentRunId"  # what MLflow's own nested runs have


class SweepTracker(Sender):
    """The parent run of a sweep's jobs. A job that was refused, or died before its first step, is a child too."""

    def __init__(self, uri: str, experiment: str, ledger: Ledger) -> None:
        super().__init__(uri, experiment, ledger.folder / MEMORY, ledger.folder)
        self.ledger = ledger
        self.state.setdefault("experiment", experiment)
        self.state.setdefault("sent", {})  # what was sent of each job, by its key
        self.state.setdefault("made", {})  # runs that were made here, for jobs that had none
        self.begun = False
        self.remember()  # where to, for a replay after a sweep that no server heard of

    def sync(self) -> None:
        """Makes the parent, and sends what has changed of each job."""
        self._begin()
        for job in self.ledger.all():
            self._send_job(job)

    def end(self, status: str) -> None:
        """The numbers of the whole, the ledger, the page, the status."""
        from mlflow.entities import Metric

        run_id, best, now = self.state["run_id"], best_job(self.ledger), int(time.time() * 1000)
        numbers: Dict[str, float] = {
            f"jobs/{state}": self.ledger.count(state) for state in ("done", "pruned", "failed", "pending")
        }
        if best is not None and best.value is not None:
            numbers[f"best/{self.ledger.objective}"] = best.value
            self.client.set_tag(run_id, "lm.best", best.shown[:VALUE_CHARACTERS])
        self.client.log_batch(run_id, metrics=[Metric(name, value, now, 0) for name, value in numbers.items()])
        for file in (self.ledger.path, self.ledger.folder / PAGE):
            if file.exists():
                self.client.log_artifact(run_id, str(file))
        self.client.set_terminated(run_id, STATUS[status])

    def _begin(self) -> None:
        if self.begun:
            return
        self.open()
        if self.state["run_id"] is None:
            tags = {
                "mlflow.runName": self.ledger.folder.name,
                "lm.sweep_folder": str(self.ledger.folder.resolve()),
                "lm.command": " ".join(self.ledger.command)[:VALUE_CHARACTERS],
            }
            self.state["run_id"] = self.client.create_run(self.experiment_id(), tags=tags).info.run_id
            self.remember()
        else:
            self.client.update_run(self.state["run_id"], "RUNNING")
        self.begun = True

    def _send_job(self, job: Job) -> None:
        """The parent's id, and of a failed job why; nothing where that has arrived already."""
        found = self._child(job)
        if found is None:
            return
        told = [found, job.status, job.kind, job.reason]
        if self.state["sent"].get(job.key) == told:
            return
        tags = {PARENT: self.state["run_id"], "lm.sweep.job": str(job.number), "lm.sweep.overrides": job.shown}
        failure = {"lm.failure": job.kind or "", "lm.reason": job.reason}
        if job.status == "failed":
            tags.update(failure)
        elif self.state["sent"].get(job.key, ["", ""])[1:2] == ["failed"]:  # it was tried again
            for name in failure:
                self.client.delete_tag(found, name)
        for name, value in tags.items():
            self.client.set_tag(found, name, value[:VALUE_CHARACTERS])
        if job.status == "failed":
            log = self.ledger.log_of(job)
            if log.exists():
                self.client.log_artifact(found, str(log))
            self.client.set_terminated(found, STATUS["failed"])
        elif job.status == "pruned":
            self.client.set_tag(found, "lm.pruned", "true")
        self.state["sent"][job.key] = told
        self.remember()

    def _child(self, job: Job) -> Optional[str]:
        """The id of a job's run; made here for one that failed without."""
        run = self.ledger.run_of(job)
        if run is not None and run.tracking.exists():
            stored: Dict[str, Any] = json.loads(run.tracking.read_text())
            if stored["uri"] == self.uri and stored["run_id"]:
                stand_in = self.state["made"].pop(job.key, None)
                if stand_in is not None:  # of a try that came to nothing
                    self.client.delete_run(stand_in)
                    self.state["sent"].pop(job.key, None)
                    self.remember()
                return stored["run_id"]
        if job.key in self.state["made"]:
            return self.state["made"][job.key]
        if job.status != "failed":
            return None
        tags = {"mlflow.runName": f"job {job.number}, {job.kind}", PARENT: self.state["run_id"]}
        made = self.client.create_run(self.experiment_id(), tags=tags).info.run_id
        self.state["made"][job.key] = made  # before anything else, so that it is made once
        self.remember()
        pairs = [override.partition("=") for override in job.overrides]
        names = legal_names([key.lstrip("+~") for key, _, _ in pairs])
        for key, _, value in pairs:
            self.client.log_param(made, names[key.lstrip("+~")], value[:VALUE_CHARACTERS])
        return made


def replay_sweep(folder: Path) -> str:
    """Sends a sweep, its parent run and each job's, to the MLflow that it was begun with. Returns what was done.

    Raises RunFailed where the server does not take them, or the sweep had none.
    """
    memory = folder / MEMORY
    if not memory.exists():
        raise RunFailed(f"{folder} has no {MEMORY}: it was run with tracking.uri=null")
    stored, ledger = json.loads(memory.read_text()), Ledger(folder)
    if ledger.is_at_work():
        raise RunFailed(f"{folder / LEDGER} is being written by a process that sends it to MLflow itself")
    for job in ledger.all():
        run = ledger.run_of(job)
        if run is not None and run.metrics.exists():
            replay(run.path)
    tracker = SweepTracker(stored["uri"], stored["experiment"], ledger)
    try:
        tracker.sync()
        tracker.end("finished" if ledger.count("done", "pruned") == len(ledger.jobs) else "failed")
    except Exception as error:
        raise RunFailed(f"MLflow at {tracker.uri} does not take it: {type(error).__name__}: {error}") from error
    return f"MLflow run {tracker.state['run_id']} at {tracker.uri} is the parent of {len(tracker.state['sent'])} jobs"
