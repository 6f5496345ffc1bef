"""Objects between the ranks of a job. One process drives all ranks of a replica, so only replicas really talk."""

from __future__ import annotations

import enum
from collections import deque
from typing import Any, Deque, Dict, List

from lm.smdistributed_local import RuleBroken
from lm.smdistributed_local.modelparallel import state as process


class CommGroup(enum.Enum):
    """Who takes part."""

    WORLD = "world"
    MP_GROUP = "the ranks of one replica"
    DP_GROUP = "the ranks of one partition"


class RankType(enum.Enum):
    """What a rank number counts."""

    WORLD_RANK = "among all"
    MP_RANK = "within the replica"
    DP_RANK = "among the replicas"


_sent: Dict[int, Deque[Any]] = {}  # by the process that sent it to itself


def broadcast(obj: Any, group: CommGroup) -> None:
    """Sends an object to every other rank of a group; each of them calls recv_from."""
    state = process.current()
    if state.replicas > 1 and group is not CommGroup.MP_GROUP:
        _functions().broadcast_object(obj, root_rank=state.replica)


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """The object that a rank has broadcast or sent. Raises RuleBroken where this process is that rank and sent none."""
    state = process.current()
    replica = _replica(src_rank, rank_type)
    if replica == state.replica:
        queue = _sent.get(replica)
        if not queue:
            rule = f"recv_from({src_rank}) waits for rank {src_rank}, which this process drives and which sent nothing"
            raise RuleBroken(rule, "send() comes before recv_from()")
        return queue.popleft()
    return _functions().broadcast_object(None, root_rank=replica)


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Sends an object to one rank, which calls recv_from. Between replicas of two; with more use broadcast."""
    state = process.current()
    replica = _replica(dest_rank, rank_type)
    if replica == state.replica:
        _sent.setdefault(replica, deque()).append(obj)
        return
    if state.replicas > 2:
        raise RuleBroken("send() between more than two replicas is not here", "broadcast() and recv_from()")
    _functions().broadcast_object(obj, root_rank=state.replica)


def allgather(obj: Any, group: CommGroup) -> List[Any]:
    """Every rank's object, in the order of ranks. Ranks that one process drives have the same."""
    state = process.current()
    of_replicas = _functions().allgather_object(obj) if state.replicas > 1 else [obj]
    if group is CommGroup.DP_GROUP:
        return list(of_replicas)
    if group is CommGroup.MP_GROUP:
        return [obj] * process.mp_size()
    return [of_replicas[_replica(rank, RankType.WORLD_RANK)] for rank in range(process.size())]


def barrier(group: CommGroup = CommGroup.WORLD) -> None:
    """Returns when every rank of the group has come here."""
    state = process.current()
    if state.replicas > 1 and group is not CommGroup.MP_GROUP:
        _functions().allgather_object(None)


def mp_barrier() -> None:
    barrier(CommGroup.MP_GROUP)


def dp_barrier() -> None:
    barrier(CommGroup.DP_GROUP)


def _replica(rank: int, rank_type: RankType) -> int:
    """The replica that a rank belongs to, by which alone processes differ here."""
    state = process.current()
    if rank_type is RankType.MP_RANK:
        return state.replica
    if rank_type is RankType.DP_RANK:
        return rank
    return next(replica for replica, ranks in enumerate(state.mp_groups()) if rank in ranks)


def _functions() -> Any:
    import horovod.tensorflow.functions as functions

    return functions
