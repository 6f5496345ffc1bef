"""SMP as SageMaker arranges it: a process for each GPU, so that the ranks of a replica are several processes.

Each process computes its whole replica, which gives the right numbers; what this proves is how a script uses ranks.
Horovod is initialised by init(); the ranks of a replica must read the same data, which every step compares; weights of
all ranks but 0 are spoilt before a broadcast from rank 0, so that only a broadcast makes them right.
"""

from __future__ import annotations

import os
from typing import Any, List

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import local_rank, local_size, rank, size

from lm.smdistributed_local import modelparallel as ours
from lm.smdistributed_local.modelparallel import DistributedModel, StepOutput, partition, state
from lm.smdistributed_local.modelparallel.step import step as our_step

__all__ = ["DistributedModel", "StepOutput", "local_rank", "local_size", "partition", "rank", "size", "step"]
_steps = 0


def init() -> None:
    real_broadcast = hvd.broadcast_variables
    ours.init()
    state.current().replicas = hvd.size() // mp_size()
    state.current().replica = dp_rank()

    def broadcast_variables(variables: List[tf.Variable], root_rank: int) -> None:
        assert root_rank == 0
        for variable in variables if hvd.rank() else []:
            variable.assign(tf.zeros_like(variable))
        real_broadcast(variables, root_rank)
        print(f"rank {rank()}: broadcast of {len(variables)} variables", flush=True)

    hvd.broadcast_variables = broadcast_variables


def _group() -> List[int]:
    return next(group for group in state.groups(hvd.size(), mp_size(), _placement()) if hvd.rank() in group)


def _placement() -> str:
    return state.current().parameters.placement_strategy


def mp_size() -> int:
    return state.current().parameters.partitions


def mp_rank() -> int:
    return _group().index(hvd.rank())


def dp_size() -> int:
    return hvd.size() // mp_size()


def dp_rank() -> int:
    if os.environ.get("PROCESS_PER_GPU_WRONG_RANK"):  # what a script does that divides its data by rank()
        return hvd.rank() % dp_size()
    return state.groups(hvd.size(), mp_size(), _placement()).index(_group())


def barrier() -> None:
    hvd.allgather_object(None)


def step(function: Any = None, **options: Any) -> Any:
    decorated = our_step(function, **options)
    if function is None:
        return lambda function: _comparing(decorated(function))
    return _comparing(decorated)


def _comparing(decorated: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        global _steps
        _steps += 1
        tensors = [one for one in tf.nest.flatten((args, kwargs)) if tf.is_tensor(one) and one.shape.rank == 2]
        mark = tf.add_n([_mark(tensor) for tensor in tensors])
        marks = hvd.allgather(mark[None], name=f"marks{_steps}")
        own = tf.gather(marks, _group())
        same = tf.debugging.assert_equal(own, own[:1], message="the ranks of one replica read different data")
        with tf.control_dependencies([] if same is None else [same]):
            args, kwargs = tf.nest.map_structure(
                lambda one: tf.identity(one) if tf.is_tensor(one) else one, (args, kwargs)
            )
        return decorated(*args, **kwargs)

    return call


def _mark(tensor: tf.Tensor) -> tf.Tensor:
    """A number that tells tensors of other values, or in another order, apart."""
    values = tf.reshape(tf.cast(tensor, tf.float64), [-1])
    return tf.reduce_sum(values * tf.sqrt(tf.cast(tf.range(1, tf.size(values) + 1), tf.float64)))
