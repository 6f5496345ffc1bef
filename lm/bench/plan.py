"""What the plan says beforehand against what is measured: peak memory, and a step's time once one step is known."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, Dict, List, Tuple

from rich.console import Console
from rich.table import Table

from lm.compose import compose
from lm.estimate import HALF_SHARE_WIDTH, RECOMPUTED
from lm.plan import Plan, human_bytes, make_plan
from lm.schema import Config

STEPS = 3
# One of each precision calibrates the others: the first.
RUNS = (
    ["model=10m"],
    ["model=10m", "train.global_batch_sequences=16"],
    ["model=10m", "train.microbatch_sequences=2"],
    ["model=10m", "model.recompute=block"],
    ["model=10m", "parallel=smp"],
    ["model=tiny"],
    ["model=125m", "train.global_batch_sequences=1"],
    ["model=125m", "train.global_batch_sequences=2", "model.recompute=block"],
    ["model=10m", "train.precision=bfloat16"],
    ["model=125m", "train.global_batch_sequences=1", "train.precision=bfloat16"],
)


def bench_plan(console: Console) -> List[Dict[str, Any]]:
    """Measures, prints and returns a row a run: seconds a step and peak bytes, planned and measured.

    A step's plan is its FLOPs at the speed of the first run of its precision, which nears a processor's peak with the
    width as lm.estimate has it. Memory is above what the process has before there is a model.
    """
    found: List[Dict[str, Any]] = []
    known: Dict[str, float] = {}  # FLOP/s of a very wide model, by precision
    for typed in RUNS:
        console.print(f"measuring {' '.join(typed)}")
        config = compose(typed)
        plan = make_plan(config)
        seconds, peak = _measure(typed)
        full_speed = known.setdefault(config.train.precision, _work(config, plan) / _share(config) / seconds)
        planned = _work(config, plan) / _share(config) / full_speed
        memory = plan.memory_per_device.total * getattr(config.parallel, "partitions", 1)  # all in this process
        steps = {"step_seconds": seconds, "planned_step_seconds": planned}
        found.append({"typed": typed, **steps, "peak_bytes": peak, "planned_bytes": memory})
    table = Table(title="planned against measured")
    for heading in ("run", "step, s", "planned", "of it", "peak", "planned", "of it"):
        table.add_column(heading)
    for row in found:
        table.add_row(
            " ".join(row["typed"]),
            f"{row['step_seconds']:.2f}",
            f"{row['planned_step_seconds']:.2f}",
            f"{row['planned_step_seconds'] / row['step_seconds']:.0%}",
            human_bytes(row["peak_bytes"]),
            human_bytes(row["planned_bytes"]),
            f"{row['planned_bytes'] / row['peak_bytes']:.0%}",
        )
    console.print(table)
    return found


def _share(config: Config) -> float:
    return config.model.width / (config.model.width + HALF_SHARE_WIDTH)


def _work(config: Config, plan: Plan) -> float:
    """FLOPs of a step."""
    return plan.flops_per_token * plan.tokens_per_step * (RECOMPUTED if config.model.recompute == "block" else 1)


def _measure(typed: List[str]) -> Tuple[float, int]:
    """Seconds of the fastest step, and the peak of a process of its own in bytes."""
    command = [sys.executable, "-m", "lm.bench.stepping", *typed]
    asked = "1\n" * (STEPS + 1) + "memory\n"
    done = subprocess.run(command, input=asked, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ChildProcessError(f"{' '.join(command)}: status {done.returncode}")
    *seconds, peak = map(float, done.stdout.split())
    return min(seconds[1:]), int(peak)
