"""What earlier runs reached on the same hardware, from their summaries: what a next one is likely to reach."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

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


def reached(config: Config, outputs: Path = OUTPUTS) -> Optional[Reached]:
    """What finished runs reached with the same hardware, strategy, processes, precision and recomputation.

    Of several widths the nearest counts, because wider products come nearer to the hardware's peak. None without any.
    """
    here = hardware(config)
    found: Dict[int, List[float]] = {}
    for summary, settings, plan in _finished(outputs, here):
        if _kind(settings) == _kind(dataclasses.asdict(config)):
            rate = summary["tokens_per_second"] * plan["flops_per_token"]
            found.setdefault(settings["model"]["width"], []).append(rate)
    if not found:
        return None
    width = min(found, key=lambda width: abs(math.log(width / config.model.width)))
    return Reached(statistics.median(found[width]), len(found[width]), width)


def _finished(outputs: Path, hardware: str) -> Iterator[Tuple[Dict[str, Any], Any, Dict[str, Any]]]:
    """Summary, settings and plan of each finished run on this hardware whose speed was measured."""
    for path in sorted(outputs.glob("*/*/summary.json")):
        run = RunFolder(path.parent)
        summary = run.read_summary()
        measured = summary.get("status") == "finished" and summary.get("tokens_per_second")
        if measured and summary.get("hardware") == hardware and run.config.exists() and run.plan.exists():
            yield summary, OmegaConf.load(run.config), json.loads(run.plan.read_text())


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
