"""What SageMaker offers, as tables with sources and dates: instance types, training images, strategies, prices.

Each row says where it is from (`source`) and when it was looked up (`verified_on`). A table may be older than AWS:
cluster.allow_unlisted=true goes on where it does not know a type or a price.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import yaml

TABLES = Path(__file__).parent


@dataclass(frozen=True)
class Instance:
    """An instance type. gpu_gib: memory of one GPU; 0 GPUs: processors alone."""

    name: str
    gpus: int
    gpu: str
    gpu_gib: int
    cuda_at_least: float  # what its GPUs need
    cpus: int
    memory_gib: int
    network_gbits: float
    efa: int
    own_disk: bool  # it has disks of its own, and cluster.volume_gib has no effect
    source: str
    verified_on: str


@dataclass(frozen=True)
class Image:
    """A family of AWS's TensorFlow training images. strategies: what of ours its libraries allow."""

    framework_version: str
    python: str
    cuda: float
    strategies: Tuple[str, ...]
    debugger: bool
    source: str
    verified_on: str

    @property
    def name(self) -> str:
        return f"TensorFlow {self.framework_version}"


@dataclass(frozen=True)
class Library:
    """Where a strategy's library runs. instances: all of them where empty; gpus_a_host: any number where 0."""

    instances: Tuple[str, ...]
    gpus_a_host: int
    source: str
    verified_on: str

    def runs_on(self, instance: Instance) -> bool:
        listed = not self.instances or instance.name in self.instances
        return listed and self.gpus_a_host in (0, instance.gpus)


@dataclass(frozen=True)
class Gpu:
    """What a GPU can do, by precision, and what of it training gets."""

    peak_tflops: Dict[str, float]
    share_of_peak: Dict[str, float]  # of a very wide model
    reserved_gib: float  # of its nominal memory, that TensorFlow does not get
    watts: int
    source: str
    verified_on: str


@dataclass(frozen=True)
class Host:
    """What hosts of an instance type do beside computing."""

    allreduce_gbytes: Dict[str, float]  # GB/s by nccl-tests' definition: one_host, several_hosts
    watts: int  # without the GPUs
    source: str
    verified_on: str


@dataclass(frozen=True)
class Grid:
    """The electricity of a region."""

    grams_a_kwh: float  # of CO2e
    pue: float
    zone: str
    source: str
    verified_on: str


@dataclass(frozen=True)
class Price:
    """US dollars an instance and hour, on demand, of a training job."""

    usd_per_hour: float
    as_of: str
    source: str
    verified_on: str

    def cost_usd(self, instances: int, seconds: float) -> float:
        """What so many instances cost for so long."""
        return self.usd_per_hour * instances * seconds / 3600


@dataclass(frozen=True)
class Spot:
    """What spot capacity costs."""

    share_of_on_demand: float
    source: str
    verified_on: str


def _table(name: str) -> Any:
    return yaml.safe_load((TABLES / f"{name}.yaml").read_text())


@functools.lru_cache
def instances() -> Dict[str, Instance]:
    """Every instance type in the table."""
    return {name: Instance(name=name, **row) for name, row in _table("instances").items()}


@functools.lru_cache
def images() -> List[Image]:
    """The images, the one to prefer first."""
    return [Image(**{**row, "strategies": tuple(row["strategies"])}) for row in _table("images")]


@functools.lru_cache
def libraries() -> Dict[str, Library]:
    """What a strategy's library asks of the instance, by strategy."""
    return {
        name: Library(**{**row, "instances": tuple(row["instances"])}) for name, row in _table("libraries").items()
    }


@functools.lru_cache
def gpus() -> Dict[str, Gpu]:
    """Every GPU of the instance types."""
    return {name: Gpu(**row) for name, row in _table("gpus").items()}


def usual_precision(instance_type: Optional[str], strategy: str) -> str:
    """float32 on processors; on GPUs a half one: bfloat16 where they have it, except in smp's TensorFlow 2.6."""
    known = instances().get(instance_type or "")
    gpu = gpus().get(known.gpu) if known else None
    if gpu is None:
        return "float32"
    return "bfloat16" if "bfloat16" in gpu.peak_tflops and strategy != "smp" else "float16"


def usable_bytes(instance: Instance) -> float:
    """What TensorFlow gets of a GPU's memory, or of a host's where it has none."""
    if not instance.gpus:
        return instance.memory_gib * 2**30
    known = gpus().get(instance.gpu)
    return (instance.gpu_gib - (known.reserved_gib if known else 0.0)) * 2**30


@functools.lru_cache
def hosts() -> Dict[str, Host]:
    """The instance types whose hosts are known beyond their GPUs."""
    return {name: Host(**row) for name, row in _table("hosts").items()}


@functools.lru_cache
def grids() -> Dict[str, Grid]:
    """The regions whose grid is known."""
    return {name: Grid(**row) for name, row in _table("grid").items()}


@functools.lru_cache
def spot() -> Spot:
    """What a managed spot job costs, of its price on demand."""
    return Spot(**_table("spot")["training"])


@functools.lru_cache
def price(instance_type: str, region: str) -> Optional[Price]:
    """The price of an instance type in a region, or None where the table has none."""
    for row in _table("prices"):
        if row["region"] == region and instance_type in row["usd_per_hour"]:
            return Price(row["usd_per_hour"][instance_type], row["as_of"], row["source"], row["verified_on"])
    return None


def gpus_of(instance_type: Optional[str]) -> int:
    """The GPUs of an instance type; 0 where it is none that the table knows."""
    known = instances().get(instance_type or "")
    return known.gpus if known else 0


def replicas(hosts: int, gpus_per_host: int, strategy: str, partitions: int) -> int:
    """How many replicas a cluster trains: one under single, else a process a GPU (or a host, where it has none)."""
    if strategy == "single":
        return 1
    return max(1, hosts * max(gpus_per_host, 1) // max(partitions, 1))
