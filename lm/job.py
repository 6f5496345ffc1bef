"""One job: announce its plan, prepare its data, train it here; and the exit status of each way that it can end."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

from lm.data.shards import DatasetError, Manifest, output_folder, read_manifest
from lm.hosts import refuse_silent, silent
from lm.plan import Plan
from lm.refusal import ConfigError, Problem
from lm.report import closing_rows, make_console, table
from lm.run import RunFailed, RunFolder, run_folder
from lm.schema import Config
from lm.smdistributed_local import RuleBroken

REFUSED, FAILED = 2, 1
XLA_NEEDS = re.compile(r"libdevice|ptxas")  # in what TensorFlow says where CUDA's compiler is not there


def status_of(work: Callable[[], int]) -> int:
    """The exit status of some work: its own, or 2 for a refused request and 1 for a failure that one message tells."""
    try:
        return work()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except RuleBroken as error:  # a parallel section that the library refuses, before it does anything
        print(f"refused: {error}", file=sys.stderr)
        return REFUSED
    except (RunFailed, DatasetError, OSError) as error:  # a file system's own words say what and where
        print(f"failed: {error}", file=sys.stderr)
        return FAILED


def begin(config: Config, plan: Plan) -> Tuple[RunFolder, bool]:
    """Prints the plan and prepares the data; before TensorFlow, and once a job whatever the number of processes.

    Returns the run folder and whether the run is done already, in which case its closing table was printed.
    Raises ConfigError for hosts that do not answer and data that does not fit the configuration, and DatasetError.
    """
    console = make_console()
    run = run_folder(config)
    console.print(table(f"{config.run.experiment} / {run.path.name}", plan.rows()))
    if config.run.resume == "never" or not is_done(run.read_summary(), plan):
        refuse_silent(config.cluster.hosts)
    from lm.data.fit import check_fits
    from lm.data.prepare import prepare

    folder, manifest = prepare(config.dataset, config.prepare, console)
    mixture = check_fits(config, folder, manifest)
    if len(mixture.sequences()) > 1:
        sequences = plan.steps * plan.global_batch_sequences
        console.print(table("what each source gives", mixture.rows(sequences)))
    if config.run.resume == "never":
        run.set_aside()
    run.lock()
    summary = run.read_summary()
    if is_done(summary, plan):
        console.print(table("this run is done; run.resume=never starts it again", closing_rows(summary, run.path)))
        return run, True
    if config.run.resume == "must" and not run.checkpoints.exists():
        text = f"run.resume=must, and there is no checkpoint in {run.checkpoints}"
        raise ConfigError([Problem(("run.resume",), text, "run.resume=auto, or the settings of the earlier run")])
    return run, False


def is_done(summary: Dict[str, Any], plan: Plan) -> bool:
    return summary.get("status") == "finished" and summary["step"] >= plan.steps


def data_of(config: Config) -> Tuple[Path, Manifest]:
    """The prepared set that `begin` left. Raises DatasetError where it is damaged."""
    folder = output_folder(config.dataset)
    return folder, read_manifest(folder)


def train_here(config: Config, plan: Plan) -> int:
    """Trains as this process's rank. Returns 0, or 128 + the signal's number for a run that was stopped and saved.

    A rank among several returns 0 then too: Horovod ends the others at once when one ends with another status, and
    rank 0 may still be writing. The launcher, which passed the signal on, gives the job its status.
    """
    from lm.start import import_tensorflow
    from lm.stopwatch import Stopwatch

    stopwatch = Stopwatch()
    with stopwatch("start_up"):
        import_tensorflow()
        import tensorflow as tf

        from lm.loop import train

    run = run_folder(config)
    data, manifest = data_of(config)
    try:
        summary = train(config, plan, run, data, manifest, stopwatch)
    except (tf.errors.InternalError, tf.errors.NotFoundError, tf.errors.UnimplementedError) as error:
        if not XLA_NEEDS.search(str(error)):
            raise
        text = "XLA cannot compile for this GPU, because CUDA's libdevice or ptxas is not installed here"
        raise RunFailed(f"{text}: install CUDA's compiler, or train.xla=false does without") from error
    except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.InvalidArgumentError) as error:
        restarted = "context_id" in str(error)  # a new server does not know the run
        if not config.cluster.hosts or (isinstance(error, tf.errors.InvalidArgumentError) and not restarted):
            raise
        gone = ", ".join(silent(config.cluster.hosts))
        what = f"{gone} has gone; start lm worker there again" if gone else "a host went and is there again"
        raise RunFailed(f"cluster.hosts: {what}, and the same command goes on from the last checkpoint") from error
    stopped = summary["status"] == "stopped" and summary["world"] == 1
    return 128 + summary["signal"] if stopped else 0
