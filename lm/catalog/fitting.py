"""Whether a run fits the memory of an instance's GPUs, by the plan, and the smallest change under which it does."""

from __future__ import annotations

import dataclasses
import math
from typing import Iterable, Iterator, List, Tuple

from lm.catalog import Instance, gpus_of, instances, libraries, replicas, usable_bytes
from lm.disagreements import disagreements
from lm.plan import Plan, human_bytes, make_plan
from lm.refusal import Problem
from lm.schema import Config, Smp

MICROBATCHES = 4  # of a pipeline, as conf/parallel/smp.yaml has it


def with_instance_type(config: Config, instance_type: str) -> Config:
    """The same run on hosts of another type, each of whose GPUs is used."""
    gpus = gpus_of(instance_type) if instance_type in instances() else config.cluster.gpus_per_host
    changed = dataclasses.replace(
        config.cluster, instance_type=instance_type, gpus_per_host=gpus, fallback_instance_types=[]
    )
    return _with_replicas(dataclasses.replace(config, cluster=changed))


def _with_replicas(config: Config) -> Config:
    """With as many replicas as the GPUs and the partitions make."""
    cluster, parallel = config.cluster, config.parallel
    partitions = getattr(parallel, "partitions", 1)
    count = replicas(cluster.instance_count, cluster.gpus_per_host, parallel.name, partitions)
    if parallel.name == "smp":
        parallel = dataclasses.replace(parallel, horovod=count > 1)
    return dataclasses.replace(config, parallel=parallel, cluster=dataclasses.replace(cluster, processes=count))


def memory_problems(config: Config, plan: Plan, instance: Instance) -> List[Problem]:
    """A problem with what to type where the plan's bytes a device are more than a GPU has, or a host without one."""
    available, memory = usable_bytes(instance), plan.memory_per_device
    if memory.total <= available:
        return []
    device = f"{instance.gpu} of {instance.name}" if instance.gpus else instance.name
    has = f"a {device} has {human_bytes(available)} for it"
    text = f"the plan has {human_bytes(memory.total)} a device, and {has}"
    if memory.steady > available:
        who = f"{plan.parameters / 1e9:.3g} billion parameters under {config.optimizer.name}"
        text = f"{who} need {human_bytes(memory.steady)} a device before activations, and {has}"
    return [Problem(("model", "cluster.instance_type"), text, _what_fits(config, available))]


def _what_fits(config: Config, available: float) -> str:
    """The smallest changes under which the plan fits: on these GPUs, on them as a pipeline, and on larger ones."""
    offers = [_first_that_fits(_changes(config), available), _first_that_fits(_pipelines(config), available)]
    for one in sorted(instances().values(), key=lambda row: row.gpu_gib):
        allowed = libraries()[config.parallel.name].runs_on(one)
        moved = with_instance_type(config, one.name)
        too_small = not one.gpus or usable_bytes(one) <= available
        if too_small or not allowed or one.gpus % getattr(config.parallel, "partitions", 1):
            continue
        changes = (([f"cluster.instance_type={one.name}", *typed], changed) for typed, changed in _changes(moved))
        offers.append(_first_that_fits(changes, usable_bytes(one)))
        if offers[-1]:
            break
    found = [offer for offer in offers if offer]
    return ", or ".join(found) or "a smaller model, a shorter context, or parallel=smp with more partitions"


def _first_that_fits(changes: Iterable[Tuple[List[str], Config]], available: float) -> str:
    """What is typed for the first of some configurations whose plan fits; nothing where none does."""
    for typed, changed in changes:
        if not disagreements(changed) and make_plan(changed).memory_per_device.total <= available:
            return " ".join(typed)
    return ""


def _changes(config: Config) -> Iterator[Tuple[List[str], Config]]:
    """Configurations that need less memory, the nearest first, and what to type for each."""
    per_replica = config.train.global_batch_sequences // config.cluster.processes
    recomputed = dataclasses.replace(config, model=dataclasses.replace(config.model, recompute="block"))
    for typed, base in (([], config), (["model.recompute=block"], recomputed)):
        yield list(typed), base
        if config.parallel.name == "smp":
            yield from _more_partitions(list(typed), base)
            continue
        for microbatch in (n for n in range(per_replica, 0, -1) if per_replica % n == 0):
            smaller = dataclasses.replace(base.train, microbatch_sequences=microbatch)
            yield [*typed, f"train.microbatch_sequences={microbatch}"], dataclasses.replace(base, train=smaller)


def _more_partitions(typed: List[str], config: Config) -> Iterator[Tuple[List[str], Config]]:
    cluster, parallel = config.cluster, config.parallel
    for partitions in range(parallel.partitions + 1, min(cluster.gpus_per_host, config.model.layers) + 1):
        if cluster.gpus_per_host % partitions:
            continue
        cut = dataclasses.replace(config, parallel=dataclasses.replace(parallel, partitions=partitions))
        yield [*typed, f"parallel.partitions={partitions}"], _with_replicas(cut)


def _pipelines(config: Config) -> Iterator[Tuple[List[str], Config]]:
    """The same run in partitions on the same hosts, the fewest first, where SageMaker's library knows them."""
    cluster, instance = config.cluster, instances().get(config.cluster.instance_type or "")
    if config.parallel.name == "smp" or instance is None or not libraries()["smp"].runs_on(instance):
        return
    for partitions in (n for n in range(2, cluster.gpus_per_host + 1) if cluster.gpus_per_host % n == 0):
        cut = _with_replicas(dataclasses.replace(config, parallel=pipeline(config, partitions, MICROBATCHES)))
        whole = cut.cluster.processes * MICROBATCHES
        batch = math.ceil(config.train.global_batch_sequences / whole) * whole
        typed = ["parallel=smp", f"parallel.partitions={partitions}", f"parallel.microbatches={MICROBATCHES}"]
        if config.train.microbatch_sequences is not None:
            typed.append("train.microbatch_sequences=null")
        if batch != config.train.global_batch_sequences:
            typed.append(f"train.global_batch_sequences={batch}")
        train = dataclasses.replace(config.train, microbatch_sequences=None, global_batch_sequences=batch)
        yield typed, dataclasses.replace(cut, train=train)


def pipeline(config: Config, partitions: int, microbatches: int) -> Smp:
    """A section `parallel` of a run in partitions, else as the run has it; its replicas are with_instance_type's."""
    own = config.parallel
    return Smp(
        name="smp",
        partitions=partitions,
        microbatches=microbatches,
        pipeline=getattr(own, "pipeline", "interleaved"),
        optimize=getattr(own, "optimize", "memory"),
        placement_strategy=getattr(own, "placement_strategy", "cluster"),
        auto_partition=getattr(own, "auto_partition", True),
        horovod=False,
        lr_scaling=getattr(own, "lr_scaling", "none"),
    )
