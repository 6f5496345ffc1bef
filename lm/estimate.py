"""How long a run takes on a SageMaker cluster, what it costs and what it emits: arithmetic on the catalog's rows.

A step is its compute, its pipeline's bubble and the all-reduce of its gradients, one after the other. Evaluations,
checkpoints and the start are not counted. Every number that is looked up is an Assumption with its source, and printed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

from lm.catalog import gpus, grids, hosts, spot
from lm.catalog.choice import Choice
from lm.history import FinishedRun, reached
from lm.plan import Plan, step_flops
from lm.schema import Config

GRADIENT_BYTES = 4  # float32 in every precision
HALF_SHARE_WIDTH = 400  # of a model at which half of a GPU's share_of_peak is reached


@dataclass(frozen=True)
class Assumption:
    """A number that was looked up and not computed."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class Estimate:
    """A run on its machines: seconds of one optimizer step, and what the whole run takes."""

    gpus: int
    compute_seconds: float
    bubble_seconds: float  # while the pipeline fills and drains
    allreduce_seconds: float
    tokens_per_second: float
    hours: float
    machine_hours: float
    usd: Optional[float]  # on demand; None where no price is known
    usd_spot: Optional[float]  # of managed spot, while it is not interrupted
    kwh: Optional[float]  # None where the hosts' power or the region's grid is not known
    kg_co2e: Optional[float]
    cleanest_region: str
    cleanest_kg_co2e: Optional[float]
    assumptions: Tuple[Assumption, ...]

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.bubble_seconds + self.allreduce_seconds

    def rows(self) -> List[Tuple[str, str]]:
        """As people read it: a name and a value a row."""
        parts = (
            f"compute {self.compute_seconds:.3g}, pipeline's bubble {self.bubble_seconds:.3g}, "
            f"gradients {self.allreduce_seconds:.3g}"
        )
        cost = "no price is known"
        if self.usd is not None and self.usd_spot is not None:
            cost = f"{self.usd:,.2f} USD on demand, some {self.usd_spot:,.2f} as spot"
        rows = [
            ("step, estimated", f"{self.step_seconds:.3g} s on {self.gpus} GPUs: {parts}"),
            ("run, estimated", f"{self.hours:,.2f} hours at {self.tokens_per_second:,.0f} tokens/s: {cost}"),
            ("machine hours", f"{self.machine_hours:,.2f}{self._tokens_a_dollar()}"),
        ]
        if self.kwh is not None and self.kg_co2e is not None and self.cleanest_kg_co2e is not None:
            elsewhere = f"{self.cleanest_kg_co2e:,.2f} in {self.cleanest_region}"
            rows.append(("emissions", f"{self.kwh:,.1f} kWh, {self.kg_co2e:,.2f} kg of CO2e; {elsewhere}"))
        return rows

    def _tokens_a_dollar(self) -> str:
        return f"; {self.tokens_per_second * self.hours * 3600 / self.usd:,.0f} tokens a dollar" if self.usd else ""

    def as_dict(self) -> Dict[str, Any]:
        """Plain values for JSON."""
        return {**dataclasses.asdict(self), "step_seconds": self.step_seconds}


def estimate(
    config: Config, plan: Plan, choice: Choice, runs: Optional[Sequence[FinishedRun]] = None
) -> Optional[Estimate]:
    """The estimate of a run on a SageMaker cluster; None where the catalog does not know its machines' speed.

    runs: earlier ones, as lm.history.reached has them.
    """
    cluster, instance, precision = config.cluster, choice.instance, config.train.precision
    gpu = gpus().get(instance.gpu) if instance is not None else None
    host = hosts().get(instance.name) if instance is not None else None
    if instance is None or gpu is None:
        return None
    fast = precision if precision in gpu.peak_tflops else "float32"
    width = config.model.width
    share = gpu.share_of_peak[fast] * width / (width + HALF_SHARE_WIDTH)
    count = 1 if config.parallel.name == "single" else cluster.instance_count * cluster.gpus_per_host
    partitions = getattr(config.parallel, "partitions", 1)

    compute = step_flops(config, plan) / (count * gpu.peak_tflops[fast] * 1e12 * share)
    bubble = compute * (partitions - 1) / plan.accumulation if partitions > 1 else 0.0
    assumptions = [
        Assumption(f"a {instance.gpu}'s peak", f"{gpu.peak_tflops[fast]:g} TFLOP/s in {fast}", gpu.source),
        Assumption("share of it", f"{share:.0%} at width {width}", "lm/catalog/gpus.yaml"),
    ]
    allreduce = 0.0
    past = reached(config, runs)
    if past is not None:  # with everything in it
        compute, bubble = past.step_seconds(plan), 0.0
        assumptions = [Assumption("speed", f"{past.flops_per_second / 1e12:.3g} TFLOP/s", past.because)]
    elif plan.replicas > 1:
        where = "one_host" if cluster.instance_count == 1 else "several_hosts"
        if host is None:
            return None
        bandwidth = host.allreduce_gbytes[where] * 1e9
        # All partitions' gradients pass through a host's network, 2 (n - 1) / n times (nccl-tests, PERFORMANCE.md).
        allreduce = 2 * (plan.replicas - 1) / plan.replicas * GRADIENT_BYTES * plan.parameters / bandwidth
        assumptions.append(Assumption("all-reduce", f"{bandwidth / 1e9:g} GB/s", host.source))
    seconds = compute + bubble + allreduce
    hours = seconds * plan.steps / 3600
    machine_hours = hours * cluster.instance_count

    kwh = kg = cleanest = None
    region = ""
    grid = grids().get(choice.region)
    if host is not None and grid is not None:
        watts = host.watts + gpu.watts * instance.gpus
        machines_kwh = machine_hours * watts / 1000
        kwh = machines_kwh * grid.pue
        kg = kwh * grid.grams_a_kwh / 1000
        region, best = min(grids().items(), key=lambda item: item[1].grams_a_kwh * item[1].pue)
        cleanest = machines_kwh * best.pue * best.grams_a_kwh / 1000
        assumptions += [
            Assumption("power of a host", f"{watts:,} W with its GPUs", f"{gpu.source}; {host.source}"),
            Assumption("the grid", f"{grid.grams_a_kwh:g} g CO2e a kWh, PUE {grid.pue:g}: {grid.zone}", grid.source),
        ]
    usd = choice.cost_usd(cluster, hours * 3600)
    if usd is not None:
        assumptions.append(Assumption("spot", f"{spot().share_of_on_demand:.0%} of the price", spot().source))
    return Estimate(
        gpus=count,
        compute_seconds=compute,
        bubble_seconds=bubble,
        allreduce_seconds=allreduce,
        tokens_per_second=plan.tokens_per_step / seconds,
        hours=hours,
        machine_hours=machine_hours,
        usd=usd,
        usd_spot=None if usd is None else usd * spot().share_of_on_demand,
        kwh=kwh,
        kg_co2e=kg,
        cleanest_region=region,
        cleanest_kg_co2e=cleanest,
        assumptions=tuple(assumptions),
    )


def estimate_rows(config: Config, plan: Plan, choice: Choice) -> List[Tuple[str, str]]:
    """The estimate's rows for a table, without its assumptions; none where there is no estimate."""
    found = estimate(config, plan, choice)
    return [] if found is None else found.rows()
