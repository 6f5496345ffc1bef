"""Whether a run fits the memory of an instance's GPUs, by the plan, and the smallest change under which it does."""

from __future__ import annotations

import dataclasses
from typing import Iterator, List, Tuple

from lm.catalog import Instance, gpus_of, instances, libraries, replicas, usable_bytes
from lm.disagreements import disagreements
from lm.plan import Plan, human_bytes, make_plan
from lm.refusal import Problem
from lm.schema import Config


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
    """The smallest change under which the plan fits the memory, or larger GPUs."""
    for overrides, changed in _changes(config):
        if not disagreements(changed) and make_plan(changed).memory_per_device.total <= available:
            return " ".join(overrides)
    for one in sorted(instances().values(), key=lambda row: row.gpu_gib):
        allowed = libraries()[config.parallel.name].runs_on(one)
        moved = with_instance_type(config, one.name)
        if usable_bytes(one) <= available or not allowed or one.gpus % getattr(config.parallel, "partitions", 1):
            continue
        for overrides, changed in _changes(moved):
            if not disagreements(changed) and make_plan(changed).memory_per_device.total <= usable_bytes(one):
                return " ".join([f"cluster.instance_type={one.name}", *overrides])
    return "a smaller model, a shorter context, or parallel=smp with more partitions"


def _changes(config: Config) -> Iterator[Tuple[List[str], Config]]:
    """Configurations that need less memory, the nearest first, and what to type for each."""
    per_replica = config.train.global_batch_sequences // config.cluster.processes
    recomputed = dataclasses.replace(config, model=dataclasses.replace(config.model, recompute="block"))
    for typed, base in (([], config), (["model.recompute=block"], recomputed)):
        yield list(typed), base
        if config.parallel.name == "smp":
            yield from _more_partitions(list(typed), base)
            continue
        for microbatch in (n for n in range(per_replica - 1, 0, -1) if per_replica % n == 0):
            smaller = dataclasses.replace(base.train, microbatch_sequences=microbatch)
            yield [*typed, f"train.microbatch_sequences={microbatch}"], dataclasses.replace(base, train=smaller)


def _more_partitions(typed: List[str], config: Config) -> Iterator[Tuple[List[str], Config]]:
    cluster, parallel = config.cluster, config.parallel
    for partitions in range(parallel.partitions + 1, min(cluster.gpus_per_host, config.model.layers) + 1):
        if cluster.gpus_per_host % partitions:
            continue
        cut = dataclasses.replace(config, parallel=dataclasses.replace(parallel, partitions=partitions))
        yield [*typed, f"parallel.partitions={partitions}"], _with_replicas(cut)
