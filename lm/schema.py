"""The schema of a configuration: every setting with its type, its unit and its limits."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Type

from lm.setting import setting

PRECISIONS = ("float32", "bfloat16", "float16")


# --- sections --------------------------------------------------------------------------------------
# A group with one schema (model, dataset, cluster) has its defaults here and its YAML says only what
# differs. A group whose options differ in kind (optimizer, schedule, parallel) has a schema an option,
# so that a setting of one is a typo under another; there the YAML lists every value.


@dataclass
class Model:
    """A decoder-only transformer. The defaults are GPT-2's block (Radford et al. 2019)."""

    name: str = setting()
    layers: int = setting(minimum=1)
    width: int = setting(minimum=1)
    heads: int = setting(minimum=1)
    context: int = setting(minimum=2)  # tokens that one position can see, itself included
    head_width: Optional[int] = setting(None, minimum=1)  # null: width / heads
    feedforward_width: Optional[int] = setting(None, minimum=1)  # null: 4 x width
    positions: str = setting("learned", choices=("learned", "rotary"))
    norm: str = setting("layernorm", choices=("layernorm", "rmsnorm"))
    norm_placement: str = setting("pre", choices=("pre", "post"))
    norm_epsilon: float = setting(1e-5, above=0)
    activation: str = setting("gelu", choices=("gelu", "relu", "swiglu"))
    bias: bool = setting(True)  # of every matrix; an untied head included
    tied_head: bool = setting(True)
    dropout: float = setting(0.0, minimum=0, below=1)  # of each residual branch
    attention_dropout: float = setting(0.0, minimum=0, below=1)  # of the attention weights
    embedding_dropout: float = setting(0.0, minimum=0, below=1)


@dataclass
class Dataset:
    """Where text comes from and how it is cut into token shards."""

    name: str = setting(pattern=r"[A-Za-z0-9._-]+")
    source: Optional[str] = setting(None)  # a folder, a file, a glob, a URL, or python:stdlib; a plan needs none
    validation_source: Optional[str] = setting(None)  # held out whole; null: validation_fraction of the documents
    tokenizer: Optional[str] = setting(None)  # a tokenizer.json; null: one is trained
    vocabulary_size: int = setting(minimum=257, maximum=2**31 - 1)  # declared: a plan needs no data
    output: Optional[str] = setting(None)  # null: outputs/datasets/<name>-<hash of these settings>
    text_key: str = setting("text")  # of a .jsonl record, or a .parquet column
    source_key: str = setting("meta.pile_set_name")  # what names a record's source, by dots
    validation_fraction: float = setting(0.05, above=0, below=1)
    shard_bytes: int = setting(2**30, minimum=4)
    on_bad_record: str = setting("skip", choices=("skip", "error"))


@dataclass
class Prepare:
    """How a dataset is prepared; nothing of it changes the result."""

    dask_address: Optional[str] = setting(None)  # tcp://HOST:PORT of a scheduler; null: a cluster of this machine
    workers: Optional[int] = setting(None, minimum=1)  # of this machine's cluster; null: as many as cores
    max_window_bytes: int = setting(2**29, minimum=2**10, maximum=2**31)  # memory that a zstd frame may ask for


@dataclass
class Mixture:
    """What training draws from: the dataset's sources and other prepared sets, by name, in proportion."""

    name: str = setting("natural")
    sets: Dict[str, str] = setting({})  # name -> folder of a further prepared set, with the same tokenizer
    weights: Dict[str, float] = setting({})  # SOURCE, SET or SET/SOURCE -> share of the sequences, in any unit
    epochs: Dict[str, float] = setting({})  # or: how often each is gone through, relative to the others
    on_absent: str = setting("error", choices=("error", "skip"))  # where no set has a name


@dataclass
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

    name: str = setting()
    learning_rate: float = setting(above=0)
    beta1: float = setting(minimum=0, below=1)
    beta2: float = setting(minimum=0, below=1)
    epsilon: float = setting(above=0)
    weight_decay: float = setting(minimum=0)
    no_decay: List[str] = setting([], choices=("norm", "bias", "embedding"))
    clip_norm: Optional[float] = setting(above=0)  # of the global gradient; null: no clipping
    moments_dtype: str = setting(choices=("float32", "bfloat16"))


@dataclass
class Adafactor:
    """Adafactor (Shazeer and Stern 2018, algorithm 4), its step size set by the schedule."""

    name: str = setting()
    learning_rate: float = setting(above=0)  # relative to each parameter's own root mean square
    decay_exponent: float = setting(below=0)  # the second moment's decay is 1 - step^exponent
    epsilon: float = setting(above=0)  # added to squared gradients
    minimum_rms: float = setting(above=0)  # the least root mean square a parameter is taken to have
    clip_threshold: float = setting(above=0)  # of an update's root mean square
    weight_decay: float = setting(minimum=0)
    no_decay: List[str] = setting([], choices=("norm", "bias", "embedding"))
    clip_norm: Optional[float] = setting(above=0)
    moments_dtype: str = setting(choices=("float32", "bfloat16"))


@dataclass
class SGD:
    """Stochastic gradient descent with heavy-ball momentum."""

    name: str = setting()
    learning_rate: float = setting(above=0)
    momentum: float = setting(minimum=0, below=1)
    weight_decay: float = setting(minimum=0)
    no_decay: List[str] = setting([], choices=("norm", "bias", "embedding"))
    clip_norm: Optional[float] = setting(above=0)
    moments_dtype: str = setting(choices=("float32", "bfloat16"))


@dataclass
class Constant:
    """Linear warm-up, then the peak."""

    name: str = setting()
    warmup_steps: int = setting(minimum=0)


@dataclass
class Cosine:
    """Linear warm-up, then half a cosine down to final_fraction of the peak at the last step."""

    name: str = setting()
    warmup_steps: int = setting(minimum=0)
    final_fraction: float = setting(minimum=0, maximum=1)


@dataclass
class WarmupStableDecay:
    """Linear warm-up, the peak, then a line down to final_fraction over the last decay_steps."""

    name: str = setting()
    warmup_steps: int = setting(minimum=0)
    decay_steps: int = setting(minimum=0)
    final_fraction: float = setting(minimum=0, maximum=1)


@dataclass
class Single:
    """One process."""

    name: str = setting()


@dataclass
class Horovod:
    """Replicas whose gradients are averaged by Horovod."""

    name: str = setting()
    lr_scaling: str = setting(choices=("none", "linear", "sqrt"))


@dataclass
class Sdp(Horovod):
    """Replicas whose gradients are averaged by SageMaker's data parallel library, or its double here."""


@dataclass
class Smp:
    """Layers on several devices, by SageMaker's model parallel library or its double here; names are the library's."""

    name: str = setting()
    partitions: int = setting(minimum=1)
    microbatches: int = setting(minimum=1)  # of a replica's sequences in a step, pipelined
    pipeline: str = setting(choices=("interleaved", "simple"))
    optimize: str = setting(choices=("memory", "speed"))  # what the partitions have alike
    placement_strategy: str = setting(choices=("cluster", "spread"))
    auto_partition: bool = setting()  # false: the blocks in equal numbers
    horovod: bool = setting()  # replicas besides partitions: cluster.processes of them
    lr_scaling: str = setting(choices=("none", "linear", "sqrt"))


@dataclass
class Cluster:
    """Where the processes run."""

    name: str = setting()
    processes: int = setting(1, minimum=1)
    peak_tflops_per_process: Optional[float] = setting(None, above=0)  # null: measured by a matrix product


@dataclass
class Train:
    """How long, in what portions, in which precision."""

    steps: int = setting(minimum=1)
    global_batch_sequences: int = setting(minimum=1)  # sequences an optimizer step, all replicas together
    microbatch_sequences: Optional[int] = setting(None, minimum=1)  # a replica's share of a pass; null: all
    precision: str = setting("float32", choices=PRECISIONS)
    initial_loss_scale: float = setting(2.0**15, minimum=1)  # float16 only
    max_nonfinite_steps: int = setting(3, minimum=1)  # stop at this many in a row
    log_every_steps: int = setting(10, minimum=1)
    eval_every_steps: int = setting(200, minimum=1)
    sample_tokens: int = setting(64, minimum=0)  # of text generated at the end; 0: none


@dataclass
class Checkpoint:
    """When a run is saved, and how many of its checkpoints stay."""

    every_steps: int = setting(100, minimum=1)
    keep: int = setting(2, minimum=1)  # the newest; the best by validation loss stays besides


@dataclass
class Run:
    """One run: its name, its seed, and what to do when it was begun before."""

    experiment: str = setting("default", pattern=r"[A-Za-z0-9._-]+")
    name: str = setting(pattern=r"[A-Za-z0-9._-]+")
    seed: int = setting(0, minimum=0, maximum=2**31 - 1)
    resume: str = setting("auto", choices=("auto", "must", "never"))
    directory: Optional[str] = setting(None)  # go on in this run folder, whatever its hash


@dataclass
class Tracking:
    """Where MLflow is; null turns it off."""

    uri: Optional[str] = setting("sqlite:///outputs/mlflow.db")


OPTIMIZERS = {"adamw": AdamW, "adafactor": Adafactor, "sgd": SGD}
SCHEDULES = {"constant": Constant, "cosine": Cosine, "wsd": WarmupStableDecay}
PARALLELS = {"single": Single, "horovod": Horovod, "sdp": Sdp, "smp": Smp}


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
    cluster: Cluster
    train: Train
    checkpoint: Checkpoint
    run: Run
    tracking: Tracking

    def as_dict(self) -> Dict[str, Any]:
        """Plain nested values, as they are written to config.yaml."""
        return dataclasses.asdict(self)

    def result_settings(self) -> Dict[str, Any]:
        """The settings that change what a run learns: not where it runs, how often it logs, or its name."""
        settings = {name: dict(section) for name, section in self.as_dict().items()}
        result: Dict[str, Any] = {name: settings[name] for name in ("model", "dataset", "optimizer", "schedule")}
        del result["dataset"]["output"], result["dataset"]["shard_bytes"]
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


KINDS = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "parallel": PARALLELS}
SECTIONS: Dict[str, Optional[Type[Any]]] = {
    "model": Model,
    "dataset": Dataset,
    "prepare": Prepare,
    "mixture": Mixture,
    "optimizer": None,  # by its name, from KINDS
    "schedule": None,
    "parallel": None,
    "cluster": Cluster,
    "train": Train,
    "checkpoint": Checkpoint,
    "run": Run,
    "tracking": Tracking,
}
