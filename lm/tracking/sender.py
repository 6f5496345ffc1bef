"""The thread that feeds an MLflow server: what it cannot send now it sends later, and training goes on.

A file remembers the MLflow run's id and how far it has been fed. Ids are explicit; nothing is MLflow's ambient state.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, Dict, Optional

from lm.run import OUTPUTS, write_whole
from lm.tracking.names import absolute

SYNC_SECONDS = 2.0
CLOSE_SECONDS = 30.0
log = logging.getLogger("lm")


class Sender:
    """One MLflow run, of a training run or of a sweep.

    uri: the tracking server's, sqlite:///FILE, or the ARN of SageMaker's. memory: the file that remembers. folder: what
    `lm track replay` is told. `sync` and `end` are the subclass's: they may raise whatever MLflow raises.
    """

    def __init__(self, uri: str, experiment: str, memory: Path, folder: Path) -> None:
        self.uri, self.experiment, self.memory, self.folder = absolute(uri), experiment, memory, folder
        self.state: Dict[str, Any] = {"uri": self.uri, "run_id": None}
        if memory.exists():
            stored = json.loads(memory.read_text())
            if stored["uri"] == self.uri:
                self.state = stored
        self.client: Any = None
        self.status: Optional[str] = None
        self.trouble = ""
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def sync(self) -> None:
        """Sends everything that has not arrived yet."""
        raise NotImplementedError

    def end(self, status: str) -> None:
        """Sends what belongs to the end, and the status: finished, failed or stopped."""
        raise NotImplementedError

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is something new to send."""
        self._wake.set()

    def close(self, status: Optional[str]) -> None:
        """Sends what is left and the status; gives up after CLOSE_SECONDS, and says what to do then.

        status: None for what goes on elsewhere.
        """
        self.status, self._closing = status, True
        self._wake.set()
        if self._thread.ident is None:
            self.start()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive() or self.trouble:
            log.warning(
                "MLflow at %s has not got everything (%s); nothing is lost: lm track replay %s",
                self.uri,
                self.trouble or "no answer",
                self.folder,
            )

    def _work(self) -> None:
        deadline = 0.0
        while True:
            self._wake.wait(SYNC_SECONDS)
            closing = self._closing
            if not closing:
                self._wake.clear()
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

    def open(self) -> None:
        """Makes the client; before the first call of MLflow."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # retrying is this thread's own work
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # its sender holds a process up at its end
        from mlflow.tracking import MlflowClient

        for noisy in ("mlflow", "alembic"):  # after the import, which sets their levels
            logging.getLogger(noisy).setLevel(logging.WARNING)
        # sagemaker-mlflow asks for the ambient server at every request, and complains where that is not SageMaker's.
        logging.getLogger("mlflow.tracking.request_header.registry").setLevel(logging.ERROR)
        if self.uri.startswith("arn:"):
            import mlflow

            mlflow.set_tracking_uri(self.uri)
        self.client = MlflowClient(self.uri)

    def remember(self) -> None:
        write_whole(self.memory, json.dumps(self.state) + "\n")

    def experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self.client.get_experiment_by_name(self.experiment)
        if found is not None:
            return found.experiment_id
        local = "://" not in self.uri or self.uri.startswith(("sqlite:", "file:"))
        local = local and not self.uri.startswith("arn:")
        location = (OUTPUTS / "mlflow-artifacts" / self.experiment).resolve().as_uri() if local else None
        try:
            return self.client.create_experiment(self.experiment, artifact_location=location)
        except MlflowException:
            found = self.client.get_experiment_by_name(self.experiment)  # another run has just made it
            if found is None:
                raise
            return found.experiment_id
