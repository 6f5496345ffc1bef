"""`lm compare`: the runs of an experiment side by side, with only those settings that differ."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Sequence

import yaml
from rich.table import Table

from lm.history import LOADER, UNREADABLE
from lm.run import RunFolder
from lm.scaling import fit
from lm.tracking.names import flatten

METRICS = (
    *("val_loss", "val_bits_per_byte", "loss", "tokens", "tokens_per_second", "mfu", "goodput"),
    *("energy_kwh", "co2e_kg", "usd", "tokens_per_usd"),
)
ON_A_TERMINAL = ("val_loss", "val_bits_per_byte", "tokens_per_second", "usd")
HIGHER_IS_BETTER = ("tokens", "tokens_per_second", "mfu", "goodput", "tokens_per_usd")
OF_THE_PLACE = ("run.directory", "run.resume", "tracking.uri", "sweep.")  # and of the command
log = logging.getLogger("lm")


@dataclass(frozen=True)
class Run:
    """A run as its folder has it. summary: empty while it has not ended."""

    folder: Path
    settings: Dict[str, Any]  # by dotted names
    summary: Dict[str, Any]

    @property
    def status(self) -> str:
        return self.summary.get("status", "not ended")


def read_runs(folders: Sequence[Path]) -> List[Run]:
    """The runs in some run folders, or in experiments' folders; the log names those that cannot be read."""
    found = []
    for folder in folders:
        for run in [folder] if (folder / "config.yaml").exists() else sorted(folder.iterdir()):
            if not (run / "config.yaml").exists():
                continue
            try:
                settings = flatten(yaml.load((run / "config.yaml").read_text(), LOADER))
                found.append(Run(run, settings, dict(RunFolder(run).read_summary())))
            except UNREADABLE as error:
                log.warning("%s is left out: %s: %s", run, type(error).__name__, error)
    return found


def differing(runs: Sequence[Run]) -> List[str]:
    """The settings that not all runs have alike, by their dotted names; not where a run is."""
    names = {name: None for run in runs for name in run.settings if not name.startswith(OF_THE_PLACE)}
    return [name for name in names if len({repr(run.settings.get(name)) for run in runs}) > 1]


def measured(runs: Sequence[Run]) -> List[str]:
    """The metrics that at least one run has, in the order of METRICS."""
    return [name for name in METRICS if any(run.summary.get(name) is not None for run in runs)]


def ordered(runs: Sequence[Run], metric: str) -> List[Run]:
    """The best first by a number of the summary; runs without it last."""
    sign = -1.0 if metric in HIGHER_IS_BETTER else 1.0

    def place(run: Run) -> float:
        value = run.summary.get(metric)
        return sign * value if isinstance(value, (int, float)) else math.inf

    return sorted(runs, key=place)


def rows(runs: Sequence[Run]) -> List[Dict[str, Any]]:
    """A row a run: its folder, status, step, metrics, and the settings that differ."""
    metrics, settings = measured(runs), differing(runs)
    return [
        {
            "run": str(run.folder),
            "status": run.status,
            "step": run.summary.get("step"),
            **{name: run.summary.get(name) for name in metrics},
            **{name: run.settings.get(name) for name in settings},
        }
        for run in runs
    ]


def law_in_words(runs: Sequence[Run]) -> List[str]:
    """The scaling law through those that finished, and what it says of a larger one; nothing where they are too few."""
    summaries = [run.summary for run in runs if run.status == "finished" and run.summary.get("val_loss")]
    points = [(one["parameters"], one["tokens"], one["val_loss"]) for one in summaries if one.get("parameters")]
    law = fit(points)
    return [str(law), law.of_ten_times(max(6.0 * n * d for n, d, _ in points))] if law is not None else []


def as_table(found: List[Dict[str, Any]], metric: str) -> Table:
    """For a terminal: of the metrics those that fit there, and the one that was sorted by."""
    columns = [name for name in found[0] if name not in METRICS or name in (*ON_A_TERMINAL, metric)]
    columns = [name for name in columns if name not in ("run.experiment", "run.name")]  # the folder says them
    table = Table(title=f"{len(found)} runs by {metric}", caption="--csv and --json have every metric")
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name in ("run", "status"))
    for row in found:
        table.add_row(*(shown(row[name]) for name in columns))
    return table


def as_csv(found: List[Dict[str, Any]]) -> str:
    """A heading and a line a run; what a run does not have is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def as_json(found: List[Dict[str, Any]]) -> str:
    return json.dumps(found, indent=1)


def shown(value: Any) -> str:
    """A value as people read it; nothing for what is not there."""
    return "" if value is None else f"{value:,.5g}" if isinstance(value, float) else str(value)
