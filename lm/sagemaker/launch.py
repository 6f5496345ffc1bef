"""One run as a SageMaker job: shown, refused or dry, its data sent, submitted, followed, brought home."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator, Optional, Tuple

from rich.console import Console

from lm import job
from lm.catalog.checks import choose
from lm.catalog.choice import Choice
from lm.catalog.fitting import with_instance_type
from lm.data.fit import check_fits
from lm.data.prepare import prepare
from lm.data.shards import MANIFEST
from lm.estimate import estimate_rows
from lm.failure import Failure, JobFailed, classify
from lm.plan import Plan, make_plan
from lm.refusal import ConfigError, Problem
from lm.report import closing_rows, make_console, table
from lm.run import RunFolder, run_folder, run_name, write_whole
from lm.sagemaker import aws
from lm.sagemaker.bundle import CONFIG, as_yaml, make_bundle, without_secrets
from lm.sagemaker.finish import to_the_end
from lm.sagemaker.follow import POLL_SECONDS, Watch
from lm.sagemaker.places import Places, folder_of, job_name
from lm.sagemaker.request import channels, make_request, submit
from lm.sagemaker.storage import Storage, split
from lm.schema import Config

RETRY_SECONDS = 60.0  # before the first retry on capacity; doubled each time
REQUEST, DRY_REQUEST = "request.json", "dry-request.json"


@aws.told()
def run_job(
    config: Config, said: str = "", poll_seconds: float = POLL_SECONDS, retry_seconds: float = RETRY_SECONDS
) -> int:
    """Everything that `python train.py cluster=...` does for one run. Returns the exit status.

    said: put before every line, to tell the jobs of a sweep apart. Raises ConfigError before anything is uploaded, and
    RunFailed for a job that failed or could not be created.
    """
    console = make_console()
    session = None if config.cluster.dry_run else aws.open_session(config)
    if session is not None:
        cluster = dataclasses.replace(config.cluster, region=session.boto_region_name)
        config = dataclasses.replace(config, cluster=cluster)
    plan = make_plan(config)
    choice, problems = choose(config, plan)
    if problems:
        raise ConfigError(problems)
    if choice.has_debugger(config.cluster):
        config = dataclasses.replace(config, profiling=dataclasses.replace(config.profiling, name="none"))
    run = run_folder(config)
    rows = [*plan.rows(), *choice.rows(config.cluster), *estimate_rows(config, plan, choice)]
    console.print(table(f"{said}{run_name(config)}", rows))
    for warning in choice.warnings:
        console.print(f"warning: {warning}", markup=False)
    request = make_request(config, choice, job_name(config))  # of a real job too: limits are checked before an upload
    if session is None:
        shown = json.dumps(request, indent=1)
        path = _keep(config, DRY_REQUEST, shown + "\n")
        print(shown)
        console.print(f"{said}{path}: the same; nothing was sent")
        return 0
    watch = Watch(session, console, said, poll_seconds)
    storage = Storage(session, console)
    places = Places(session.default_bucket(), run_name(config))
    failure: Optional[Failure] = None
    run.lock()
    try:
        if _is_done(config, plan, run, places, storage, console):
            return 0
        running, doing = job_at_work(config, session)
        if running:
            watch.say(f"{running} is at work on this run already: {doing}")
            if config.cluster.detach:
                return 0
            status, failure = to_the_end(running, config, run, watch)
            if status == 130 or (doing == "InProgress" and failure is None):
                return status  # from one that was stopping, or got no machines, the run goes on
        _send_data(config, storage, places, console)
        _send_checkpoint(run, places, storage)
        for tried, picked in _attempts(config, choice, watch, retry_seconds):
            name = job_name(tried)
            failure = _create(tried, picked, name, watch)
            if failure is None and config.cluster.detach:
                watch.say(f"lm attach {name} follows it, lm stop {name} ends it")
                return 0
            if failure is None:
                status, failure = to_the_end(name, tried, run, watch)
                if failure is None:
                    return status
            watch.say(f"no capacity for {tried.cluster.instance_type}: {failure.reason}")
        assert failure is not None  # there is one attempt at least
        raise JobFailed(failure)
    finally:
        run.unlock()


def job_at_work(config: Config, session: Any) -> Tuple[str, str]:
    """A job that trains this very run now, and its status: two would write over each other's checkpoints."""
    client = session.sagemaker_client
    for status in ("InProgress", "Stopping"):
        found = client.list_training_jobs(NameContains=config.hash(), StatusEquals=status)
        for summary in found["TrainingJobSummaries"]:
            about = client.describe_training_job(TrainingJobName=summary["TrainingJobName"])
            if about["HyperParameters"].get("run") == json.dumps(run_name(config)):
                return summary["TrainingJobName"], status
    return "", ""


def _keep(config: Config, file: str, content: str) -> Path:
    """A file in the run's sagemaker/ folder."""
    folder = folder_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / file, content)
    return folder / file


def _is_done(
    config: Config, plan: Plan, run: RunFolder, places: Places, storage: Storage, console: Console
) -> bool:
    """Whether the run has finished, here or in S3; its closing table is printed then.

    Raises ConfigError where run.resume asks for what is not there, or for a fresh start over what is in S3. A run that
    is here alone is set aside for a fresh start.
    """
    there = storage.newest_step(places.run_folder)
    key = ("run.resume",)
    if config.run.resume == "never":
        if there is not None:
            text = f"run.resume=never, and {places.run_folder} has a checkpoint of step {there}"
            raise ConfigError([Problem(key, text, "run.name=NAME starts a run beside it")])
        run.unlock()
        run.set_aside()
        run.lock()
        return False
    if config.run.resume == "must" and there is None and not run.whole_checkpoints():
        text = f"run.resume=must, and neither {run.path} nor {places.run_folder} has a checkpoint"
        raise ConfigError([Problem(key, text, "run.resume=auto, or the settings of the earlier run")])
    summary = run.read_summary()
    if not job.is_done(summary, plan):
        if not job.is_done(storage.read_json(f"{places.run_folder}/summary.json") or {}, plan):
            return False
        run.write_config(without_secrets(config))
        storage.download_run(places.run_folder, run)
        summary = run.read_summary()
    console.print(table("this run is done; run.name=NAME starts one beside it", closing_rows(summary, run.path)))
    return True


def _send_data(config: Config, storage: Storage, places: Places, console: Console) -> None:
    """Prepares and uploads the data that is this machine's; of data elsewhere, checks what can be read from here."""
    cluster = config.cluster
    if cluster.file_system_id is not None:
        return
    if cluster.dataset_uri is not None:
        for uri in channels(config, cluster.dataset_uri).values():
            if storage.read_json(f"{uri.rstrip('/')}/{MANIFEST}") is None:
                text = f"{uri} is no prepared dataset: it has no {MANIFEST}"
                fix = f"aws s3 sync outputs/datasets/NAME-HASH {uri}"
                raise ConfigError([Problem(("cluster.dataset_uri",), text, fix)])
        return
    folder, manifest = prepare(config.dataset, config.prepare, console)
    check_fits(config, folder, manifest)
    for path in map(Path, channels(config, str(folder)).values()):
        uri = places.dataset(path)
        there = storage.read_json(f"{uri}/{MANIFEST}")
        if there is not None and there != json.loads((path / MANIFEST).read_text()):
            text = f"{uri} was prepared from other text than {path}"
            raise ConfigError([Problem(("dataset.output",), text, "dataset.output=FOLDER, whose name S3 has not yet")])
        storage.upload(path, uri, f"dataset {path.name}")


def _send_checkpoint(run: RunFolder, places: Places, storage: Storage) -> None:
    """A run that was begun here goes on there: its newest checkpoint is uploaded where S3 has none that is newer."""
    here = run.whole_checkpoints()
    if not here:
        return
    step, newest = here[0]
    there = storage.newest_step(places.run_folder)
    if there is None or there < step:
        storage.upload(newest, f"{places.run_folder}/checkpoints/{newest.name}", f"checkpoint {newest.name}")
        for file in (run.metrics, run.log):
            if file.exists():
                storage.client.upload_file(str(file), *split(f"{places.run_folder}/{file.name}"))


def _attempts(
    config: Config, choice: Choice, watch: Watch, retry_seconds: float
) -> Iterator[Tuple[Config, Choice]]:
    """What is tried until there is capacity: each instance type in turn and, after a pause that doubles, again."""
    for attempt in range(config.cluster.capacity_retries + 1):
        if attempt:
            pause = retry_seconds * 2 ** (attempt - 1)
            watch.say(f"retry {attempt} of {config.cluster.capacity_retries} in {pause:,.0f} s")
            time.sleep(pause)
        yield config, choice
        for instance_type in config.cluster.fallback_instance_types:
            moved = with_instance_type(config, instance_type)
            yield moved, choose(moved, make_plan(moved))[0]


def _create(config: Config, choice: Choice, name: str, watch: Watch) -> Optional[Failure]:
    """Submits; returns a failure for want of capacity. Raises RunFailed for any other refusal."""
    from botocore.exceptions import ClientError

    kept = _keep(config, CONFIG, as_yaml(config))
    root = Places(watch.session.default_bucket(), run_name(config)).root
    client = watch.session.boto_session.client("s3")
    client.upload_file(str(kept), *split(f"{root}/{CONFIG}"))  # for lm attach on another machine
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        for path in make_bundle(config, bundle):
            watch.say(f"left out of what is sent, as it may hold a secret: {path}")
        watch.say(f"submitting {name}")
        try:
            request = submit(config, choice, name, bundle, watch.session)
        except ClientError as error:
            failure = classify(str(error), "")
            if failure.is_capacity:
                return failure
            raise JobFailed(failure) from error
    _keep(config, REQUEST, json.dumps(request, indent=1) + "\n")
    return None
