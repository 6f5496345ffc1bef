"""The schema of a configuration: every setting with its type, its unit and its limits.

A group with one schema (model, dataset) has its defaults in it and its YAML says only what differs. A group whose
options differ in kind (optimizer, schedule, parallel, cluster) has a schema an option.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Dict, Optional, Type

from lm.schema.cluster import Cluster, SageMaker
from lm.schema.data import Dataset, Mixture, Prepare
from lm.schema.model import Model
from lm.schema.optimizer import SGD, Adafactor, AdamW, Constant, Cosine, WarmupStableDecay
from lm.schema.parallel import Horovod, Sdp, Single, Smp
from lm.schema.run import Checkpoint, Profiling, Run, Sweep, Tracking, Train

OPTIMIZERS = {"adamw": AdamW, "adafactor": Adafactor, "sgd": SGD}
SCHEDULES = {"constant": Constant, "cosine": Cosine, "wsd": WarmupStableDecay}
PARALLELS = {"single": Single, "horovod": Horovod, "sdp": Sdp, "smp": Smp}
CLUSTERS = {"local": Cluster, "tf_hosts": Cluster, "slurm": Cluster, "sagemaker": SageMaker}


@dataclass
class Config:
    """A whole configuration, typed and checked."""

    model: Model
    dataset: Dataset
    prepare: Prepare
    mixture: Mixture
    optimizer: Any  # one of OPTIMIZERS
    schedule: Any  # one of SCHEDULES
    parallel: Any  # one of PARALLELS
    cluster: Any  # one of CLUSTERS
    train: Train
    checkpoint: Checkpoint
    run: Run
    tracking: Tracking
    profiling: Profiling
    sweep: Sweep

    def as_dict(self) -> Dict[str, Any]:
        """Plain nested values, as they are written to config.yaml."""
        return dataclasses.asdict(self)

    def result_settings(self) -> Dict[str, Any]:
        """The settings that change what a run learns: not where it runs, how often it logs, or its name."""
        settings = {name: dict(section) for name, section in self.as_dict().items()}
        result: Dict[str, Any] = {name: settings[name] for name in ("model", "dataset", "optimizer", "schedule")}
        del result["model"]["recompute"], result["dataset"]["output"], result["dataset"]["shard_bytes"]
        result["mixture"] = {key: settings["mixture"][key] for key in ("sets", "weights", "epochs")}
        result["train"] = {
            key: settings["train"][key]
            for key in ("steps", "global_batch_sequences", "precision", "initial_loss_scale")
        }
        scaling = settings["parallel"].get("lr_scaling", "none")
        if scaling != "none":  # then, and only then, the number of replicas changes the learning rate
            result["lr_scaling"] = [scaling, settings["cluster"]["processes"]]
        result["seed"] = settings["run"]["seed"]
        return result

    def hash(self) -> str:
        """Eight hexadecimal digits of the settings that change the result."""
        text = json.dumps(self.result_settings(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


KINDS: Dict[str, Dict[str, Any]] = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "parallel": PARALLELS,
    "cluster": CLUSTERS,
}
SECTIONS: Dict[str, Optional[Type[Any]]] = {
    "model": Model,
    "dataset": Dataset,
    "prepare": Prepare,
    "mixture": Mixture,
    "optimizer": None,  # by its name, from KINDS
    "schedule": None,
    "parallel": None,
    "cluster": None,
    "train": Train,
    "checkpoint": Checkpoint,
    "run": Run,
    "tracking": Tracking,
    "profiling": Profiling,
    "sweep": Sweep,
}
