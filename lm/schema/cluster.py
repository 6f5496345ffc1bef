"""Where the processes run: this machine, hosts of one's own, or a SageMaker job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from lm.setting import setting

DAY_SECONDS = 86400


@dataclass
class Cluster:
    """This machine, or hosts that lend it their devices."""

    name: str = setting()
    processes: int = setting(1, minimum=1)  # replicas; under smp each has parallel.partitions devices
    hosts: List[str] = setting([], pattern=r"\S+:\d+", like="10.0.0.4:4100")  # of each `lm worker` with partitions
    peak_tflops_per_process: Optional[float] = setting(None, above=0)  # of all its devices; null: measured


@dataclass
class SageMaker(Cluster):
    """A SageMaker training job; docs/sagemaker.md. Limits are those of CreateTrainingJob's API reference."""

    instance_type: Optional[str] = setting(None, pattern=r"ml\.[a-z0-9-]+\.[a-z0-9]+", like="ml.p3.16xlarge")
    instance_count: int = setting(1, minimum=1)
    gpus_per_host: int = setting(0, minimum=0)
    fallback_instance_types: List[str] = setting([], pattern=r"ml\.[a-z0-9-]+\.[a-z0-9]+", like="ml.p3.16xlarge")
    capacity_retries: int = setting(3, minimum=0)

    region: Optional[str] = setting(None, pattern=r"[a-z]{2}(-[a-z]+)+-\d", like="us-east-1")
    role: Optional[str] = setting(
        None, pattern=r"arn:aws[a-z-]*:iam::\d{12}:role/\S+", like="arn:aws:iam::123456789012:role/NAME"
    )
    bucket: Optional[str] = setting(None, pattern=r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", like="my-bucket")
    framework_version: Optional[str] = setting(None, pattern=r"\d+(\.\d+)+", like="2.6")
    image_uri: Optional[str] = setting(None)
    environment: List[str] = setting([], pattern=r"[A-Za-z_][A-Za-z0-9_]*=.*", like="NAME=VALUE")

    dataset_uri: Optional[str] = setting(None, pattern=r"s3://\S+", like="s3://BUCKET/FOLDER")
    file_system_id: Optional[str] = setting(None, pattern=r"fs-[0-9a-f]{8,}", like="fs-0123456789abcdef0")
    file_system_type: str = setting("EFS", choices=("EFS", "FSxLustre"))
    file_system_path: Optional[str] = setting(None, pattern=r"/\S*", like="/FOLDER")
    subnets: List[str] = setting([], pattern=r"subnet-[0-9a-f]+", like="subnet-0123456789abcdef0")
    security_groups: List[str] = setting([], pattern=r"sg-[0-9a-f]+", like="sg-0123456789abcdef0")
    volume_gib: int = setting(100, minimum=1, maximum=16384)

    spot: bool = setting(False)
    max_run_seconds: Optional[int] = setting(None, minimum=60, maximum=28 * DAY_SECONDS)
    max_wait_seconds: Optional[int] = setting(None, minimum=60)
    max_cost_usd: Optional[float] = setting(None, above=0)
    warm_pool_seconds: Optional[int] = setting(None, minimum=60)

    debugger: bool = setting(True)
    max_parallel_jobs: int = setting(1, minimum=1)
    allow_unlisted: bool = setting(False)
    dry_run: bool = setting(False)
    detach: bool = setting(False)
