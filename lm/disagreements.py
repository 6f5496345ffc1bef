"""What settings say against each other, once each is right by itself."""

from __future__ import annotations

import math
from typing import List

from lm.refusal import Problem, did_you_mean
from lm.schema import Config
from lm.schema.run import FAILURES


def disagreements(config: Config) -> List[Problem]:
    """What settings say against each other."""
    problems = _batch_disagreements(config)
    problems += _mixture_disagreements(config)
    for kind, times in config.sweep.retry.items():
        key = f"sweep.retry.{kind}"
        if kind not in FAILURES:
            problems.append(Problem((key,), f"{kind} is not a class of failure", did_you_mean(kind, FAILURES)))
        elif times < 0:
            problems.append(Problem((key,), f"{key}={times} must be at least 0", f"{key}=0"))
    model, schedule, train = config.model, config.schedule, config.train
    if model.head_width is None and model.width % model.heads:
        problems.append(
            Problem(
                ("model.heads", "model.width"),
                f"model.heads={model.heads} does not divide model.width={model.width}",
                f"model.heads={_largest_divisor(model.width, model.heads)}, or model.head_width=... to set it freely",
            )
        )
    elif model.positions == "rotary" and (model.head_width or model.width // model.heads) % 2:
        head_width = model.head_width or model.width // model.heads
        problems.append(
            Problem(
                ("model.head_width", "model.positions", "model.width", "model.heads"),
                f"model.positions=rotary turns pairs, and the head width {head_width} is odd",
                f"model.head_width={head_width + 1}",
            )
        )
    decay_steps = getattr(schedule, "decay_steps", 0)
    if schedule.warmup_steps + decay_steps >= train.steps:
        both = f" + schedule.decay_steps={decay_steps}" if decay_steps else ""
        problems.append(
            Problem(
                ("schedule.warmup_steps", "schedule.decay_steps", "train.steps"),
                f"schedule.warmup_steps={schedule.warmup_steps}{both} is not below train.steps={train.steps}",
                f"train.steps={schedule.warmup_steps + decay_steps + 1} or more, or a shorter warm-up",
            )
        )
    return problems


def _largest_divisor(of: int, at_most: int) -> int:
    return max(n for n in range(1, at_most + 1) if of % n == 0)


def _pipeline_disagreements(config: Config, per_replica: int) -> List[Problem]:
    """What partitions, microbatches and processes say against each other."""
    parallel, train, processes = config.parallel, config.train, config.cluster.processes
    problems = []
    if processes > 1 and not parallel.horovod:
        text = f"cluster.processes={processes} are as many replicas, and parallel.horovod=false has one"
        fix = "parallel.horovod=true, or cluster=local"
        problems.append(Problem(("parallel.horovod", "cluster.processes"), text, fix))
    if config.cluster.hosts and parallel.horovod:
        text = "cluster.hosts has the partitions of one replica, and parallel.horovod=true asks for several"
        fix = "parallel.horovod=false, or no cluster.hosts"
        problems.append(Problem(("cluster.hosts", "parallel.horovod"), text, fix))
    if parallel.partitions > config.model.layers:
        text = f"parallel.partitions={parallel.partitions} is more than model.layers={config.model.layers}"
        problems.append(Problem(("parallel.partitions", "model.layers"), text, f"{config.model.layers} or fewer"))
    if train.microbatch_sequences is not None:
        text = "train.microbatch_sequences is given, and under parallel=smp parallel.microbatches cuts the batch"
        problems.append(Problem(("train.microbatch_sequences",), text, "train.microbatch_sequences=null"))
    if per_replica % parallel.microbatches:
        text = f"parallel.microbatches={parallel.microbatches} does not divide a replica's {per_replica} sequences"
        fix = f"parallel.microbatches={_largest_divisor(per_replica, parallel.microbatches)}"
        problems.append(Problem(("parallel.microbatches", "train.global_batch_sequences"), text, fix))
    return problems


def _mixture_disagreements(config: Config) -> List[Problem]:
    """What a mixture's weights, epochs and sets say against each other; which sources there are the data says."""
    mixture = config.mixture
    problems = []
    if mixture.weights and mixture.epochs:
        text = "mixture.weights and mixture.epochs are both given, and each decides the shares alone"
        problems.append(Problem(("mixture.weights", "mixture.epochs"), text, "one of them"))
    for kind, shares in (("weights", mixture.weights), ("epochs", mixture.epochs)):
        for name, share in shares.items():
            if not (math.isfinite(share) and share > 0):
                text = f"mixture.{kind} has {share} for {name}, and a share is above 0"
                problems.append(Problem((f"mixture.{kind}",), text, "a positive number, or leave the name out"))
    named = [*mixture.weights, *mixture.epochs]
    for name in mixture.sets:
        if "/" in name or name == config.dataset.name:
            text = f"mixture.sets.{name} is a name that stands for something else"
            problems.append(Problem(("mixture.sets",), text, "a name of its own, without /"))
        elif named and not any(one == name or one.startswith(f"{name}/") for one in named):
            text = f"mixture.sets.{name} has no share: the mixture names {', '.join(named)}"
            problems.append(Problem(("mixture.sets",), text, f"a share for {name} too, or no such set"))
    return problems


def _batch_disagreements(config: Config) -> List[Problem]:
    """What the batch, its microbatches and the processes say against each other."""
    train, replicas = config.train, config.cluster.processes
    problems = []
    if config.parallel.name == "single" and replicas > 1:
        problems.append(
            Problem(
                ("parallel", "cluster.processes"),
                f"parallel=single trains in 1 process and cluster.processes={replicas} starts {replicas}",
                "parallel=horovod, or cluster=local",
            )
        )
    if config.cluster.hosts and config.parallel.name != "smp":
        text = f"cluster.hosts is for partitions on other hosts, and parallel={config.parallel.name} has none"
        problems.append(Problem(("cluster.hosts", "parallel"), text, "parallel=smp, or cluster=local"))
    if config.cluster.name == "tf_hosts" and not config.cluster.hosts:
        fix = "cluster.hosts=[HOST:PORT,HOST:PORT], each of which runs lm worker PORT"
        problems.append(Problem(("cluster.hosts",), "cluster=tf_hosts has no hosts", fix))
    per_replica = train.global_batch_sequences // replicas
    if config.parallel.name == "smp":
        problems += _pipeline_disagreements(config, per_replica)
    if train.global_batch_sequences % replicas:
        up = math.ceil(train.global_batch_sequences / replicas) * replicas
        problems.append(
            Problem(
                ("train.global_batch_sequences", "cluster.processes"),
                f"train.global_batch_sequences={train.global_batch_sequences} does not divide among "
                f"{replicas} replicas",
                f"train.global_batch_sequences={up}",
            )
        )
    microbatch = train.microbatch_sequences or max(per_replica, 1)
    if per_replica and per_replica % microbatch:
        problems.append(
            Problem(
                ("train.microbatch_sequences", "train.global_batch_sequences"),
                f"train.microbatch_sequences={microbatch} does not divide a replica's {per_replica} sequences "
                f"({train.global_batch_sequences} / {replicas})",
                f"train.microbatch_sequences={_largest_divisor(per_replica, microbatch)}",
            )
        )
    return problems
