"""Looking after jobs: list them, follow one again, stop one, compare a request with the last one sent."""

from __future__ import annotations

import dataclasses
import difflib
import json
from typing import Any, Dict, List

from rich.table import Table

from lm.catalog import price
from lm.catalog.checks import choose
from lm.config import load_file
from lm.plan import make_plan
from lm.refusal import ConfigError, Problem
from lm.report import make_console
from lm.run import OUTPUTS
from lm.sagemaker import aws
from lm.sagemaker.bundle import CONFIG
from lm.sagemaker.finish import follow_to_the_end
from lm.sagemaker.follow import POLL_SECONDS, billed_seconds
from lm.sagemaker.launch import REQUEST, job_at_work
from lm.sagemaker.places import PREFIX, job_name, local_run
from lm.sagemaker.request import make_request
from lm.sagemaker.storage import Storage, split
from lm.schema import Config

NEWEST = 50


@aws.told()
def list_jobs(region: str | None) -> Table:
    """The account's newest jobs that this project submitted, with what each was billed."""
    session = aws.session_for(region)
    client = session.sagemaker_client
    shown = Table("job", "status", "machines", "created", "billed s", "USD", box=None)
    found = client.list_training_jobs(
        NameContains=f"{PREFIX}-", SortBy="CreationTime", SortOrder="Descending", MaxResults=NEWEST
    )
    for summary in found["TrainingJobSummaries"]:
        name = summary["TrainingJobName"]
        if not name.startswith(f"{PREFIX}-"):
            continue
        job = client.describe_training_job(TrainingJobName=name)
        machines = job["ResourceConfig"]
        billed = billed_seconds(job)
        known = price(machines["InstanceType"], session.boto_region_name)
        cost = f"{known.cost_usd(machines['InstanceCount'], billed):,.2f}" if known else "?"
        status = job["TrainingJobStatus"]
        if job["SecondaryStatus"] != status:
            status += f" ({job['SecondaryStatus']})"
        created = f"{summary['CreationTime']:%Y-%m-%d %H:%M}"
        shown.add_row(
            name, status, f"{machines['InstanceCount']} x {machines['InstanceType']}", created, f"{billed:,}", cost
        )
    return shown


@aws.told()
def attach(name: str, region: str | None, poll_seconds: float = POLL_SECONDS) -> int:
    """Follows a job to its end, from any machine, and brings its run folder home. Returns the exit status.

    Raises ConfigError for a job that is none of this project's, RunFailed where it failed.
    """
    job = _describe(aws.session_for(region), name)
    if "run" not in job["HyperParameters"]:
        text = f"{name} was not submitted by this project: it has no hyperparameter run"
        raise ConfigError([Problem(("job",), text, "lm jobs lists those that were")])
    bucket, _ = split(job["CheckpointConfig"]["S3Uri"])
    session = aws.session_for(region, bucket)
    return follow_to_the_end(name, _config_of(session, job), session, poll_seconds)


@aws.told()
def stop(name: str, region: str | None) -> str:
    """Asks a job to stop; returns what happens next, in words. Raises ConfigError where there is no such job."""
    session = aws.session_for(region)
    job = _describe(session, name)
    if job["TrainingJobStatus"] != "InProgress":
        return f"{name} has ended already: {job['TrainingJobStatus']}"
    session.sagemaker_client.stop_training_job(TrainingJobName=name)
    return f"{name} is asked to stop: it saves a checkpoint within 120 s, and the same command goes on from there"


@aws.told()
def stop_run(config: Config) -> None:
    """Asks the job that trains a run now to save and stop, if there is one."""
    session = aws.open_session(config)
    name, doing = job_at_work(config, session)
    if doing == "InProgress":
        session.sagemaker_client.stop_training_job(TrainingJobName=name)


def diff_request(config: Config) -> str:
    """What the request of a configuration would change against the last one that its experiment sent.

    A unified diff of the two as JSON; names that differ with every job are left out. Raises ConfigError where the
    configuration cannot be submitted, or where nothing was.
    """
    sent = sorted((OUTPUTS / config.run.experiment).glob(f"*/sagemaker/{REQUEST}"), key=lambda p: p.stat().st_mtime)
    if not sent:
        text = f"the experiment {config.run.experiment} has submitted no job from here"
        raise ConfigError([Problem(("run.experiment",), text, "run.experiment=NAME of one that has")])
    last = json.loads(sent[-1].read_text())
    bucket, _ = split(last["CheckpointConfig"]["S3Uri"])  # an account's own bucket is not known without it
    region = json.loads(last["HyperParameters"]["sagemaker_region"])
    cluster = dataclasses.replace(
        config.cluster,
        bucket=config.cluster.bucket or bucket,
        region=config.cluster.region or region,
        role=config.cluster.role or last["RoleArn"],
    )
    config = dataclasses.replace(config, cluster=cluster)
    choice, problems = choose(config, make_plan(config))
    if problems:
        raise ConfigError(problems)
    new = make_request(config, choice, job_name(config))
    lines = difflib.unified_diff(
        _comparable(last), _comparable(new), str(sent[-1]), "this command", lineterm="", n=2
    )
    return "\n".join(lines) or f"the same request as {sent[-1]}"


def _comparable(request: Dict[str, Any]) -> List[str]:
    """A request's lines without the job's own name, which every job has another of."""
    name = request["TrainingJobName"]
    return json.dumps(request, indent=1, sort_keys=True).replace(name, "JOB").splitlines()


def _describe(session: Any, name: str) -> Dict[str, Any]:
    from botocore.exceptions import ClientError

    try:
        return session.sagemaker_client.describe_training_job(TrainingJobName=name)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("ValidationException", "ResourceNotFound"):
            raise
        text = f"there is no job {name} in {session.boto_region_name}"
        raise ConfigError([Problem(("job",), text, "lm jobs lists them")]) from None


def _config_of(session: Any, job: Dict[str, Any]) -> Config:
    """The configuration of a job: this machine's copy, or the one in S3 beside the job's code."""
    here = local_run(json.loads(job["HyperParameters"]["run"])) / "sagemaker" / CONFIG
    if not here.exists():
        bucket, key = split(job["CheckpointConfig"]["S3Uri"].rstrip("/").rpartition("/")[0])
        here.parent.mkdir(parents=True, exist_ok=True)
        Storage(session, make_console()).client.download_file(bucket, f"{key}/{CONFIG}", str(here))
    return load_file(here)
