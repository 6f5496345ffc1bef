"""`lm bench`: what can be measured, and what each measurement is told."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Dict

from lm.bench.baseline import OUTPUT, fallen, keep
from lm.refusal import ConfigError, Problem
from lm.report import make_console
from lm.run import RunFailed
from lm.start import import_tensorflow

DATA_MEGABYTES, LOADER_MEGABYTES, CHECKPOINT_MEGABYTES, IDS = 200, 1000, 1000, 32768  # what the baseline is of
SHAPE = ["dataset.vocabulary_size=8192", "train.global_batch_sequences=8"]  # of the step against PyTorch's


def add_bench(commands: Any) -> None:
    """Adds `bench` to the subcommands of `lm`."""
    bench = commands.add_parser("bench", help="measure speed here, beside what it is compared with")
    bench.add_argument("--quick", action="store_true", help="step, loader and checkpoint in a minute, for CI")
    bench.set_defaults(work=_quick)
    what = bench.add_subparsers(metavar="WHAT")

    step = what.add_parser("step", help="a training step against its matrix products, and against PyTorch")
    step.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of train.py")
    step.add_argument("--sizes", nargs="+", default=["10m"], metavar="MODEL", help="conf/model (10m)")
    step.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"], metavar="PRECISION", help="(both)")
    step.add_argument("--peers", type=Path, metavar="PYTHON", help="of an environment that has torch")
    step.add_argument("--rounds", type=positive, default=9, help="of which the median counts (%(default)s)")
    step.set_defaults(work=_step)

    strategies = what.add_parser("strategies", help="each strategy's training speed against one process's")
    strategies.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of train.py")
    strategies.add_argument("--steps", type=positive, default=40, help="of a run (%(default)s)")
    strategies.add_argument("--rounds", type=positive, default=3, help="of which the median counts (%(default)s)")
    strategies.set_defaults(work=_strategies)

    plan = what.add_parser("plan", help="planned memory and step time against measured")
    plan.set_defaults(work=_plan)

    data = what.add_parser("data", help="lm prepare against a pipeline of Hugging Face's tokenizers")
    data.add_argument("--megabytes", type=positive, default=DATA_MEGABYTES, help="of text found here (%(default)s)")
    data.add_argument("--vocabulary-size", type=positive, default=IDS, help="ids (%(default)s)")
    data.add_argument("--rounds", type=positive, default=1, help="of which the median counts (%(default)s)")
    data.set_defaults(work=_data)

    loader = what.add_parser("loader", help="feeding against training's appetite and the page cache")
    loader.add_argument("--megabytes", type=positive, default=LOADER_MEGABYTES, help="of tokens (%(default)s)")
    loader.add_argument("--seconds", type=positive, default=5, help="of each measurement (%(default)s)")
    loader.set_defaults(work=_loader)

    pipeline = what.add_parser("pipeline", help="a pipeline of stages against the ideal of its slowest")
    pipeline.add_argument("--partitions", type=positive, default=2, help="stages (%(default)s)")
    pipeline.add_argument("--microbatches", type=positive, default=8, help="of a step (%(default)s)")
    pipeline.set_defaults(work=_pipeline)

    checkpoint = what.add_parser("checkpoint", help="saving and restoring against the disk's own speed")
    checkpoint.add_argument("--megabytes", type=positive, default=CHECKPOINT_MEGABYTES, help="of weights (%(default)s)")
    checkpoint.add_argument("--rounds", type=positive, default=5, help="of which the median counts (%(default)s)")
    checkpoint.add_argument("--folder", type=Path, default=OUTPUT, help="on the disk in question (%(default)s)")
    checkpoint.set_defaults(work=_checkpoint)


def positive(text: str) -> int:
    """A whole number above zero, as an argument's type."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no positive whole number")
    return int(text)


def _report(name: str, found: Any, ratios: Dict[str, float], compared: bool = True) -> int:
    """compared: False for settings of one's own, which the baseline is not of."""
    console = make_console()
    bad = fallen(name, ratios, console) if compared else []
    keep(name, {"found": found, "ratios": ratios}, console)
    if bad:
        raise RunFailed("below the baseline: " + "; ".join(bad))
    return 0


def _step_ratios(rows: Dict[str, Any]) -> Dict[str, float]:
    ratios = {f"{name}, of its products' speed": row["share_of_products"] for name, row in rows.items()}
    against = {f"{name}, against PyTorch": row["against_peers"] for name, row in rows.items() if row["peers"]}
    return {**ratios, **against}


def _step(options: argparse.Namespace) -> int:
    from lm.bench.step import bench_step

    typed = [*SHAPE, *options.overrides]
    rows = bench_step(options.sizes, options.precisions, typed, options.peers, options.rounds, make_console())
    return _report("step", rows, _step_ratios(rows), compared=not options.overrides)


def _strategies(options: argparse.Namespace) -> int:
    from lm.bench.strategies import bench_strategies

    found = bench_strategies(options.overrides, options.steps, options.rounds, make_console())
    ratios = {name: row["against_single"] for name, row in found.items() if name != "single"}
    return _report("strategies", found, ratios, compared=not options.overrides)


def _plan(_: argparse.Namespace) -> int:
    from lm.bench.plan import bench_plan

    found = bench_plan(make_console())
    ratios = {}
    for row in found:
        for what, planned in (("peak_bytes", "planned_bytes"), ("step_seconds", "planned_step_seconds")):
            ratio = row[planned] / row[what]
            ratios[f"{' '.join(row['typed'])}, {what}"] = min(ratio, 1 / ratio)  # either way off is off
    return _report("plan", found, ratios)


def _data(options: argparse.Namespace) -> int:
    from lm.bench.data import bench_data

    found = bench_data(options.megabytes, options.vocabulary_size, options.rounds, make_console())
    rates = found["megabytes_per_second"]
    ratio = rates["lm prepare"] / rates["pool of Hugging Face encoders"]
    usual = (options.megabytes, options.vocabulary_size) == (DATA_MEGABYTES, IDS)
    return _report("data", found, {"preparing, against a pool of Hugging Face encoders": ratio}, compared=usual)


def _loader(options: argparse.Namespace) -> int:
    import_tensorflow()
    from lm.bench.loader import bench_loader

    found = bench_loader(options.megabytes, options.seconds, make_console())
    return _report("loader", found, _loader_ratios(found), compared=options.megabytes == LOADER_MEGABYTES)


def _loader_ratios(found: Dict[str, float]) -> Dict[str, float]:
    return {"feeding, of what model=tiny eats": found["tf.data"] / found["model=tiny"]}


def _pipeline(options: argparse.Namespace) -> int:
    from lm.bench.pipeline import bench_pipeline

    found = bench_pipeline(options.partitions, options.microbatches, make_console())
    ratios = {f"{one['where']}, {one['order']}, of the ideal": one["share_of_ideal"] for one in found}
    return _report("pipeline", found, ratios)


def _checkpoint(options: argparse.Namespace) -> int:
    import_tensorflow()
    from lm.bench.checkpoint import bench_checkpoint

    found = bench_checkpoint(options.megabytes, options.rounds, options.folder, make_console())
    return _report("checkpoint", found, found["ratios"], compared=options.megabytes == CHECKPOINT_MEGABYTES)


def _quick(options: argparse.Namespace) -> int:
    if not options.quick:
        text = "lm bench wants to know what to measure"
        raise ConfigError([Problem(("bench",), text, "lm bench --quick, or lm bench --help for what there is")])
    import_tensorflow()
    from lm.bench.checkpoint import bench_checkpoint
    from lm.bench.loader import bench_loader
    from lm.bench.step import bench_step

    console = make_console()
    rows = bench_step(["tiny"], ["float32", "bfloat16"], SHAPE, None, 5, console)
    loader = bench_loader(100, 1, console)
    checkpoint = bench_checkpoint(200, 5, OUTPUT, console)
    ratios = {**_step_ratios(rows), **_loader_ratios(loader), **checkpoint["ratios"]}
    return _report("quick", {"step": rows, "loader": loader, "checkpoint": checkpoint}, ratios)
