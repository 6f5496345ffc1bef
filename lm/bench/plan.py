"""What the plan says beforehand against what is measured: peak memory, and a step's time."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from rich.console import Console
from rich.table import Table

from lm.bench.contender import our_command, started
from lm.compose import compose
from lm.plan import human_bytes, make_plan
from lm.processors import copied_bytes, step_seconds

STEPS = 3
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

    A step is planned from the speed of the run's own matrix products and of a copy here (lm.processors). Memory is what
    TensorFlow's allocator has in use.
    """
    found: List[Dict[str, Any]] = []
    copied = copied_bytes()
    for typed in RUNS:
        console.print(f"measuring {' '.join(typed)}")
        config = compose(typed)
        plan = make_plan(config)
        seconds, products, peak = _measure(typed)
        planned = step_seconds(config, plan, products, copied)
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


def _measure(typed: List[str]) -> Tuple[float, float, int]:
    """In a process of its own: seconds of the fastest step but the first, its products' FLOP/s, its tensors' bytes."""
    with started({"ours": our_command(typed)}) as contenders:
        ours = contenders["ours"]
        _, *seconds = [ours.ask(1) for _ in range(STEPS + 1)]
        peak = int(ours.ask("memory"))
        return min(seconds), ours.ask("products"), peak
