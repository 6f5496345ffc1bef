"""What was measured before, and whether a ratio has fallen below that by more than its noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import yaml
from rich.console import Console
from rich.table import Table

BASELINE = Path(__file__).with_name("baseline.yaml")
OUTPUT = Path("outputs/bench")


def keep(name: str, found: Any, console: Console) -> None:
    """Writes what a benchmark found as JSON."""
    path = OUTPUT / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
    console.print(f"{path}: the same as JSON")


def fallen(name: str, ratios: Dict[str, float], console: Console) -> List[str]:
    """Shows each ratio beside its baseline. Returns what has fallen, and by how much."""
    known = yaml.safe_load(BASELINE.read_text()).get(name, {})
    table = Table(title="against the baseline (lm/bench/baseline.yaml)")
    for heading in ("ratio", "now", "before", "noise"):
        table.add_column(heading)
    bad = []
    for what, now in ratios.items():
        before = known.get(what)
        if before is None:
            table.add_row(what, f"{now:.2f}", "", "")
            continue
        table.add_row(what, f"{now:.2f}", f"{before['ratio']:.2f}", f"{before['noise']:.0%}")
        if now < before["ratio"] * (1 - before["noise"]):
            bad.append(f"{what}: {now:.2f}, was {before['ratio']:.2f} within {before['noise']:.0%}")
    console.print(table)
    return bad
