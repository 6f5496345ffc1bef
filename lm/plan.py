"""What a configuration amounts to, by arithmetic alone: batches, steps, tokens, and what they take."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

from lm.memory import Memory, memory
from lm.schema import Config
from lm.shapes import count_parameters, flops_per_token


@dataclass(frozen=True)
class Plan:
    """The arithmetic of a run, done once. B sequences of T tokens; a step is an optimizer step."""

    parameters: int
    parameters_without_embeddings: int
    flops_per_token: int  # forward and backward
    replicas: int
    microbatch_sequences: int  # of one replica in one pass
    accumulation: int  # passes a replica makes for a step; under smp the microbatches that are pipelined
    evaluation_sequences: int  # of one replica at once
    global_batch_sequences: int
    context_tokens: int
    tokens_per_step: int
    steps: int
    tokens: int
    peak_learning_rate: float
    memory_per_device: Memory

    def as_dict(self) -> Dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)

    def rows(self) -> List[Tuple[str, str]]:
        """The plan as people read it: a name and a value a row."""
        memory = self.memory_per_device
        kinds = ", ".join(f"{name} {human_bytes(n)}" for name, n in memory.kinds().items() if n)
        batch = f"{self.replicas} replica{'s' * (self.replicas > 1)} x {self.accumulation} x "
        return [
            ("parameters", f"{self.parameters:,} ({self.parameters_without_embeddings:,} without embeddings)"),
            ("batch", f"{self.global_batch_sequences:,} sequences = {batch}{self.microbatch_sequences}"),
            ("tokens", f"{self.steps:,} steps x {self.tokens_per_step:,} = {self.tokens:,}"),
            ("work", f"{self.flops_per_token:,} FLOP a token, {self.flops_per_token * self.tokens:.3g} in all"),
            ("learning rate", f"{self.peak_learning_rate:g} at its peak"),
            ("memory a device", f"{human_bytes(memory.total)} at once, of {kinds}"),
            ("not counted", "what TensorFlow and its libraries take for themselves: on processors 300 MiB and more"),
        ]


def human_bytes(count: float) -> str:
    """A number of bytes in the binary unit that suits it: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def repeated(config: Config) -> float:
    """How much of a step's work in the blocks is done: with model.recompute=block its forward third twice."""
    return 4 / 3 if config.model.recompute == "block" else 1.0


def step_flops(config: Config, plan: Plan) -> float:
    """FLOPs of an optimizer step, those that are done twice included."""
    return plan.flops_per_token * plan.tokens_per_step * repeated(config)


def make_plan(config: Config) -> Plan:
    """The plan of a checked configuration."""
    train, replicas = config.train, config.cluster.processes
    per_replica = train.global_batch_sequences // replicas
    pipelined = config.parallel.name == "smp"
    microbatch = per_replica // config.parallel.microbatches if pipelined else train.microbatch_sequences or per_replica
    parts = count_parameters(config.model, config.dataset.vocabulary_size)
    parameters = sum(parts.values())
    tokens_per_step = train.global_batch_sequences * config.model.context
    scaling = {"none": 1.0, "linear": float(replicas), "sqrt": math.sqrt(replicas)}
    return Plan(
        parameters=parameters,
        parameters_without_embeddings=parameters - parts["embeddings"],
        flops_per_token=flops_per_token(config.model, config.dataset.vocabulary_size),
        replicas=replicas,
        microbatch_sequences=microbatch,
        accumulation=per_replica // microbatch,
        evaluation_sequences=per_replica if pipelined else microbatch,
        global_batch_sequences=train.global_batch_sequences,
        context_tokens=config.model.context,
        tokens_per_step=tokens_per_step,
        steps=train.steps,
        tokens=train.steps * tokens_per_step,
        peak_learning_rate=config.optimizer.learning_rate
        * scaling[getattr(config.parallel, "lr_scaling", "none")],
        memory_per_device=memory(config, parameters, microbatch, per_replica // microbatch),
    )
