"""What init() sets up: the parameters, where this process stands, and the devices of its partitions."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional

import tensorflow as tf

from lm.smdistributed_local import RuleBroken, claim, must_be_claimed, release
from lm.smdistributed_local.modelparallel.parameters import Parameters, read_parameters

LIBRARY = "smdistributed.modelparallel"


@dataclass
class State:
    """One process, which drives every partition of one replica."""

    parameters: Parameters
    replica: int
    replicas: int
    devices: List[str]  # of each partition
    hvd: Any = None  # horovod.tensorflow in hybrid mode
    forbidden_init: Optional[Callable[..., None]] = None  # Horovod's own, which nobody else may call meanwhile
    stepped: bool = False  # whether the first step has partitioned the model
    partition_of: Dict[int, Dict[int, int]] = field(default_factory=dict)  # of each layer of each model, by id

    def mp_groups(self) -> List[List[int]]:
        """The ranks of each replica."""
        partitions = self.parameters.partitions
        return groups(self.replicas * partitions, partitions, self.parameters.placement_strategy)


_state: Optional[State] = None


def current() -> State:
    """The state that init() made. Raises RuleBroken before it."""
    must_be_claimed(LIBRARY)
    assert _state is not None
    return _state


def init() -> None:
    """Must come first, and once; parameters come from the job.

    Raises RuleBroken for a second call and for parameters that are wrong.
    """
    global _state
    parameters = read_parameters()
    processes = int(os.environ.get("HOROVOD_SIZE", "1"))
    if processes > 1 and not parameters.horovod:
        rule = f"{processes} processes drive {parameters.partitions} partitions each, and horovod is false"
        raise RuleBroken(rule, "horovod: true for replicas, or one process")
    claim(LIBRARY)
    state = State(parameters, replica=0, replicas=1, devices=_devices(parameters.partitions))
    if parameters.horovod:
        import horovod.tensorflow as hvd

        hvd.init()
        state.hvd, state.forbidden_init = hvd, hvd.init
        state.replica, state.replicas = hvd.rank(), hvd.size()
        hvd.init = _refuse_horovod_init
    _state = state


def shutdown() -> None:
    """Gives everything back, so that a test can begin anew. SageMaker's library has no such call."""
    global _state
    if _state is not None and _state.forbidden_init is not None:
        _state.hvd.init = _state.forbidden_init
        _state.hvd.shutdown()
    _state = None
    release(LIBRARY)


def _refuse_horovod_init(*_: Any, **__: Any) -> None:
    rule = "hvd.init() is called in hybrid mode, where smp.init() has initialised Horovod"
    raise RuleBroken(rule, "Leave hvd.init() out")


def _devices(partitions: int) -> List[str]:
    """A GPU for each partition where there are enough, else as many logical devices of the CPU."""
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) >= partitions:
        return [f"/GPU:{number}" for number in range(partitions)]
    (cpu,) = tf.config.list_physical_devices("CPU")
    have = tf.config.get_logical_device_configuration(cpu) or [None]
    if len(have) < partitions:
        wanted = [tf.config.LogicalDeviceConfiguration() for _ in range(partitions)]
        try:
            tf.config.set_logical_device_configuration(cpu, wanted)
        except RuntimeError:
            raise RuleBroken("smp.init() comes after TensorFlow has begun", "Call it first of all") from None
    return [f"/CPU:{number}" for number in range(partitions)]


def groups(size: int, partitions: int, placement_strategy: str) -> List[List[int]]:
    """The ranks of each replica: neighbours under cluster, spread over the hosts under spread.

    Raises RuleBroken where partitions do not divide the processes.
    """
    if size % partitions:
        rule = f"{partitions} partitions do not divide {size} processes"
        raise RuleBroken(rule, f"A multiple of {partitions} processes")
    replicas = size // partitions
    if placement_strategy == "cluster":
        return [list(range(first, first + partitions)) for first in range(0, size, partitions)]
    return [list(range(replica, size, replicas)) for replica in range(replicas)]


def get_mp_group() -> List[int]:
    """The ranks that hold one replica of the model: this process's."""
    state = current()
    return state.mp_groups()[state.replica]


def get_dp_group() -> List[int]:
    """The ranks that hold the same partition as this one, of every replica."""
    return [group[mp_rank()] for group in current().mp_groups()]


def size() -> int:
    """The ranks of the job: partitions x replicas."""
    return current().replicas * current().parameters.partitions


def rank() -> int:
    """This process among all: the rank of the first partition that it drives."""
    return get_mp_group()[0]


def local_size() -> int:
    """The ranks of this host."""
    state = current()
    processes = state.hvd.local_size() if state.hvd else 1
    return processes * state.parameters.partitions


def local_rank() -> int:
    """This process among those of its host."""
    state = current()
    return (state.hvd.local_rank() if state.hvd else 0) * state.parameters.partitions


def mp_size() -> int:
    """The ranks of a replica: its partitions."""
    return current().parameters.partitions


def mp_rank() -> int:
    """This process among the ranks of its replica: the first, since it drives all of them."""
    current()
    return 0


def dp_size() -> int:
    """The replicas."""
    return current().replicas


def dp_rank() -> int:
    """This replica among all: what data are divided by."""
    return current().replica


def pp_size() -> int:
    """The stages of the pipeline: the partitions."""
    return mp_size()


def pp_rank() -> int:
    """This process among the stages."""
    return mp_rank()
