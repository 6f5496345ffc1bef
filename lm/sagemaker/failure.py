"""Why a job ended: a class that tells what to do about it, from SageMaker's reason and the job's last words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import List, Tuple

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
        r"|instance type with more memory|MemoryError|bad_alloc|exit (code|status):? ?(137|-9)\b|signal 9 \(Killed\)",
        "a smaller train.microbatch_sequences, model.recompute=block, or more parallel.partitions",
    ),
    (
        "data",
        r"DatasetError|[Dd]ata ?[Dd]ownload|No S3 objects found|NoSuchKey|manifest\.json|no prepared dataset"
        r"|[Uu]nable to mount|[Ff]ailed to mount",
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

    def __str__(self) -> str:
        cause = f"\nfirst cause:\n{self.cause}" if self.cause else ""
        return f"{self.kind}: {self.reason}\n     -> {self.advice}{cause}"


def classify(reason: str, cause: str) -> Failure:
    """The class of a failed job, from DescribeTrainingJob's FailureReason and the log's first cause."""
    for text in (reason, cause):
        for kind, pattern, advice in CLASSES:
            if re.search(pattern, text):
                return Failure(kind, reason, cause, advice)
    return Failure("code", reason, cause, "the traceback tells where")
