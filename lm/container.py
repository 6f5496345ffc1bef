"""A rank of a SageMaker job: finds its folders by SageMaker's variables, trains, and leaves the model to be kept.

SageMaker's toolkit starts this once a process (`entry.py` of the bundle). Its command line has every hyperparameter,
the model parallel library's included; none is read but the configuration's path, in SM_HPS.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Mapping, Optional

from lm.causes import CONSEQUENCES
from lm.config import load_file
from lm.data.fit import check_fits
from lm.data.shards import TOKENIZER, DatasetError
from lm.job import data_of, is_done, status_of, train_here
from lm.plan import make_plan
from lm.refusal import ConfigError
from lm.run import RunFailed, RunFolder, run_folder
from lm.schema import Config

STOP_SECONDS = 0.5  # between two looks for the file that asks to stop
SERVERS = ("http", "https")


def main() -> int:
    """Trains with the configuration that SM_HPS names. Returns the exit status: 0 for a run that was stopped and saved.

    What a failure says first is left in /opt/ml/output/failure, which SageMaker shows as the job's reason.
    """
    return status_of(work)


def work() -> int:
    """As `main`. Raises ConfigError, DatasetError and RunFailed."""
    os.environ["TTY_COMPATIBLE"] = "0"  # mpirun gives rank 0 a terminal: a bar there would take the place of the lines
    base = Path(os.environ["SM_MODEL_DIR"]).parent
    threading.Thread(target=_await_stop, args=[base / "stop"], daemon=True).start()
    try:
        return _train()
    except Exception as error:
        _tell(base / "output" / "failure", error)
        raise


def _train() -> int:
    file = Path(__file__).resolve().parents[1] / json.loads(os.environ["SM_HPS"])["config"]
    config = settle(load_file(file), os.environ)
    plan, run = make_plan(config), run_folder(config)
    data, manifest = data_of(config)
    check_fits(config, data, manifest)
    run.path.mkdir(parents=True, exist_ok=True)
    status = 0 if is_done(run.read_summary(), plan) else train_here(config, plan)
    finished = is_done(run.read_summary(), plan)
    if finished and os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
        keep_model(run, data, Path(os.environ["SM_MODEL_DIR"]), Path(os.environ["SM_OUTPUT_DATA_DIR"]))
    return 0 if status >= 128 else status


def _await_stop(file: Path) -> None:
    """Signals this process once a file is there, which the container's shell makes when SageMaker asks it to stop."""
    while not file.exists():
        time.sleep(STOP_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def _tell(file: Path, error: Exception) -> None:
    """Writes why this rank failed, unless another one has, or its end was the cause."""
    known = isinstance(error, (ConfigError, DatasetError, RunFailed))
    text = str(error) if known else f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    if any(sign in text for sign in CONSEQUENCES):
        return
    with contextlib.suppress(FileExistsError), open(file, "x") as written:
        written.write(text)


def settle(config: Config, variables: Mapping[str, str]) -> Config:
    """The configuration with this machine's folders in it.

    The data is in the channels `data`, `set0`, `set1`, ... The run folder is the one that SageMaker keeps in step with
    S3, beside the model's: /opt/ml/checkpoints, for which it has no variable.
    """
    sets = {name: variables[f"SM_CHANNEL_SET{number}"] for number, name in enumerate(sorted(config.mixture.sets))}
    run = Path(variables["SM_MODEL_DIR"]).parent / "checkpoints"
    uri = config.tracking.uri if is_reachable(config.tracking.uri) else None
    return dataclasses.replace(
        config,
        dataset=dataclasses.replace(config.dataset, output=variables["SM_CHANNEL_DATA"]),
        mixture=dataclasses.replace(config.mixture, sets=sets),
        run=dataclasses.replace(config.run, directory=str(run), resume="auto"),
        tracking=dataclasses.replace(config.tracking, uri=uri),
    )


def is_reachable(uri: Optional[str]) -> bool:
    """Whether a job can reach an MLflow server by itself; a file of the workstation is fed from there."""
    return uri is not None and uri.partition(":")[0] in SERVERS


def keep_model(run: RunFolder, data: Path, model: Path, output: Path) -> None:
    """Leaves the last weights and what is needed to use them to model.tar.gz, the metrics to output.tar.gz."""
    _, newest = run.whole_checkpoints()[0]
    for folder, files in (
        (model, (newest / "weights.safetensors", run.config, run.summary, data / TOKENIZER)),
        (output, (run.metrics, run.summary, run.log)),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(str(file), str(folder))


if __name__ == "__main__":
    sys.exit(main())
