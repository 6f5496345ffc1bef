"""What a run shows: its plan, its progress and its closing table; on a terminal, in a pipe, and in log.txt."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lm.plan import human_bytes

log = logging.getLogger("lm")


def make_console() -> Console:
    """Where a run prints. Outside a terminal lines are not cut at 80 columns."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140, soft_wrap=True)


def open_log(path: Optional[Path], console: Console, chief: bool) -> None:
    """Sends the run's log to the console and, on rank 0, to log.txt. Other ranks say only what went wrong."""
    log.setLevel(logging.INFO if chief else logging.WARNING)
    log.propagate = False
    log.handlers.clear()
    log.addHandler(_ConsoleHandler(console))
    if path is not None:
        file = logging.FileHandler(path)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(file)


class _ConsoleHandler(logging.Handler):
    """Log lines through rich's console, above the bar where there is one."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(self.format(record), markup=False, soft_wrap=True)


def table(title: str, rows: List[Tuple[str, str]]) -> Table:
    """Names and values in two columns."""
    grid = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


class StepDisplay:
    """A bar on a terminal, a line each logged step elsewhere; log.txt has the lines in any case."""

    def __init__(self, console: Console, steps: int, step: int, chief: bool) -> None:
        columns = [
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        ]
        self.bar = Progress(*columns, console=console, disable=not (chief and console.is_terminal))
        self.task = self.bar.add_task("train", total=steps, completed=step, numbers="")
        self.steps = steps
        self.bar.start()

    def step(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def logged(self, line: Dict[str, Any]) -> None:
        numbers = (
            f"loss {line['loss']:.4f}  lr {line['learning_rate']:.2e}  norm {line['grad_norm']:.3f}  "
            f"{line['tokens_per_second']:,.0f} tokens/s  mfu {line['mfu']:.0%}  wait {line['data_wait_fraction']:.1%}"
        )
        self.bar.update(self.task, numbers=numbers)
        self._say(f"step {line['step']:>{len(str(self.steps))}}/{self.steps}  {numbers}")

    def evaluated(self, step: int, measured: Dict[str, float], gzip_bits_per_byte: float) -> None:
        log.info(
            "step %d  validation loss %.4f  %.4f bits a byte (gzip -9: %.4f)",
            step,
            measured["val_loss"],
            measured["val_bits_per_byte"],
            gzip_bits_per_byte,
        )

    def close(self) -> None:
        self.bar.stop()

    def _say(self, text: str) -> None:
        """To log.txt; to the console too where there is no bar that shows it."""
        if self.bar.disable:
            log.info(text)
            return
        for handler in log.handlers:
            if isinstance(handler, logging.FileHandler):
                handler.handle(log.makeRecord("lm", logging.INFO, __file__, 0, text, (), None))


class SweepDisplay:
    """Bars on a terminal: the sweep's, and one of each job that runs; nothing elsewhere."""

    def __init__(self, console: Console, jobs: int) -> None:
        columns = [TextColumn("[bold]{task.description}"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()]
        self.bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self.whole = self.bars.add_task("jobs", total=jobs)
        self.tasks: Dict[int, Any] = {}

    def __enter__(self) -> "SweepDisplay":
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def step(self, job: int, shown: str, step: int, steps: int) -> None:
        if job not in self.tasks:
            self.tasks[job] = self.bars.add_task(f"job {job} {escape(shown)}", total=steps)
        self.bars.update(self.tasks[job], completed=step)

    def ended(self, job: int) -> None:
        if job in self.tasks:
            self.bars.remove_task(self.tasks.pop(job))
        self.bars.advance(self.whole)


def closing_rows(summary: Dict[str, Any], folder: Path) -> List[Tuple[str, str]]:
    """The closing table of a run, from its summary."""
    seconds = summary["goodput_seconds"]
    total = seconds["total"] or 1.0
    split = ", ".join(
        f"{kind.replace('_', ' ')} {spent / total:.0%}" for kind, spent in seconds.items() if kind != "total"
    )
    rows = [
        ("status", f"{summary['status']} at step {summary['step']:,} of {summary['steps']:,}"),
        ("tokens", f"{summary['tokens']:,}"),
    ]
    if summary.get("loss") is not None:
        rows.append(("training loss", f"{summary['loss']:.4f} nats a token"))
    if summary.get("val_loss") is not None:
        rows.append(("validation loss", f"{summary['val_loss']:.4f} nats a token"))
        ours, gzip = summary["val_bits_per_byte"], summary["gzip_bits_per_byte"]
        text = "the same text" if summary.get("eval_sequences") is None else "all of the held-out text"
        verdict = "better than" if ours < gzip else "not yet better than"
        rows.append(("compression", f"{ours:.4f} bits a byte, {verdict} gzip -9's {gzip:.4f} on {text}"))
    if summary.get("tokens_per_second"):
        peak = summary["peak_flops_per_second"]
        rows.append(("speed", f"{summary['tokens_per_second']:,.0f} tokens/s"))
        rows.append(("mfu", f"{summary['mfu']:.1%} of {peak / 1e12:.3g} TFLOP/s ({summary['peak_from']})"))
    if summary.get("energy_kwh"):
        kg = summary.get("co2e_kg")
        emitted = f", {kg:.3g} kg of CO2e" if kg is not None else "; profiling.country=DEU, say, for its emissions"
        rows.append(("energy", f"{summary['energy_kwh']:.3g} kWh{emitted}"))
    if summary.get("usd"):
        rows.append(("cost", f"{summary['usd']:,.2f} USD: {summary['tokens_per_usd']:,.0f} tokens a dollar"))
    rows += [
        ("time", f"{time.strftime('%H:%M:%S', time.gmtime(seconds['total']))}: {split}"),
        ("peak memory", f"{human_bytes(summary['peak_memory_bytes'])} in rank 0's process"),
    ]
    stages = [human_bytes(peak) for peak in summary.get("stage_peak_memory_bytes") or []]
    if stages:
        rows.append(("peak a stage", ", ".join(stages)))
    rows.append(("run", str(folder)))
    return rows
