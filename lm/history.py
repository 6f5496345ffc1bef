"""What earlier runs reached on the same hardware, from their summaries: what a next one is likely to reach."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import yaml

from lm.plan import Plan
from lm.run import OUTPUTS, RunFolder
from lm.schema import Config, SageMaker

DRIVER = Path("/proc/driver/nvidia/gpus")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's where it was there when PyYAML was built
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError)  # files of another's making
log = logging.getLogger("lm")


@dataclass(frozen=True)
class Speed:
    """FLOP/s of all processes together, communication and bubbles included, and how they are known."""

    flops_per_second: float
    because: str

    def step_seconds(self, plan: Plan) -> float:
        """An optimizer step of a plan at that speed."""
        return plan.flops_per_token * plan.tokens_per_step / self.flops_per_second

    def rows(self, plan: Plan) -> List[Tuple[str, str]]:
        """As people read it: a name and a value a row."""
        seconds = self.step_seconds(plan)
        return [
            ("step, expected", f"{seconds:.3g} s at {plan.tokens_per_step / seconds:,.0f} tokens/s: {self.because}"),
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


@dataclass(frozen=True)
class FinishedRun:
    """A run whose speed was measured."""

    hardware: str
    kind: Tuple[Any, ...]
    width: int
    flops_per_second: float


def finished_runs(outputs: Path = OUTPUTS) -> List[FinishedRun]:
    """Every finished run whose speed was measured and whose files can be read; the log names those that cannot."""
    found = []
    for path in sorted(outputs.glob("*/*/summary.json")):
        try:
            run = _read(RunFolder(path.parent))
        except UNREADABLE as error:
            log.warning("%s says nothing of speed: %s: %s", path.parent, type(error).__name__, error)
            continue
        found += [run] if run is not None else []
    return found


def _read(folder: RunFolder) -> Optional[FinishedRun]:
    """None for a run that did not finish, or of before summaries told the hardware. Raises one of UNREADABLE."""
    summary = folder.read_summary()
    if summary.get("status") != "finished" or not summary.get("tokens_per_second") or "hardware" not in summary:
        return None
    settings = yaml.load(folder.config.read_text(), LOADER)
    rate = summary["tokens_per_second"] * json.loads(folder.plan.read_text())["flops_per_token"]
    return FinishedRun(summary["hardware"], _kind(settings), int(settings["model"]["width"]), float(rate))


def reached(config: Config, runs: Optional[Sequence[FinishedRun]] = None) -> Optional[Speed]:
    """The median of what finished runs reached with the same hardware, strategy, processes, precision, recomputation.

    Of several widths the nearest counts, because wider products come nearer to the hardware's peak. None without any.
    runs: None: those in outputs/.
    """
    here, kind = hardware(config), _kind(dataclasses.asdict(config))
    found: Dict[int, List[float]] = {}
    for run in finished_runs() if runs is None else runs:
        if (run.hardware, run.kind) == (here, kind):
            found.setdefault(run.width, []).append(run.flops_per_second)
    if not found:
        return None
    width = min(found, key=lambda width: abs(math.log(width / config.model.width)))
    count = len(found[width])
    because = f"what {count} finished run{'s' * (count > 1)} of width {width} reached on this hardware"
    return Speed(statistics.median(found[width]), because)


def _kind(settings: Any) -> Tuple[Any, ...]:
    """What two runs must have in common for the speed of one to say something of the other's."""
    parallel, cluster = settings["parallel"], settings["cluster"]
    return (
        *(parallel.get(key) for key in ("name", "partitions", "microbatches", "pipeline")),
        cluster["processes"],
        tuple(cluster["hosts"]),
        settings["train"]["precision"],
        settings["model"]["recompute"],
    )
