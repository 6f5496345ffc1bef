"""SageMaker's model parallel library for TensorFlow (SMP v1), its public interface on TensorFlow itself.

Source: sagemaker-python-sdk, doc/api/training/smp_versions/v1.10.0/{smd_model_parallel_tensorflow,
smd_model_parallel_common_api}.rst and smd_model_parallel_general.rst.

On SageMaker each GPU has a process. Here one process drives all partitions of a replica: the layers of a model are
placed on its devices, the microbatches of a step are traced one after the other, and TensorFlow's executor overlaps
what does not depend on each other, which is the pipeline.
"""

from lm.smdistributed_local.modelparallel.communication import (
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    mp_barrier,
    recv_from,
    send,
)
from lm.smdistributed_local.modelparallel.model import (
    CheckpointManager,
    DistributedModel,
    partition,
    register_post_partition_hook,
)
from lm.smdistributed_local.modelparallel.state import (
    dp_rank,
    dp_size,
    get_dp_group,
    get_mp_group,
    init,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    shutdown,
    size,
)
from lm.smdistributed_local.modelparallel.step import StepOutput, step

WORLD, MP_GROUP, DP_GROUP = CommGroup.WORLD, CommGroup.MP_GROUP, CommGroup.DP_GROUP

__all__ = [
    "DP_GROUP",
    "MP_GROUP",
    "WORLD",
    "CheckpointManager",
    "CommGroup",
    "DistributedModel",
    "RankType",
    "StepOutput",
    "allgather",
    "barrier",
    "broadcast",
    "dp_barrier",
    "dp_rank",
    "dp_size",
    "get_dp_group",
    "get_mp_group",
    "init",
    "local_rank",
    "local_size",
    "mp_barrier",
    "mp_rank",
    "mp_size",
    "partition",
    "pp_rank",
    "pp_size",
    "rank",
    "recv_from",
    "register_post_partition_hook",
    "send",
    "shutdown",
    "size",
    "step",
]
