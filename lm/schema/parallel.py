"""By what the work is divided: the strategies, each with a schema of its own."""

from __future__ import annotations

from dataclasses import dataclass

from lm.setting import setting


@dataclass
class Single:
    """One process."""

    name: str = setting()


@dataclass
class Horovod:
    """Replicas whose gradients are averaged by Horovod."""

    name: str = setting()
    lr_scaling: str = setting(choices=("none", "linear", "sqrt"))


@dataclass
class Sdp(Horovod):
    """Replicas whose gradients are averaged by SageMaker's data parallel library, or its double here."""


@dataclass
class Smp:
    """Layers on several devices, by SageMaker's model parallel library or its double here; names are the library's."""

    name: str = setting()
    partitions: int = setting(minimum=1)
    microbatches: int = setting(minimum=1)  # of a replica's sequences in a step, pipelined
    pipeline: str = setting(choices=("interleaved", "simple"))
    optimize: str = setting(choices=("memory", "speed"))  # what the partitions have alike
    placement_strategy: str = setting(choices=("cluster", "spread"))
    auto_partition: bool = setting()  # false: the blocks in equal numbers
    horovod: bool = setting()  # replicas besides partitions: cluster.processes of them
    lr_scaling: str = setting(choices=("none", "linear", "sqrt"))
