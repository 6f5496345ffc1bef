"""What init() sets up: the parameters, where this process stands among the ranks, and what it may no longer call."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Tuple

import tensorflow as tf

from lm.smdistributed_local import RuleBroken, claim, must_be_claimed, release
from lm.smdistributed_local.modelparallel.devices import partition_devices
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
    give_back: List[Callable[[], None]] = field(default_factory=list)  # what shutdown() undoes
    stepped: bool = False  # whether the first step has partitioned the model
    partition_of: Dict[int, Dict[int, int]] = field(default_factory=dict)  # of each layer of each model, by id
    device_of: Dict[int, Tuple[tf.Variable, str]] = field(default_factory=dict)  # of each variable, by id

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
    try:
        devices = partition_devices(parameters.partitions)
    except RuleBroken:
        release(LIBRARY)
        raise
    state = State(parameters, replica=0, replicas=1, devices=devices)
    if parameters.horovod:
        import horovod.tensorflow as hvd

        hvd.init()
        state.hvd, state.replica, state.replicas = hvd, hvd.rank(), hvd.size()
        _forbid(state, hvd, "init", _refuse_horovod_init)
    _forbid(state, tf.data.Dataset, "shard", _shard_by_replica(tf.data.Dataset.shard))
    _state = state


def shutdown() -> None:
    """Gives everything back, so that a test can begin anew. SageMaker's library has no such call."""
    global _state
    if _state is not None:
        for undo in _state.give_back:
            undo()
        if _state.hvd is not None:
            _state.hvd.shutdown()
    _state = None
    release(LIBRARY)


def _forbid(state: State, where: Any, name: str, instead: Callable[..., Any]) -> None:
    """Puts a function in another's place until shutdown()."""
    original = getattr(where, name)
    setattr(where, name, instead)
    state.give_back.append(lambda: setattr(where, name, original))


def _refuse_horovod_init(*_: Any, **__: Any) -> None:
    rule = "hvd.init() is called in hybrid mode, where smp.init() has initialised Horovod"
    raise RuleBroken(rule, "Leave hvd.init() out")


def _shard_by_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    def shard(dataset: Any, num_shards: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(num_shards, int) and num_shards == size() != dp_size():
            rule = f"data are divided among {num_shards} ranks, and the {mp_size()} ranks of a replica read the same"
            raise RuleBroken(rule, "dataset.shard(smp.dp_size(), smp.dp_rank())")
        return original(dataset, num_shards, index, *args, **kwargs)

    return shard


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
