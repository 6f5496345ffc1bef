"""A job from its creation to its end: status, log lines, metrics for MLflow, and what it has cost so far."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lm.catalog import Price
from lm.causes import Causes
from lm.container import is_reachable
from lm.failure import Failure, classify
from lm.plan import make_plan
from lm.run import RunFailed, RunFolder
from lm.sagemaker.metrics import read_line
from lm.schema import Config
from lm.tracking.run import Tracker

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
POLL_SECONDS = 10.0
TROUBLES = 5  # looks in a row that fail before a job is not followed any more
LAST_LINES = 3  # polls of the log after the job's end: CloudWatch is some seconds behind
ENDED = {"Completed": "finished", "Failed": "failed", "Stopped": "stopped"}
MPI_PREFIX = re.compile(r"^\[\d+,mpirank:(?P<rank>\d+),(?P<host>[\w-]+)\]<(?:stdout|stderr)>:\s?")


@dataclass(frozen=True)
class End:
    """How a job ended. billable_seconds: of one instance, as SageMaker bills it."""

    status: str  # finished, failed or stopped
    billable_seconds: int
    training_seconds: int
    failure: Optional[Failure]
    model_uri: str


def billed_seconds(job: Dict[str, Any]) -> int:
    """What SageMaker bills of one instance, by DescribeTrainingJob's answer."""
    return job.get("BillableTimeInSeconds", job.get("TrainingTimeInSeconds", 0))


class Log:
    """A job's lines in CloudWatch, each once: a token a stream remembers how far it was read."""

    def __init__(self, client: Any, job_name: str) -> None:
        self.client, self.job_name = client, job_name
        self.tokens: Dict[str, str] = {}

    def new_lines(self) -> Iterator[Tuple[str, str, float]]:
        """Host, text and time in seconds of every line since the last call."""
        try:
            pages = self.client.get_paginator("describe_log_streams").paginate(
                logGroupName=LOG_GROUP, logStreamNamePrefix=f"{self.job_name}/"
            )
            streams = [stream["logStreamName"] for page in pages for stream in page["logStreams"]]
        except self.client.exceptions.ResourceNotFoundException:  # before the account's first job
            return
        for stream in sorted(streams):
            yield from self._lines_of(stream)

    def _lines_of(self, stream: str) -> Iterator[Tuple[str, str, float]]:
        host = stream.partition("/")[2].rpartition("-")[0] or stream
        while True:
            position = {"nextToken": self.tokens[stream]} if stream in self.tokens else {}
            page = self.client.get_log_events(
                logGroupName=LOG_GROUP, logStreamName=stream, startFromHead=True, **position
            )
            for event in page["events"]:
                yield host, event["message"].rstrip("\n"), event["timestamp"] / 1000
            if not page["events"] or page["nextForwardToken"] == self.tokens.get(stream):
                self.tokens[stream] = page["nextForwardToken"]
                return
            self.tokens[stream] = page["nextForwardToken"]


@dataclass(frozen=True)
class Watch:
    """How jobs are watched. said: before every line, to tell jobs of a sweep apart. poll_seconds: between two looks."""

    session: Any
    console: Console
    said: str = ""
    poll_seconds: float = POLL_SECONDS

    def say(self, text: str) -> None:
        self.console.print(f"{self.said}{text}", markup=False, soft_wrap=True)


class Follower:
    """Shows one job and feeds MLflow from its lines."""

    def __init__(self, watch: Watch, job_name: str, config: Config, run: RunFolder) -> None:
        self.watch, self.job_name, self.run, self.plan = watch, job_name, run, make_plan(config)
        self.client = watch.session.sagemaker_client
        self.log = Log(watch.session.boto_session.client("logs"), job_name)
        self.causes = Causes()
        self.state = ""
        self.steps_seen = {"loss": 0, "val_loss": 0}
        for line, _ in run.metric_lines():
            self._note(line)
        uri = config.tracking.uri
        self.tracker = None if uri is None or is_reachable(uri) else Tracker(uri, run, config)

    def follow(self) -> End:
        """Returns when the job has ended. Raises RunFailed where AWS does not answer any more."""
        columns = [
            TextColumn("[bold]{task.fields[state]}"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
        ]
        shown = self.watch.console.is_terminal and not self.watch.said
        if self.tracker is not None:
            self.tracker.start()
        with Progress(*columns, console=self.watch.console, disable=not shown) as self.bar:
            self.task = self.bar.add_task(self.job_name, total=self.plan.steps, state="submitted", numbers="")
            job = self._until_ended()
        status = ENDED[job["TrainingJobStatus"]]
        failure = None
        if status == "failed" or (status == "stopped" and job["SecondaryStatus"] != "Stopped"):
            reason = job.get("FailureReason") or job["SecondaryStatus"]
            failure = classify(reason, self.causes.first())
        return End(
            status,
            billed_seconds(job),
            job.get("TrainingTimeInSeconds", 0),
            failure,
            job.get("ModelArtifacts", {}).get("S3ModelArtifacts", ""),
        )

    def close(self, status: Optional[str]) -> None:
        """Ends the feeding of MLflow, with the run's status there; None for a job that goes on."""
        if self.tracker is not None:
            self.tracker.close(status)

    def _until_ended(self) -> Dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError

        troubles = 0
        while True:
            try:
                job = self._look()
                troubles = 0
            except (BotoCoreError, ClientError) as error:  # a network that comes back, a limit on requests
                troubles += 1
                if troubles > TROUBLES:
                    goes_on = f"the job goes on: lm attach {self.job_name}"
                    raise RunFailed(f"{self.job_name} cannot be followed: {error}; {goes_on}") from error
                time.sleep(self.watch.poll_seconds * 2**troubles)
                continue
            if job["TrainingJobStatus"] in ENDED:
                return job
            time.sleep(self.watch.poll_seconds)

    def _look(self) -> Dict[str, Any]:
        """The job as it is now; what is new of it is shown."""
        job = self.client.describe_training_job(TrainingJobName=self.job_name)
        now = self._state(job)
        if now != self.state:
            self.watch.say(now)
            self.bar.update(self.task, state=job["SecondaryStatus"])
            self.state = now
        for _ in range(LAST_LINES if job["TrainingJobStatus"] in ENDED else 1):
            self._read_log(job)
            if job["TrainingJobStatus"] in ENDED:
                time.sleep(min(self.watch.poll_seconds, 2.0))
        return job

    def _state(self, job: Dict[str, Any]) -> str:
        """What SageMaker says that it does, and for how long it bills."""
        transitions = job.get("SecondaryStatusTransitions") or [{}]
        message = transitions[-1].get("StatusMessage", "")
        billed = job.get("BillableTimeInSeconds")
        spent = f", {billed:,} s billed" if billed is not None else ""
        return f"{job['SecondaryStatus']}: {message}{spent}" if message else f"{job['SecondaryStatus']}{spent}"

    def _read_log(self, job: Dict[str, Any]) -> None:
        several = job["ResourceConfig"]["InstanceCount"] > 1
        for host, text, seconds in self.log.new_lines():
            match = MPI_PREFIX.match(text)
            rank, words = (match["rank"], text[match.end() :]) if match else (host if several else "", text)
            self.causes.hear(rank, words)
            line = read_line(words, self.plan, seconds)
            if line is None or self.bar.disable:
                self.watch.say(f"[{rank}] {words}" if rank else words)
            if line is not None and self._note(line):
                self.run.append_metrics(line)
                numbers = "  ".join(f"{key} {value:.4g}" for key, value in line.items() if "loss" in key)
                self.bar.update(self.task, completed=line["step"], numbers=numbers)

    def _note(self, line: Dict[str, Any]) -> bool:
        """Whether a line's step is new; the log of a job that is followed again begins with what is known."""
        kind = "val_loss" if "val_loss" in line else "loss"
        if line["step"] <= self.steps_seen[kind]:
            return False
        self.steps_seen[kind] = line["step"]
        return True


def end_rows(end: End, job_name: str, price: Optional[Price], instances: int) -> List[Tuple[str, str]]:
    """The closing table of a job."""
    cost = price.cost_usd(instances, end.billable_seconds) if price else None
    saved = 1 - end.billable_seconds / end.training_seconds if end.training_seconds else 0.0
    spot = f"; spot saved {saved:.0%} of {end.training_seconds:,} s" if saved > 0.005 else ""
    return [
        ("job", f"{job_name}: {end.status}"),
        ("billed", f"{end.billable_seconds:,} s x {instances}{spot}"),
        ("cost", "no price is known" if cost is None else f"{cost:,.2f} USD at the table's price"),
        *([("model", end.model_uri)] if end.model_uri else []),
    ]
