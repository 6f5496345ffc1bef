"""Every strategy's training speed on this machine against one process's, by train.py itself."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List

from rich.console import Console
from rich.table import Table

STRATEGIES = {
    "single": [],
    "horovod, 2 processes": ["parallel=horovod", "cluster=local2"],
    "sdp, 2 processes": ["parallel=sdp", "cluster=local2"],
    "smp, 2 partitions": ["parallel=smp"],
}
# Nothing but steps: one evaluation of a few sequences, one checkpoint, no sample.
QUIET = ["tracking.uri=null", "profiling=none", "train.eval_sequences=8", "train.sample_tokens=0"]
TRAIN = Path(__file__).parents[2] / "train.py"


def bench_strategies(overrides: List[str], steps: int, rounds: int, console: Console) -> Dict[str, Dict[str, float]]:
    """Measures, prints and returns tokens/s of each, and how many times one process's that is.

    Raises ChildProcessError where a run fails; its own words come before.
    """
    rates: Dict[str, List[float]] = {name: [] for name in STRATEGIES}
    for number in range(rounds):
        for name, typed in STRATEGIES.items():
            console.print(f"round {number + 1} of {rounds}: {name}")
            rates[name].append(_tokens_per_second([*overrides, *typed], steps))
    medians = {name: statistics.median(measured) for name, measured in rates.items()}
    table = Table(title=f"{steps} steps, medians of {rounds} rounds")
    for heading in ("strategy", "tokens/s", "against one process"):
        table.add_column(heading)
    found = {}
    for name, rate in medians.items():
        found[name] = {"tokens_per_second": rate, "against_single": rate / medians["single"]}
        table.add_row(name, f"{rate:,.0f}", f"{rate / medians['single']:.2f} x")
    console.print(table)
    return found


def _tokens_per_second(overrides: List[str], steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        length = [f"train.steps={steps}", f"train.eval_every_steps={steps}", f"checkpoint.every_steps={steps}"]
        length += ["schedule.warmup_steps=1", f"run.directory={folder}/run"]
        command = [sys.executable, str(TRAIN), *QUIET, *length, *overrides]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise ChildProcessError(f"{' '.join(command)}: status {done.returncode}")
        rate: float = json.loads((Path(folder) / "run" / "summary.json").read_text())["tokens_per_second"]
        return rate
