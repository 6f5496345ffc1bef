"""The second half of a job: followed to its end, its run folder brought home, its checkpoint held to its checksums."""

from __future__ import annotations

import json
import signal
from typing import Any, Optional, Tuple

from lm.catalog.checks import choose
from lm.failure import Failure, JobFailed
from lm.job import FAILED
from lm.plan import make_plan
from lm.report import closing_rows, make_console, table
from lm.run import RunFailed, RunFolder, run_folder, run_name, write_whole
from lm.sagemaker.bundle import without_secrets
from lm.sagemaker.follow import POLL_SECONDS, End, Follower, Watch, end_rows
from lm.sagemaker.places import Places
from lm.sagemaker.storage import Storage, verify_newest
from lm.schema import Config


def follow_to_the_end(name: str, config: Config, session: Any, poll_seconds: float = POLL_SECONDS) -> int:
    """As `to_the_end`, for a job that was submitted before, while no other process writes to its run folder."""
    run = run_folder(config)
    run.lock()
    try:
        status, failure = to_the_end(name, config, run, Watch(session, make_console(), poll_seconds=poll_seconds))
    finally:
        run.unlock()
    if failure is not None:
        raise JobFailed(failure)
    return status


def to_the_end(name: str, config: Config, run: RunFolder, watch: Watch) -> Tuple[int, Optional[Failure]]:
    """Follows a job, brings its run folder home and prints the closing tables.

    Returns the exit status, 130 where Ctrl-C ended the following and not the job; and the failure of a job for which
    there was no capacity, which is worth another try. Raises RunFailed for a job that failed otherwise, or whose newest
    checkpoint did not reach S3 whole.
    """
    config = without_secrets(config)
    run.write_config(config)
    write_whole(run.plan, json.dumps(make_plan(config).as_dict(), indent=1) + "\n")
    follower = Follower(watch, name, config, run)
    tracked: Optional[str] = None
    try:
        end = follower.follow()
        tracked = end.status
        if end.failure is not None and end.failure.is_capacity:
            return FAILED, end.failure
        places = Places(watch.session.default_bucket(), run_name(config))
        Storage(watch.session, watch.console).download_run(places.run_folder, run)
        if end.status == "finished":
            tracked = run.read_summary().get("status", "stopped")
    except KeyboardInterrupt:
        watch.say(f"{name} goes on; lm attach {name} follows it again, lm stop {name} ends it")
        return 130, None
    finally:
        follower.close(tracked)
    return _closing(name, end, config, run, watch), None


def _closing(name: str, end: End, config: Config, run: RunFolder, watch: Watch) -> int:
    choice, _ = choose(config, make_plan(config))
    summary = run.read_summary()
    rows = end_rows(end, name, choice.price, config.cluster.instance_count)
    damage: Optional[RunFailed] = None
    try:
        rows.append(("checkpoint", verify_newest(run, summary.get("checkpoint_step"))))
    except RunFailed as found:
        damage = found
        rows.append(("checkpoint", str(found)))
    watch.console.print(table(watch.said, rows))
    if end.failure is not None:
        raise JobFailed(end.failure)
    if damage is not None:
        raise damage
    if summary:
        watch.console.print(table("", closing_rows(summary, run.path)))
    if end.status == "finished" and summary.get("status") == "finished":
        return 0
    watch.say(f"{name} was stopped; the same command goes on from its last checkpoint")
    return 128 + signal.SIGTERM
