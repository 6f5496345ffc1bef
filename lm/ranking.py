"""`lm plan --sweep`: the instance types and ways of parallelism that a run fits, by dollars and by hours."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from rich.table import Table

from lm.catalog import Instance, gpus, hosts, instances, usual_precision
from lm.catalog.checks import choose
from lm.catalog.fitting import pipeline, with_instance_type
from lm.charts import Point
from lm.disagreements import disagreements
from lm.estimate import Estimate, estimate
from lm.history import FinishedRun, finished_runs
from lm.plan import Plan, human_bytes, make_plan
from lm.schema import Config, Horovod, Sdp, Single

MICROBATCHES = (4, 8, 16, 32)  # that a pipeline is tried with
SAID = (  # by a candidate itself
    *("parallel", "parallel.partitions", "parallel.microbatches", "parallel.horovod", "model.recompute"),
    *("cluster.instance_type", "cluster.gpus_per_host", "cluster.processes", "cluster.fallback_instance_types"),
    *("train.microbatch_sequences", "train.global_batch_sequences", "train.precision"),
)


@dataclass(frozen=True)
class Candidate:
    """One way to run: what is typed for it, its section `parallel`, its plan and its estimate."""

    typed: Tuple[str, ...]
    parallel: Any
    plan: Plan
    estimate: Estimate

    def command(self, overrides: Iterable[str]) -> List[str]:
        """All that is to be typed: a command's overrides, less those that it replaces or has no use for.

        The global batch besides: where it was left out, it would follow the number of replicas.
        """
        own = {f"parallel.{f.name}" for f in dataclasses.fields(self.parallel)}
        kept = []
        for override in overrides:
            key = override.partition("=")[0].lstrip("+~")
            if key not in SAID and (key in own or not key.startswith("parallel.")):
                kept.append(override)
        return [*kept, *self.typed, f"train.global_batch_sequences={self.plan.global_batch_sequences}"]

    def as_dict(self, overrides: Iterable[str]) -> Dict[str, Any]:
        """Plain values for JSON."""
        memory = self.plan.memory_per_device.total
        return {"overrides": self.command(overrides), "memory_per_device": memory, **self.estimate.as_dict()}


def rank(config: Config) -> List[Candidate]:
    """Every candidate that fits, the cheapest first, those of no known price last; the batch stays what it is.

    config: of a SageMaker cluster, whose instance_count each candidate has. It need not fit itself.
    """
    runs = finished_runs()
    found = [
        candidate
        for instance in instances().values()
        if instance.gpu in gpus() and instance.name in hosts()
        for candidate in _on(config, instance, runs)
    ]
    return sorted(found, key=lambda one: (one.estimate.usd is None, one.estimate.usd or 0.0, one.estimate.hours))


def _on(config: Config, instance: Instance, runs: Sequence[FinishedRun]) -> Iterator[Candidate]:
    """The best of each way of parallelism on an instance type, with and without recomputation."""
    for typed, parallel in _ways(config, instance):
        for recompute in ("none", "block"):
            model = dataclasses.replace(config.model, recompute=recompute)
            half = config.train.precision != "float32"  # whichever the GPUs compute in
            precision = usual_precision(instance.name, parallel.name) if half else "float32"
            train = dataclasses.replace(config.train, precision=precision)
            base = dataclasses.replace(config, model=model, parallel=parallel, train=train)
            changed = with_instance_type(base, instance.name)
            words = [f"cluster.instance_type={instance.name}", *typed, f"model.recompute={recompute}"]
            words.append(f"train.precision={precision}")
            fitting = _first_that_fits(words, changed, runs)
            if fitting is not None:
                yield fitting


def _ways(config: Config, instance: Instance) -> Iterator[Tuple[List[str], Any]]:
    """What is typed for each way of parallelism, and the section that it makes."""
    scaling = getattr(config.parallel, "lr_scaling", "none")
    if instance.gpus * config.cluster.instance_count == 1:
        yield ["parallel=single"], Single(name="single")
        return
    yield ["parallel=horovod"], Horovod(name="horovod", lr_scaling=scaling)
    yield ["parallel=sdp"], Sdp(name="sdp", lr_scaling=scaling)
    for partitions in (n for n in range(2, instance.gpus + 1) if instance.gpus % n == 0):
        for microbatches in MICROBATCHES:
            words = ["parallel=smp", f"parallel.partitions={partitions}", f"parallel.microbatches={microbatches}"]
            yield words, pipeline(config, partitions, microbatches)


def _first_that_fits(typed: List[str], config: Config, runs: Sequence[FinishedRun]) -> Optional[Candidate]:
    """With the fewest passes a step that the memory allows; None where nothing fits, or the catalog is against it."""
    given = config.train.microbatch_sequences
    pipelined = config.parallel.name == "smp"
    if pipelined:
        sizes: List[Optional[int]] = [None]
    else:
        each = config.train.global_batch_sequences // config.cluster.processes
        sizes = [n for n in range(each, 0, -1) if each % n == 0]
    for size in sizes:
        tried = dataclasses.replace(config, train=dataclasses.replace(config.train, microbatch_sequences=size))
        if disagreements(tried):
            continue
        plan = make_plan(tried)
        choice, problems = choose(tried, plan)
        if problems:
            continue
        found = estimate(tried, plan, choice, runs)
        if found is not None:
            words = typed if pipelined and given is None else [*typed, f"train.microbatch_sequences={size or 'null'}"]
            return Candidate(tuple(words), tried.parallel, plan, found)
    return None


def ranking_table(candidates: List[Candidate], rows: int) -> Table:
    """The first so many, as people read them."""
    batch = f"train.global_batch_sequences={candidates[0].plan.global_batch_sequences}"
    shown = Table(title=f"the {min(rows, len(candidates))} cheapest of {len(candidates)} that fit, all with {batch}")
    shown.caption = "type: in place of what the command says of these; --json has whole commands"
    for heading in ("USD", "hours", "kg CO2e", "s a step", "a GPU", "type"):
        shown.add_column(heading, justify="left" if heading == "type" else "right", overflow="fold")
    for one in candidates[:rows]:
        guess = one.estimate
        shown.add_row(
            "not known" if guess.usd is None else f"{guess.usd:,.2f}",
            f"{guess.hours:,.2f}",
            "not known" if guess.kg_co2e is None else f"{guess.kg_co2e:,.2f}",
            f"{guess.step_seconds:.3g}",
            human_bytes(one.plan.memory_per_device.total),
            " ".join(one.typed),
        )
    return shown


def chart_points(candidates: List[Candidate]) -> List[Point]:
    """Hours and dollars of those whose price is known, grouped by instance type."""
    return [
        Point(one.estimate.hours, usd, one.typed[0].partition("=")[2], f"{usd:,.2f} USD: {' '.join(one.typed)}")
        for one in candidates
        if (usd := one.estimate.usd)
    ]
