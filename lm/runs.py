"""The `lm` commands about runs that were made: compare, reproduce, sweep, track."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from lm.refusal import ConfigError, Problem
from lm.report import make_console
from lm.sweep.ledger import LEDGER, Ledger


def add_runs(commands: Any) -> None:
    """Adds them to the command's parser."""
    compare = commands.add_parser("compare", help="runs side by side, with only the settings that differ")
    compare.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of runs, an experiment or a sweep")
    compare.add_argument("--sort", default="val_loss", metavar="METRIC", help="of the summary (%(default)s)")
    form = compare.add_mutually_exclusive_group()
    compare.add_argument("--html", type=Path, metavar="FILE", help="a page: curves, settings, differences")
    form.add_argument("--csv", action="store_true", help="on standard output")
    form.add_argument("--json", action="store_true", help="on standard output")
    compare.set_defaults(work=_compare)
    reproduce = commands.add_parser("reproduce", help="the one command that repeats a run")
    reproduce.add_argument("run", type=Path, metavar="RUN", help="its folder")
    reproduce.set_defaults(work=_reproduce)

    sweep = commands.add_parser("sweep", help="a sweep: its jobs, and going on with it")
    actions = sweep.add_subparsers(required=True, metavar="ACTION")
    for name, work, what in (
        ("status", _sweep_status, "each job's overrides, state, reason and best number"),
        ("resume", _sweep_resume, "the command that began it, again: what is done is left out"),
    ):
        one = actions.add_parser(name, help=what)
        one.add_argument("folder", type=Path, metavar="DIR", help="outputs/EXPERIMENT/sweep-HASH")
        one.set_defaults(work=work)

    track = commands.add_parser("track", help="MLflow").add_subparsers(required=True, metavar="ACTION")
    replay = track.add_parser("replay", help="send what an outage kept from MLflow")
    replay.add_argument("run", type=Path, metavar="RUN", help="the run's folder, or a sweep's")
    replay.set_defaults(work=_replay)


def _compare(options: argparse.Namespace) -> int:
    from lm import compare
    from lm.sweep.table import run_folders

    for folder in options.folders:
        if not folder.is_dir():
            raise ConfigError([Problem(("folder",), f"{folder} is no folder", "lm compare outputs/EXPERIMENT")])
    runs = compare.read_runs([run for folder in options.folders for run in run_folders(folder)])
    if not runs:
        text = f"there is no run in {', '.join(map(str, options.folders))}"
        raise ConfigError([Problem(("folder",), text, "lm compare outputs/EXPERIMENT, or a run's folder in it")])
    known = compare.measured(runs)
    if options.sort not in known and known:
        text = f"no run here has {options.sort}"
        raise ConfigError([Problem(("sort",), text, f"--sort {known[0]}, or one of {', '.join(known)}")])
    rows = compare.rows(compare.ordered(runs, options.sort))
    if options.html:
        from lm.comparison import comparison_page

        title = f"{len(runs)} runs of {', '.join(map(str, options.folders))}"
        options.html.write_text(comparison_page(title, compare.ordered(runs, options.sort)))
        print(f"{options.html}: the same as a page", file=sys.stderr)
    if options.csv or options.json:
        sys.stdout.write(compare.as_csv(rows) if options.csv else compare.as_json(rows) + "\n")
    else:
        console = make_console()
        console.print(compare.as_table(rows, options.sort))
        for sentence in compare.law_in_words(runs):
            console.print(sentence)
    return 0


def _sweep_status(options: argparse.Namespace) -> int:
    from lm.sweep.table import sweep_table

    ledger = _ledger(options.folder)
    make_console().print(sweep_table(ledger))
    doing = "a process is at work on it" if ledger.is_at_work() else f"nobody is; lm sweep resume {options.folder}"
    if ledger.count("pending", "running", "failed"):
        print(doing)
    return 0


def _sweep_resume(options: argparse.Namespace) -> int:
    ledger = _ledger(options.folder)
    words = [sys.executable, str(Path(__file__).resolve().parents[1] / "train.py"), *ledger.command]
    words += ["run.resume=auto"] if "run.resume=never" in words else []
    os.chdir(ledger.typed_in)
    sys.stdout.flush()
    os.execv(words[0], words)


def _ledger(folder: Path) -> Ledger:
    if not (folder / LEDGER).exists():
        text = f"{folder} is no sweep's folder: it has no {LEDGER}"
        raise ConfigError([Problem(("folder",), text, "the folder that a sweep names, outputs/EXPERIMENT/sweep-HASH")])
    return Ledger(folder)


def _reproduce(options: argparse.Namespace) -> int:
    from lm.reproduce import command

    _refuse_no_run(options.run)
    print(command(options.run))
    return 0


def _refuse_no_run(folder: Path) -> None:
    if not (folder / "config.yaml").exists():
        text = f"{folder} is no run folder: it has no config.yaml"
        raise ConfigError([Problem(("run",), text, "the folder that a run names, outputs/EXPERIMENT/NAME-HASH")])


def _replay(options: argparse.Namespace) -> int:
    from lm.sweep.tracking import replay_sweep
    from lm.tracking.run import replay

    if (options.run / LEDGER).exists():
        print(replay_sweep(options.run))
        return 0
    _refuse_no_run(options.run)
    print(replay(options.run))
    return 0
