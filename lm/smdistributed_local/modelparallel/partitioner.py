"""Which layer lies on which partition: balanced, contiguous, and what shares a variable together."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from lm.smdistributed_local.modelparallel.parameters import Parameters

log = logging.getLogger("lm")


@dataclass
class Unit:
    """A layer that is placed as a whole. operations: FLOPs, about, of its forward pass."""

    name: str
    layer: int
    by_hand: Optional[int] = None  # smp.partition's
    operations: float = 0.0
    variable_bytes: Dict[int, int] = field(default_factory=dict)

    def count(self, operations: Sequence[Any], variables: Dict[int, Any]) -> None:
        """Adds what one call of the layer did."""
        self.operations += sum(map(_flops, operations))
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
    """The partition of each layer.

    By hand: smp.partition's, or default_partition. Else contiguous runs, whose largest cost is as small as can be:
    parameters' bytes under optimize=memory, operations under speed. A layer that shares a variable with an earlier one
    joins it, as a tied head does the embedding.
    """
    if not parameters.auto_partition:
        placed = {
            unit.layer: parameters.default_partition if unit.by_hand is None else unit.by_hand for unit in units
        }
        return _together(units, placed)
    owner: Dict[int, int] = {}
    costs: List[float] = []
    leaders: List[Unit] = []
    for unit in units:  # a follower's cost is its leader's
        shared = [owner[key] for key in unit.variable_bytes if key in owner]
        own = sum(size for key, size in unit.variable_bytes.items() if key not in owner)
        cost = float(own) if parameters.optimize == "memory" else unit.operations
        if shared:
            costs[shared[0]] += cost
            continue
        for key in unit.variable_bytes:
            owner[key] = len(leaders)
        leaders.append(unit)
        costs.append(cost)
    borders = _balance(costs, parameters.partitions)
    placed = {unit.layer: borders[number] for number, unit in enumerate(leaders)}
    return _together(units, placed)


def _together(units: List[Unit], placed: Dict[int, int]) -> Dict[int, int]:
    """Moves every layer that shares a variable to the first that has it."""
    owner: Dict[int, int] = {}
    for unit in units:
        where = next((owner[key] for key in unit.variable_bytes if key in owner), placed.get(unit.layer, 0))
        placed[unit.layer] = where
        for key in unit.variable_bytes:
            owner.setdefault(key, where)
    return placed


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
