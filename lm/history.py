"""What earlier runs reached on the same hardware, from their summaries: what a next one is likely to reach."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from omegaconf import OmegaConf

from lm.plan import Plan
from lm.run import OUTPUTS, RunFolder
from lm.schema import Config, SageMaker

DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Reached:
    """The median of runs of one width: FLOP/s of all processes together, communication and bubbles included."""

    flops_per_second: float
    runs: int
    width: int

    def step_seconds(self, plan: Plan) -> float:
        """An optimizer step of a plan at that speed."""
        return plan.flops_per_token * plan.tokens_per_step / self.flops_per_second

    def rows(self, plan: Plan) -> List[Tuple[str, str]]:
        """As people read it: a name and a value a row."""
        seconds = self.step_seconds(plan)
        what = f"{self.runs} run{'s' * (self.runs > 1)} of width {self.width} on this hardware"
        speed = f"{seconds:.3g} s at {plan.tokens_per_step / seconds:,.0f} tokens/s, as {what} reached"
        return [
            ("step, expected", speed),
            ("run, expected", f"{seconds * plan.steps / 3600:,.2f} hours of steps"),
        ]


def hardware(config: Config) -> str:
    """What a run of this configuration computes on: its instance type, or this machine's processors and GPUs."""
    if isinstance(config.cluster, SageMaker):
        return str(config.cluster.instance_type)
    processor = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cores = f"{len(os.sched_getaffinity(0))} x {processor[1].strip() if processor else os.uname().machine}"
    models = [re.search(r"^Model:\s*(.*)$", path.read_text(), re.MULTILINE) for path in DRIVER.glob("*/information")]
    return " + ".join([cores, *(model[1].strip() for model in models if model)])


class FinishedRun:
    """A run whose speed was measured. Its files are read once, and those beside the summary when they are asked for."""

    def __init__(self, folder: RunFolder, summary: Dict[str, Any]) -> None:
        self.folder, self.summary = folder, summary

    @cached_property
    def settings(self) -> Any:
        return OmegaConf.load(self.folder.config)

    @cached_property
    def flops_per_second(self) -> float:
        rate: float = self.summary["tokens_per_second"] * json.loads(self.folder.plan.read_text())["flops_per_token"]
        return rate


def finished_runs(outputs: Path = OUTPUTS) -> List[FinishedRun]:
    """Every finished run whose speed was measured and whose settings and plan are still there."""
    folders = [RunFolder(path.parent) for path in sorted(outputs.glob("*/*/summary.json"))]
    runs = [FinishedRun(run, run.read_summary()) for run in folders if run.config.exists() and run.plan.exists()]
    return [run for run in runs if run.summary.get("status") == "finished" and run.summary.get("tokens_per_second")]


def reached(config: Config, runs: Optional[Sequence[FinishedRun]] = None) -> Optional[Reached]:
    """What finished runs reached with the same hardware, strategy, processes, precision and recomputation.

    Of several widths the nearest counts, because wider products come nearer to the hardware's peak. None without any.
    runs: None: those in outputs/.
    """
    here, kind = hardware(config), _kind(dataclasses.asdict(config))
    found: Dict[int, List[float]] = {}
    for run in finished_runs() if runs is None else runs:
        if run.summary.get("hardware") == here and _kind(run.settings) == kind:
            found.setdefault(run.settings["model"]["width"], []).append(run.flops_per_second)
    if not found:
        return None
    width = min(found, key=lambda width: abs(math.log(width / config.model.width)))
    return Reached(statistics.median(found[width]), len(found[width]), width)


def _kind(settings: Any) -> Tuple[Any, ...]:
    """What two runs must have in common for the speed of one to say something of the other's."""
    parallel = settings["parallel"]
    return (
        parallel["name"],
        parallel.get("partitions"),
        settings["cluster"]["processes"],
        settings["train"]["precision"],
        settings["model"]["recompute"],
    )
