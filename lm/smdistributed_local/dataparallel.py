"""SageMaker's data parallel library for TensorFlow 2 (SDP), its public interface on Horovod's allreduce.

Source: sagemaker-python-sdk, doc/api/training/sdp_versions/latest/smd_data_parallel_tensorflow.rst. What the real
library does by balanced fusion buffers of its own, Horovod does by others; the values are the same.
"""

from __future__ import annotations

import enum
import logging
import os
from typing import Any, List, Optional, Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from lm.smdistributed_local import RuleBroken, claim, must_be_claimed, release

LIBRARY = "smdistributed.dataparallel"
PROCESSES_PER_HOST = 8  # what SageMaker always starts: one for each GPU of the instances that it supports
Compression = hvd.Compression  # none and fp16, as documented
log = logging.getLogger("lm")


class ReduceOp(enum.Enum):
    """How values are combined."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"


_HOROVOD_OPS = {ReduceOp.AVERAGE: hvd.Average, ReduceOp.SUM: hvd.Sum, ReduceOp.MIN: hvd.Min, ReduceOp.MAX: hvd.Max}


def init() -> None:
    """Must come first, and once.

    Raises RuleBroken for a second call, and in a SageMaker job for other than 8 processes a host.
    """
    claim(LIBRARY)
    hvd.init()
    if hvd.local_size() != PROCESSES_PER_HOST and "TRAINING_JOB_NAME" in os.environ:
        release(LIBRARY)
        rule = f"{LIBRARY} always has {PROCESSES_PER_HOST} processes a host, and here are {hvd.local_size()}"
        raise RuleBroken(rule, "Instances of 8 GPUs, or parallel=horovod")
    if hvd.local_size() != PROCESSES_PER_HOST and hvd.rank() == 0:
        log.warning(
            "smdistributed.dataparallel always has %d processes a host on SageMaker; here are %d",
            PROCESSES_PER_HOST,
            hvd.local_size(),
        )


def shutdown() -> None:
    """Ends its use. Optional."""
    hvd.shutdown()
    release(LIBRARY)


def size() -> int:
    """The processes of the job."""
    return hvd.size()


def local_size() -> int:
    """The processes of this host."""
    return hvd.local_size()


def rank() -> int:
    """This process among all."""
    return hvd.rank()


def local_rank() -> int:
    """This process among those of its host."""
    return hvd.local_rank()


def allreduce(
    tensor: tf.Tensor,
    param_index: int,
    num_params: int,
    compression: Any = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
) -> tf.Tensor:
    """Combines a gradient over all processes.

    param_index, num_params: which of how many gradients of a step this is; 0 and 1 for a single tensor.
    Raises RuleBroken for an index that is none.
    """
    if not 0 <= param_index < num_params:
        raise RuleBroken(
            f"allreduce(param_index={param_index}, num_params={num_params}): an index is of 0 to num_params - 1",
            "Number the gradients of a step from 0; a single tensor is param_index=0, num_params=1",
        )
    return _reduce(tensor, compression, op)


def oob_allreduce(
    tensor: tf.Tensor, compression: Any = Compression.none, op: ReduceOp = ReduceOp.AVERAGE
) -> tf.Tensor:
    """Averages a value that is no gradient, a metric say. Raises RuleBroken for another operation."""
    _only_average("oob_allreduce", op)
    return _reduce(tensor, compression, op)


def broadcast(tensor: tf.Tensor, root_rank: int) -> tf.Tensor:
    """The root's value, everywhere."""
    return hvd.broadcast(tensor, root_rank)


def broadcast_variables(variables: Sequence[tf.Variable], root_rank: int) -> None:
    """Gives every process the root's values: of the model and of the optimizer, after the first step."""
    hvd.broadcast_variables(list(variables), root_rank)


def overlap(tensor: tf.Tensor) -> tf.Tensor:
    """For compiled models: marks where reduction may overlap the backward pass. The identity here."""
    return tf.identity(tensor)


class DistributedGradientTape:
    """A tape whose gradients are averaged over all processes.

    Raises RuleBroken for what the library does not take: a device, or another operation than the average.
    """

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        op: ReduceOp = ReduceOp.AVERAGE,
    ) -> None:
        if device_dense or device_sparse:
            raise RuleBroken("DistributedGradientTape takes no device_dense or device_sparse", "Leave them out")
        _only_average("DistributedGradientTape", op)
        self._tape, self._compression = gradtape, compression

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    def gradient(
        self, target: Any, sources: Sequence[Any], output_gradients: Optional[Any] = None
    ) -> List[Optional[tf.Tensor]]:
        """The gradients, averaged. Sparse ones are made dense first."""
        gradients = self._tape.gradient(target, sources, output_gradients)
        return [
            None
            if gradient is None
            else allreduce(tf.convert_to_tensor(gradient), index, len(gradients), self._compression)
            for index, gradient in enumerate(gradients)
        ]


def _only_average(what: str, op: ReduceOp) -> None:
    if op is not ReduceOp.AVERAGE:
        raise RuleBroken(f"{what} takes op=ReduceOp.AVERAGE alone, and got {op}", "allreduce takes the others")


def _reduce(tensor: tf.Tensor, compression: Any, op: ReduceOp) -> tf.Tensor:
    must_be_claimed(LIBRARY)
    return hvd.allreduce(tensor, compression=compression, op=_HOROVOD_OPS[op])
