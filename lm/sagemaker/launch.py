"""One run as a SageMaker job: shown, refused or dry, its data sent, submitted, followed, brought home."""

from __future__ import annotations

import dataclasses
import json
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple

from omegaconf import OmegaConf
from rich.console import Console

from lm import job
from lm.catalog.checks import Choice, choose
from lm.catalog.fitting import with_instance_type
from lm.data.fit import check_fits
from lm.data.prepare import prepare
from lm.data.shards import MANIFEST
from lm.plan import Plan, make_plan
from lm.refusal import ConfigError, Problem
from lm.report import closing_rows, make_console, table
from lm.run import RunFailed, RunFolder, run_folder, write_whole
from lm.sagemaker import aws
from lm.sagemaker.bundle import CONFIG, make_bundle
from lm.sagemaker.failure import Failure, classify
from lm.sagemaker.follow import POLL_SECONDS, End, Follower, end_rows
from lm.sagemaker.places import Places, folder_of, job_name, run_name
from lm.sagemaker.request import channels, make_request, submit
from lm.sagemaker.storage import Storage, split, verify_newest
from lm.schema import Config

RETRY_SECONDS = 60.0  # before the first retry on capacity; doubled each time
REQUEST, DRY_REQUEST, JOB = "request.json", "dry-request.json", "job.json"


def run_job(
    config: Config, said: str = "", poll_seconds: float = POLL_SECONDS, retry_seconds: float = RETRY_SECONDS
) -> int:
    """Everything that `python train.py cluster=...` does for one run. Returns the exit status.

    said: put before every line, to tell the jobs of a sweep apart. Raises ConfigError before anything is uploaded, and
    RunFailed for a job that failed or could not be created.
    """
    console = make_console()
    plan = make_plan(config)
    choice, problems = choose(config, plan)
    if problems:
        raise ConfigError(problems)
    run = run_folder(config)
    name = job_name(config)
    console.print(table(f"{said}{run_name(config)}", [*plan.rows(), *job_rows(config, choice)]))
    for warning in choice.warnings:
        console.print(f"warning: {warning}", markup=False)
    request = make_request(config, choice, name)  # also for a real job: its limits are checked before an upload
    if config.cluster.dry_run:
        shown = json.dumps(request, indent=1)
        path = _keep(config, DRY_REQUEST, shown + "\n")
        print(shown)
        console.print(f"{said}{path}: the same; nothing was sent")
        return 0
    session = aws.open_session(config)
    storage = Storage(session, console)
    places = Places(session.default_bucket(), run_name(config))
    run.lock()
    try:
        if _is_done(config, plan, run, places, storage, console):
            return 0
        _send_data(config, storage, places, console)
        _send_checkpoint(run, places, storage)
        failure: Optional[Failure] = None
        for tried, picked in _attempts(config, choice, console, said, retry_seconds):
            name = job_name(tried)
            failure = _create(tried, picked, name, session)
            if failure is None and config.cluster.detach:
                console.print(f"{said}{name} was submitted; lm attach {name} follows it, lm stop {name} ends it")
                return 0
            if failure is None:
                console.print(f"{said}{name} was submitted")
                run.write_config(tried)
                write_whole(run.plan, json.dumps(make_plan(tried).as_dict(), indent=1) + "\n")
                end = _follow(name, tried, run, session, console, said, poll_seconds)
                if end is None:
                    return 130
                if end.failure is None or not end.failure.is_capacity:
                    return bring_home(name, end, tried, picked, run, session, console)
                failure = end.failure
            console.print(f"{said}no capacity for {tried.cluster.instance_type}: {failure.reason}", markup=False)
        raise RunFailed(str(failure))
    finally:
        run.unlock()


def job_rows(config: Config, choice: Choice) -> List[Tuple[str, str]]:
    """What the job is, in the words of the plan's table."""
    cluster = config.cluster
    gpu = choice.instance.gpu if choice.instance else "GPU"
    what = f"{cluster.gpus_per_host} {gpu} each" if cluster.gpus_per_host else "no GPU"
    rows = [("machines", f"{cluster.instance_count} x {cluster.instance_type}, {what}, in {choice.region}")]
    rows.append(("image", choice.name if choice.image else str(cluster.image_uri)))
    hourly, most = choice.cost_usd(cluster, 3600), choice.cost_usd(cluster, choice.max_run_seconds)
    limit = f"{choice.max_run_seconds:,} s at the most"
    if hourly is None or most is None or choice.price is None:
        rows.append(("price", f"not known for {cluster.instance_type} in {choice.region}; {limit}"))
    else:
        kind = "on demand, an upper bound of spot" if cluster.spot else "on demand"
        when = f"as of {choice.price.as_of}"
        rows.append(("price", f"{hourly:,.2f} USD an hour {kind} ({when}); {limit}: {most:,.2f} USD"))
    return rows


def follow_to_the_end(name: str, config: Config, session: Any, poll_seconds: float = POLL_SECONDS) -> int:
    """Follows a job that was submitted before, and brings its run folder home. Returns the exit status.

    Raises RunFailed with the class, SageMaker's reason and the first real traceback of a job that failed.
    """
    console, run = make_console(), run_folder(config)
    run.lock()
    try:
        end = _follow(name, config, run, session, console, "", poll_seconds)
        choice, _ = choose(config, make_plan(config))
        return 130 if end is None else bring_home(name, end, config, choice, run, session, console)
    finally:
        run.unlock()


def _follow(
    name: str, config: Config, run: RunFolder, session: Any, console: Console, said: str, poll_seconds: float
) -> Optional[End]:
    """How a job ended; None where Ctrl-C ended the following and not the job."""
    try:
        return Follower(session, name, config, make_plan(config), run, console, said, poll_seconds).follow()
    except KeyboardInterrupt:
        console.print(f"\n{name} goes on; lm attach {name} follows it again, lm stop {name} ends it")
        return None


def bring_home(
    name: str, end: End, config: Config, choice: Choice, run: RunFolder, session: Any, console: Console
) -> int:
    """Downloads the run folder, checks its newest checkpoint and prints the closing tables."""
    places = Places(session.default_bucket(), run_name(config))
    storage = Storage(session, console)
    storage.download_run(places.run_folder, run.path)
    summary = run.read_summary()
    price = choice.price.usd_per_hour if choice.price else None
    rows = end_rows(end, name, price, config.cluster.instance_count)
    try:
        rows.append(("checkpoint", verify_newest(run.path, summary.get("checkpoint_step"))))
    finally:
        console.print(table("", rows))
    if end.failure is not None:
        raise RunFailed(str(end.failure))
    if summary:
        console.print(table("", closing_rows(summary, run.path)))
    if end.status == "finished" and summary.get("status") == "finished":
        return 0
    console.print(f"{name} was stopped; the same command goes on from its last checkpoint")
    return 128 + signal.SIGTERM


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

    Raises ConfigError where run.resume asks for what is not there, or for a fresh start over what is.
    """
    there = storage.newest_step(places.run_folder)
    key = ("run.resume",)
    if config.run.resume == "never" and there is not None:
        text = f"run.resume=never, and {places.run_folder} has a checkpoint of step {there}"
        raise ConfigError([Problem(key, text, "run.name=NAME starts a run beside it")])
    if config.run.resume == "must" and there is None:
        text = f"run.resume=must, and {places.run_folder} has no checkpoint"
        raise ConfigError([Problem(key, text, "run.resume=auto, or the settings of the earlier run")])
    summary = run.read_summary()
    if not job.is_done(summary, plan):
        if not job.is_done(storage.read_json(f"{places.run_folder}/summary.json") or {}, plan):
            return False
        storage.download_run(places.run_folder, run.path)
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
    here = sorted(run.path.glob("checkpoints/step-*/checkpoint.json"))
    if not here:
        return
    newest = here[-1].parent
    there = storage.newest_step(places.run_folder)
    if there is None or there < int(newest.name.partition("-")[2]):
        storage.upload(newest, f"{places.run_folder}/checkpoints/{newest.name}", f"checkpoint {newest.name}")
        bucket, key = split(places.run_folder)
        if run.metrics.exists():
            storage.client.upload_file(str(run.metrics), bucket, f"{key}/{run.metrics.name}")


def _attempts(
    config: Config, choice: Choice, console: Console, said: str, retry_seconds: float
) -> Iterator[Tuple[Config, Choice]]:
    """What is tried until there is capacity: each instance type in turn and, after a pause that doubles, again."""
    for attempt in range(config.cluster.capacity_retries + 1):
        if attempt:
            pause = retry_seconds * 2 ** (attempt - 1)
            console.print(f"{said}retry {attempt} of {config.cluster.capacity_retries} in {pause:,.0f} s")
            time.sleep(pause)
        yield config, choice
        for instance_type in config.cluster.fallback_instance_types:
            moved = with_instance_type(config, instance_type)
            yield moved, choose(moved, make_plan(moved))[0]


def _create(config: Config, choice: Choice, name: str, session: Any) -> Optional[Failure]:
    """Submits; returns a failure for want of capacity. Raises RunFailed for any other refusal."""
    from botocore.exceptions import ClientError

    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        left_out = make_bundle(config, bundle)
        for path in left_out:
            print(f"left out of what is sent, as it may hold a secret: {path}")
        try:
            request = submit(config, choice, name, bundle, session)
        except ClientError as error:
            failure = classify(str(error), "")
            if failure.is_capacity:
                return failure
            raise RunFailed(str(dataclasses.replace(failure, cause=""))) from error
    _keep(config, REQUEST, json.dumps(request, indent=1) + "\n")
    _keep(config, JOB, json.dumps({"job": name, "region": session.boto_region_name, "run": run_name(config)}) + "\n")
    kept = _keep(config, CONFIG, OmegaConf.to_yaml(OmegaConf.create(config.as_dict())))
    places = Places(session.default_bucket(), run_name(config))
    bucket, key = split(f"{places.root}/{CONFIG}")  # for lm attach on another machine
    session.boto_session.client("s3").upload_file(str(kept), bucket, key)
    return None
