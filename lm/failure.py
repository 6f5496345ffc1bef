"""Why a job ended: a class that tells what to do about it, from how it ended and its last words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import List, Tuple

from lm.causes import Causes
from lm.run import RunFailed

RANK = re.compile(r"^\[(?P<rank>\d+)\] (?P<text>.*)$")  # as a launcher prefixes the lines of several processes
WORD_CHARACTERS = 300  # of a reason in a table or a tag
# class, what SageMaker's reason or then the first cause says, what to do. The first that is found counts.
CLASSES: List[Tuple[str, str, str]] = [
    (
        "capacity",
        r"CapacityError|InsufficientCapacity|Unable to provision requested ML compute capacity|Insufficient capacity",
        "the same command again later, cluster.fallback_instance_types=[...], or another region",
    ),
    (
        "quota",
        r"ResourceLimitExceeded|ServiceQuotaExceeded|service limit|account-level",
        "ask for a higher quota: Service Quotas, Amazon SageMaker, '<type> for training job usage'",
    ),
    (
        "spot",
        r"MaxWaitTimeExceeded|[Ss]pot.{0,40}(interrupt|reclaim)|max wait time",
        "the same command again goes on from the last checkpoint; or cluster.spot=false",
    ),
    (
        "time",
        r"MaxRuntimeExceeded|max(imum)? run ?time",
        "the same command again goes on from the last checkpoint; or a larger cluster.max_run_seconds",
    ),
    (
        "out of memory",
        r"ResourceExhaustedError|OOM when allocating|CUDA_ERROR_OUT_OF_MEMORY|out of memory|OutOfMemory"
        r"|instance type with more memory|MemoryError|bad_alloc|for want of memory"
        r"|exit (code|status):? ?(137|-9)\b|signal 9 \(Killed\)",
        "a smaller train.microbatch_sequences, model.recompute=block, or more parallel.partitions",
    ),
    (
        "data",
        r"DatasetError|[Dd]ata ?[Dd]ownload|No S3 objects found|NoSuchKey|manifest\.json|no prepared dataset"
        r"|[Uu]nable to mount|[Ff]ailed to mount|Prepare the set again|ends at token|is damaged",
        "lm verify tells what a prepared set lacks; docs/sagemaker.md how it reaches a job",
    ),
    ("service", r"InternalServerError", "the same command again; a very large checkpoint can be the reason"),
    (
        "account",
        r"AccessDenied|not authorized|UnrecognizedClient|ExpiredToken|ValidationException|Throttling",
        "what AWS says; docs/sagemaker.md has the two roles' policies",
    ),
    ("configuration", r"(?m)^(\[.*?\] )?refused: ", "what the refusal says"),
    (
        "non-finite loss",
        r"not finite for \d+ steps|is not finite",
        "a lower optimizer.learning_rate",
    ),
    (
        "lost worker",
        r"ended by signal|exit with status code|HorovodInternalError|has gone; start lm worker|a host went",
        "the same command again goes on from the last checkpoint",
    ),
]


@dataclass(frozen=True)
class Failure:
    """kind: one of CLASSES or "code". reason: SageMaker's. cause: the first real traceback or refusal of the log."""

    kind: str
    reason: str
    cause: str
    advice: str

    @property
    def is_capacity(self) -> bool:
        return self.kind == "capacity"

    @property
    def key(self) -> str:
        """The class as a setting has it: out_of_memory."""
        return self.kind.replace(" ", "_").replace("-", "_")

    @property
    def word(self) -> str:
        """The reason on one line: what SageMaker said, or the line that a traceback ends with."""
        text = self.reason or _last_word(self.cause) or "it said nothing"
        return " ".join(text.split())[:WORD_CHARACTERS]

    def __str__(self) -> str:
        cause = f"\nfirst cause:\n{self.cause}" if self.cause else ""
        return f"{self.kind}: {self.reason}\n     -> {self.advice}{cause}"


class JobFailed(RunFailed):
    """A job whose failure has a class. Exit status 1."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


def classify(reason: str, cause: str) -> Failure:
    """The class of a failed job, from DescribeTrainingJob's FailureReason and the log's first cause."""
    for text in (reason, cause):
        for kind, pattern, advice in CLASSES:
            if re.search(pattern, text):
                return Failure(kind, reason, cause, advice)
    return Failure("code", reason, cause, "the traceback tells where")


def failure_of(output: str, ended: str) -> Failure:
    """The failure that a job's output tells of. ended: how its process did, for a job that said nothing of it."""
    causes = Causes()
    for line in output.splitlines():
        match = RANK.match(line)
        causes.hear(match["rank"] if match else "", match["text"] if match else line)
    cause = causes.first()
    return classify("" if cause else ended, cause)


def _last_word(cause: str) -> str:
    """The line that says it: a traceback's last, the first that is not indented; of a refusal, its problems."""
    first, *rest = [RANK.sub(r"\g<text>", line) for line in cause.splitlines()] or [""]
    if first.startswith("Traceback"):
        return next((line for line in rest if line and not line.startswith(" ")), first)
    problems = [line for line in rest if re.match(r"  \d+\. ", line)]
    return " ".join(re.sub(r"^ +\d+\. ", "", line) for line in problems) or re.sub(r"^(failed|refused): ", "", first)
