"""The names of a run on SageMaker: its job, and where its code, its data and its folder lie in S3."""

from __future__ import annotations

import re
import secrets
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List

from lm.run import OUTPUTS, run_folder, run_name
from lm.schema import Config

PREFIX = "lm"  # of every job name, and of every key in the bucket
NAME_CHARACTERS = 63  # at most (CreateTrainingJob, TrainingJobName)
TAG_CHARACTERS = 256


@dataclass(frozen=True)
class Places:
    """Where a run's things are. The location follows from the run's hash, so the same command finds them again."""

    bucket: str
    run: str  # EXPERIMENT/NAME-HASH

    @property
    def root(self) -> str:
        return f"s3://{self.bucket}/{PREFIX}/runs/{self.run}"

    @property
    def run_folder(self) -> str:
        """The run folder: /opt/ml/checkpoints, which SageMaker keeps in step with this prefix."""
        return f"{self.root}/run"

    @property
    def output(self) -> str:
        """model.tar.gz and output.tar.gz of each job."""
        return f"{self.root}/output"

    @property
    def code(self) -> str:
        return f"{self.root}/code"

    def dataset(self, folder: Path) -> str:
        """A prepared set that was made here: its folder's name has the hash of its settings."""
        return f"s3://{self.bucket}/{PREFIX}/datasets/{folder.name}"


def local_run(run: str) -> Path:
    """The run's folder on this machine."""
    return OUTPUTS / run


def job_name(config: Config) -> str:
    """A valid, readable name that no other job has: lm-NAME-HASH-DATE-TIME-RANDOM, the name cut where it must be."""
    end = f"-{config.hash()}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(4)}"
    readable = re.sub(r"[^A-Za-z0-9]+", "-", f"{PREFIX}-{config.run.name}").strip("-")
    return readable[: NAME_CHARACTERS - len(end)].rstrip("-") + end


def tags(config: Config) -> List[Dict[str, str]]:
    """What a bill or a list of jobs can be sorted by."""
    values = {
        "lm:run": run_name(config),
        "lm:experiment": config.run.experiment,
        "lm:hash": config.hash(),
        "lm:git-commit": git_commit(),
    }
    return [{"Key": key, "Value": value[:TAG_CHARACTERS]} for key, value in values.items()]


def git_commit() -> str:
    """The commit of this checkout, "-modified" where files differ from it; "unknown" outside of git."""
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=-modified"]
    try:
        found = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def folder_of(config: Config) -> Path:
    """Where this machine keeps what it knows of the run's jobs: sagemaker/ in the run folder."""
    return run_folder(config).path / "sagemaker"
