"""The `lm` command: everything beside training itself."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, List, Optional

from lm import job
from lm.bench.command import add_bench, positive
from lm.data.shards import MANIFEST, SPLITS
from lm.refusal import ConfigError, Problem
from lm.report import make_console, table
from lm.runs import add_runs
from lm.schema import Config, SageMaker


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs one subcommand. Returns the exit status: 0 done, 2 refused, 1 failed."""
    parser = argparse.ArgumentParser(
        prog="lm", description=__doc__, epilog="OVERRIDES are those of train.py: model=125m train.steps=1000"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", help="what a run would be: parameters, batch, tokens, bytes a device")
    plan.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    plan.add_argument("--json", action="store_true", help="as JSON on standard output")
    plan.add_argument("--sweep", action="store_true", help="rank what a SageMaker run fits on, by dollars")
    plan.add_argument("--rows", type=positive, default=20, help="of the ranking that are shown (%(default)s)")
    plan.add_argument("--html", type=Path, metavar="FILE", help="the ranking as a chart of dollars and hours")
    plan.set_defaults(work=_plan)

    prepare = commands.add_parser("prepare", help="tokenize a dataset into shards, ahead of training")
    prepare.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    prepare.set_defaults(work=_prepare)

    verify = commands.add_parser("verify", help="recompute a prepared dataset's checksums and counts")
    verify.add_argument("dataset", type=Path, metavar="DATASET", help="the prepared set's folder")
    verify.set_defaults(work=_verify)

    nanogpt = commands.add_parser("to-nanogpt", help="write a prepared dataset as nanoGPT's train.bin and val.bin")
    nanogpt.add_argument("dataset", type=Path, metavar="DATASET", help="the prepared set's folder")
    nanogpt.add_argument("folder", type=Path, metavar="FOLDER", help="where the two files go")
    nanogpt.set_defaults(work=_to_nanogpt)

    add_bench(commands)

    worker = commands.add_parser("worker", help="lend this host's devices to a run elsewhere: cluster=tf_hosts")
    worker.add_argument("port", type=_port, metavar="PORT", help="to listen on; for a private network alone")
    worker.set_defaults(work=_worker)

    jobs = commands.add_parser("jobs", help="SageMaker jobs that were submitted from here or elsewhere")
    jobs.add_argument("--region", help="of AWS; AWS_REGION or the profile's otherwise")
    jobs.set_defaults(work=_jobs)
    for name, work, what in (
        ("attach", _attach, "follow a SageMaker job to its end, and bring its run folder home"),
        ("stop", _stop, "stop a SageMaker job, which saves a checkpoint first"),
    ):
        one = commands.add_parser(name, help=what)
        one.add_argument("job", metavar="JOB", help="its name, as lm jobs shows it")
        one.add_argument("--region", help="of AWS; AWS_REGION or the profile's otherwise")
        one.set_defaults(work=work)
    diff = commands.add_parser("diff-request", help="a SageMaker request against the experiment's last one")
    diff.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    diff.set_defaults(work=_diff_request)

    add_runs(commands)

    options = parser.parse_args(arguments)
    return job.status_of(lambda: options.work(options))


def _port(text: str) -> int:
    if positive(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: 1 to 65535")
    return int(text)


def _plan(options: argparse.Namespace) -> int:
    from lm.catalog.checks import choose
    from lm.compose import compose
    from lm.estimate import estimate
    from lm.plan import make_plan
    from lm.processors import expected_here

    if options.sweep or options.html:
        return _rank(compose(options.overrides, workable=False), options)
    config = compose(options.overrides)
    plan = make_plan(config)
    values, rows = plan.as_dict(), plan.rows()
    assumptions: List[Any] = []
    if isinstance(config.cluster, SageMaker):
        choice, _ = choose(config, plan)
        rows += choice.rows(config.cluster)
        found = estimate(config, plan, choice)
        if found is not None:
            values["estimate"] = found.as_dict()
            rows += found.rows()
            assumptions = [(one.name, f"{one.value}  ({one.source})") for one in found.assumptions]
    else:
        speed = expected_here(config, plan)
        if speed is not None:
            values["expected_step_seconds"] = speed.step_seconds(plan)
            rows += speed.rows(plan)
    if options.json:
        print(json.dumps(values, indent=1))
        return 0
    console = make_console()
    console.print(table(f"{config.run.experiment} / {config.run.name}-{config.hash()}", rows))
    if assumptions:
        console.print(table("\nassumed", assumptions))
    return 0


def _rank(config: Config, options: argparse.Namespace) -> int:
    from lm.charts import page, scatter
    from lm.ranking import chart_points, rank, ranking_table

    if not isinstance(config.cluster, SageMaker):
        text = f"a ranking is of SageMaker's instance types, and cluster={config.cluster.name}"
        raise ConfigError([Problem(("cluster",), text, "cluster=p3x1, or cluster=p3x10 for ten hosts")])
    found = rank(config)
    if not found:
        text = "nothing in the catalog fits this run: model.recompute=block, and every partitioning, were tried"
        raise ConfigError([Problem(("model",), text, "a smaller model, or a shorter model.context")])
    points = chart_points(found)
    if options.html and not points:
        text = f"{config.cluster.region}: no price of what fits is known there, and --html draws dollars"
        raise ConfigError([Problem(("cluster.region",), text, "cluster.region=us-east-1, or no --html")])
    if options.json:
        print(json.dumps([one.as_dict(options.overrides) for one in found], indent=1))
    else:
        make_console().print(ranking_table(found, options.rows))
    if options.html:
        chart = scatter("hours", "US dollars", points)
        options.html.write_text(page(f"{config.run.name}: dollars and hours", {"": chart}))
        print(f"{options.html}: a chart of {len(points)}", file=sys.stderr)
    return 0


def _prepare(options: argparse.Namespace) -> int:
    from lm.compose import compose
    from lm.data.prepare import prepare

    config = compose(options.overrides)
    folder, manifest = prepare(config.dataset, config.prepare, make_console(), wait=False)
    tokens = ", ".join(f"{manifest.totals(name).tokens:,} {name} tokens" for name in SPLITS)
    print(f"{folder}: {tokens}, fingerprint {manifest.fingerprint()}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from lm.data.verify import verify

    _refuse_other_folder(options.dataset)
    found = verify(options.dataset, make_console())
    print(f"{options.dataset}: {found}")
    return 0


def _to_nanogpt(options: argparse.Namespace) -> int:
    from lm.data.interchange import write_nanogpt

    _refuse_other_folder(options.dataset)
    for path in write_nanogpt(options.dataset, options.folder):
        print(f"{path}: {path.stat().st_size:,} bytes")
    return 0


def _refuse_other_folder(folder: Path) -> None:
    if not (folder / MANIFEST).exists():
        text = f"{folder} is no prepared dataset: it has no {MANIFEST}"
        raise ConfigError([Problem(("dataset",), text, "the folder that lm prepare names, outputs/datasets/NAME-HASH")])


def _jobs(options: argparse.Namespace) -> int:
    from lm.sagemaker.jobs import list_jobs

    make_console().print(list_jobs(options.region))
    return 0


def _attach(options: argparse.Namespace) -> int:
    from lm.sagemaker.jobs import attach

    return attach(options.job, options.region)


def _stop(options: argparse.Namespace) -> int:
    from lm.sagemaker.jobs import stop

    print(stop(options.job, options.region))
    return 0


def _diff_request(options: argparse.Namespace) -> int:
    from lm.compose import compose
    from lm.sagemaker.jobs import diff_request

    config = compose(options.overrides)
    if not isinstance(config.cluster, SageMaker):
        text = f"cluster={config.cluster.name} makes no request"
        raise ConfigError([Problem(("cluster",), text, "cluster=p3x1, or another of SageMaker's")])
    print(diff_request(config))
    return 0


def _worker(options: argparse.Namespace) -> int:
    from lm.hosts import serve

    return serve(options.port)


if __name__ == "__main__":
    sys.exit(main())
