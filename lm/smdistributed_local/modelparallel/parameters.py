"""The library's configuration, `distribution["smdistributed"]["modelparallel"]["parameters"]`, checked."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from dataclasses import dataclass
from typing import Any, Dict

from lm.smdistributed_local import RuleBroken

VARIABLE = "SM_HP_MP_PARAMETERS"  # where a training image finds the hyperparameter mp_parameters
PYTORCH_ONLY = (
    "active_microbatches",
    "activation_loading_horizon",
    "ddp",
    "ddp_dist_backend",
    "ddp_port",
    "deterministic_server",
    "fp16",
    "fp16_params",
    "memory_weight",
    "offload_activations",
    "pipeline_parallel_degree",
    "prescaled_batch",
    "sharded_data_parallel_degree",
    "shard_optimizer_state",
    "skip_tracing",
    "tensor_parallel_degree",
)
CHOICES = {
    "pipeline": ("interleaved", "simple"),
    "optimize": ("memory", "speed"),
    "placement_strategy": ("cluster", "spread"),
}


@dataclass(frozen=True)
class Parameters:
    """The parameters that TensorFlow has, with the documented defaults. partitions alone is required."""

    partitions: int
    microbatches: int = 1  # 1: no pipelining
    pipeline: str = "interleaved"  # backward passes as early as they can; simple: all forward passes first
    optimize: str = "memory"  # what partitions are to have alike
    placement_strategy: str = "cluster"
    auto_partition: bool = True
    default_partition: int = 0  # where layers outside of smp.partition go; required without auto_partition
    contiguous: bool = True
    horovod: bool = False  # replicas besides partitions


def read_parameters() -> Parameters:
    """The parameters of this job, from the environment. Raises RuleBroken with the first that is wrong."""
    text = os.environ.get(VARIABLE)
    if text is None:
        rule = f"smdistributed.modelparallel has no parameters: {VARIABLE} is not set"
        raise RuleBroken(rule, "The launcher sets it; partitions is required")
    return check_parameters(json.loads(text))


def check_parameters(values: Dict[str, Any]) -> Parameters:
    """Typed and checked. Raises RuleBroken that names the parameter."""
    known = {field.name: field for field in dataclasses.fields(Parameters)}
    for name in values:
        if name in PYTORCH_ONLY or name.startswith("sdp_"):
            raise RuleBroken(f"{name} is a parameter of the PyTorch library alone", "Leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            instead = f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}"
            raise RuleBroken(f"{name} is no parameter of smdistributed.modelparallel", instead)
    if "partitions" not in values:
        raise RuleBroken("partitions is required", "partitions: 2, say")
    for name, value in values.items():
        wanted = {"int": int, "bool": bool, "str": str}[str(known[name].type)]
        if type(value) is not wanted:
            raise RuleBroken(f"{name}={value!r} is no {wanted.__name__}", f"{name}: a {wanted.__name__}")
        if name in CHOICES and value not in CHOICES[name]:
            rule = f"{name}={value!r} is not one of {', '.join(CHOICES[name])}"
            raise RuleBroken(rule, f"{name}: {CHOICES[name][0]}, the default")
    parameters = Parameters(**values)
    for name in ("partitions", "microbatches"):
        if getattr(parameters, name) < 1:
            raise RuleBroken(f"{name}={getattr(parameters, name)} is below 1", f"{name}: 1 or more")
    if not 0 <= parameters.default_partition < parameters.partitions:
        rule = f"default_partition={parameters.default_partition} is no partition of {parameters.partitions}"
        raise RuleBroken(rule, f"0 to {parameters.partitions - 1}")
    if not parameters.auto_partition and "default_partition" not in values:
        raise RuleBroken("auto_partition=false needs default_partition", "default_partition: 0")
    return parameters
