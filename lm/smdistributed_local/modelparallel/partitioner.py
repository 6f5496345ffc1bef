"""Which layer lies on which partition: balanced, contiguous, and what shares a variable together."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Set

import numpy as np

from lm.smdistributed_local.modelparallel.parameters import Parameters

log = logging.getLogger("lm")


@dataclass
class Unit:
    """A layer that is placed as a whole. operations: FLOPs, about, of its forward pass."""

    name: str
    layer: int  # its identity
    by_hand: Optional[int] = None  # smp.partition's
    operations: float = 0.0
    variable_bytes: Dict[int, int] = field(default_factory=dict)  # by the variables' identities
    variables: Dict[int, Any] = field(default_factory=dict)

    def count(self, operations: Sequence[Any], variables: Dict[int, Any]) -> None:
        """Adds what one call of the layer did."""
        self.operations += sum(map(_flops, operations))
        self.variables.update(variables)
        for key, variable in variables.items():
            self.variable_bytes[key] = int(np.prod(variable.shape)) * 4


def _flops(operation: Any) -> float:
    """Multiplications and additions of a matrix product; an element each of anything else. Unknown sizes count 1."""
    sizes = [1.0]
    for tensor in operation.outputs:
        shape = tensor.shape
        sizes.append(float(np.prod([size or 1 for size in shape])) if shape.rank is not None else 1.0)
    if operation.type in ("MatMul", "BatchMatMul", "BatchMatMulV2"):
        inner = operation.inputs[0].shape
        transposed = "transpose_a" in operation.node_def.attr and operation.get_attr("transpose_a")
        size = inner[-2 if transposed else -1] if inner.rank else 1
        return 2.0 * max(sizes) * float(size or 1)
    return max(sizes)


def assign(units: List[Unit], parameters: Parameters) -> Dict[int, int]:
    """The partition of each layer, by its identity.

    By hand: smp.partition's, or default_partition. Else contiguous runs, whose largest cost is as small as can be:
    parameters' bytes under optimize=memory, operations under speed. A layer that shares a variable with an earlier one
    joins it, as a tied head does the embedding.
    """
    leaders = _leaders(units)
    if parameters.auto_partition:
        costs = dict.fromkeys(leaders, 0.0)  # a follower's is its leader's
        seen: Set[int] = set()
        for unit, leader in zip(units, leaders):
            own = sum(size for key, size in unit.variable_bytes.items() if key not in seen)
            costs[leader] += own if parameters.optimize == "memory" else unit.operations
            seen.update(unit.variable_bytes)
        where = dict(zip(costs, _balance(list(costs.values()), parameters.partitions)))
    else:
        hands = [units[leader].by_hand for leader in leaders]
        where = {
            leader: parameters.default_partition if hand is None else hand for leader, hand in zip(leaders, hands)
        }
    return {unit.layer: where[leader] for unit, leader in zip(units, leaders)}


def _leaders(units: List[Unit]) -> List[int]:
    """The place of the first layer that each shares a variable with, through others too; its own where none does."""
    leaders: List[int] = []
    owner: Dict[int, int] = {}
    for place, unit in enumerate(units):
        leader = next((owner[key] for key in unit.variable_bytes if key in owner), place)
        leaders.append(leader)
        for key in unit.variable_bytes:
            owner.setdefault(key, leader)
    return leaders


def _balance(costs: List[float], partitions: int) -> List[int]:
    """Contiguous runs, none empty where there are enough, whose largest sum is least: by dynamic programming."""
    count = len(costs)
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    runs = min(partitions, count)
    best = np.full((runs + 1, count + 1), np.inf)
    cut = np.zeros((runs + 1, count + 1), np.int64)
    best[0, 0] = 0.0
    for run in range(1, runs + 1):
        for end in range(run, count + 1):
            for start in range(run - 1, end):
                largest = max(best[run - 1, start], sums[end] - sums[start])
                if largest < best[run, end]:
                    best[run, end], cut[run, end] = largest, start
    where = [0] * count
    end = count
    for run in range(runs, 0, -1):
        start = int(cut[run, end])
        where[start:end] = [run - 1] * (end - start)
        end = start
    return where


def describe(units: List[Unit], placed: Dict[int, int], parameters: Parameters) -> None:
    """Tells the split: each partition's layers, parameters and share of the operations."""
    total = sum(unit.operations for unit in units) or 1.0
    for number in range(parameters.partitions):
        of_it = [unit for unit in units if placed[unit.layer] == number]
        variables = {key: size for unit in of_it for key, size in unit.variable_bytes.items()}
        share = sum(unit.operations for unit in of_it) / total
        names = f"{of_it[0].name} to {of_it[-1].name}" if of_it else "nothing"
        log.info(
            "partition %d: %d layers (%s), %d parameters, %.0f%% of the operations",
            number,
            len(of_it),
            names,
            sum(variables.values()) // 4,
            100 * share,
        )
