"""How long a run is, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Optional

from lm.setting import setting

OBJECTIVES = ("val_loss", "best_val_loss", "val_bits_per_byte", "loss", "tokens_per_second", "tokens_per_usd")
FAILURES = (
    *("capacity", "quota", "spot", "time", "out_of_memory", "data", "service", "account", "configuration"),
    *("non_finite_loss", "lost_worker", "code"),
)
PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass
class Train:
    """How long, in what portions, in which precision."""

    steps: int = setting(minimum=1)
    global_batch_sequences: int = setting(minimum=1)  # sequences an optimizer step, all replicas together
    microbatch_sequences: Optional[int] = setting(None, minimum=1)  # a replica's share of a pass; null: all
    precision: str = setting("float32", choices=PRECISIONS)
    xla: bool = setting(True)  # what lies between matrix products is compiled (lm.fused)
    initial_loss_scale: float = setting(2.0**15, minimum=1)  # float16 only
    max_nonfinite_steps: int = setting(3, minimum=1)  # stop at this many in a row
    log_every_steps: int = setting(10, minimum=1)
    eval_every_steps: int = setting(200, minimum=1)
    eval_sequences: Optional[int] = setting(None, minimum=1)  # at each, spread over the held-out text; null: all of it
    sample_tokens: int = setting(64, minimum=0)  # of text generated at the end; 0: none


@dataclass
class Checkpoint:
    """When a run is saved, and how many of its checkpoints stay."""

    every_steps: int = setting(100, minimum=1)
    keep: int = setting(2, minimum=1)  # the newest; the best by validation loss stays besides


@dataclass
class Run:
    """One run: its name, its seed, and what to do when it was begun before."""

    experiment: str = setting("default", pattern=r"[A-Za-z0-9._-]+")
    name: str = setting(pattern=r"[A-Za-z0-9._-]+")
    seed: int = setting(0, minimum=0, maximum=2**31 - 1)
    resume: str = setting("auto", choices=("auto", "must", "never"))
    directory: Optional[str] = setting(None)  # go on in this run folder, whatever its hash


@dataclass
class Sweep:
    """How the jobs of a sweep run on, and what becomes of those that fail; docs/sweeps.md."""

    objective: str = setting("val_loss", choices=OBJECTIVES)  # of summary.json: what is told of a job, Optuna's aim
    jobs_at_once: int = setting(1, minimum=1)  # on this machine, which share its cores; cluster.max_parallel_jobs there
    retry: Dict[str, int] = setting({"lost_worker": 1})  # class of failure -> times that such a job is tried again
    alike: int = setting(3, minimum=1)  # end the sweep when so many jobs, its first, fail for one reason


@dataclass
class Profiling:
    """What is measured of the host while it trains."""

    name: str = setting(choices=("system", "none"))
    energy: bool = setting(True)
    country: Optional[str] = setting(None, pattern=r"[A-Z]{3}", like="DEU")  # whose electricity it is (ISO 3166)


@dataclass
class Tracking:
    """Where MLflow is; null turns it off."""

    uri: Optional[str] = setting("sqlite:///outputs/mlflow.db")
