"""The devices of the partitions: those of other hosts, GPUs of this one, or logical devices of its CPU."""

from __future__ import annotations

import os
import re
from typing import List, Optional

import tensorflow as tf

from lm.smdistributed_local import RuleBroken

HOSTS = "LM_PARTITION_HOSTS"  # HOST:PORT,HOST:PORT of TensorFlow servers; SageMaker's library has no such thing
JOB = "partition"


def partition_devices(partitions: int) -> List[str]:
    """A device for each partition, by its whole name. Raises RuleBroken where there are not enough."""
    hosts = [host for host in os.environ.get(HOSTS, "").split(",") if host]
    return _of_hosts(hosts, partitions) if hosts else _of_this_host(partitions)


def with_hardware_of_their_own(devices: List[str]) -> List[str]:
    """The devices that compute side by side: all of them, or TensorFlow's choice for logical devices of one CPU."""
    return devices if any("GPU" in device or f"/job:{JOB}/" in device for device in devices) else [""]


def peak_bytes(device: str) -> Optional[int]:
    """The most memory that a partition's device had in use: a GPU's, or the process's on another host's CPU.

    None where it cannot be told apart: logical devices of one CPU share this process, whose peak is its own.
    """
    if f"/job:{JOB}/" not in device:
        return int(tf.config.experimental.get_memory_info(device)["peak"]) if "GPU" in device else None
    if "GPU" in device:
        return None  # TensorFlow tells a remote GPU's to its own process alone
    with tf.device(device):  # the server reads its own entry (proc(5)): VmHWM is the peak of its resident set
        status = tf.io.read_file("/proc/self/status").numpy().decode()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def _of_hosts(hosts: List[str], partitions: int) -> List[str]:
    """The GPUs of each host, or its CPU where it has none, in the order of the hosts."""
    tf.config.experimental_connect_to_host(hosts, job_name=JOB)
    devices: List[str] = []
    for task in range(len(hosts)):
        own = [d.name for d in tf.config.list_logical_devices() if f"/job:{JOB}/replica:0/task:{task}/" in d.name]
        devices += [name for name in own if "device:GPU" in name] or [name for name in own if "device:CPU" in name]
    if len(devices) < partitions:
        have = ", ".join(hosts)
        rule = f"{partitions} partitions want a device each, and {have} has {len(devices)}"
        raise RuleBroken(rule, "Fewer partitions, or more hosts")
    return devices[:partitions]


def _of_this_host(partitions: int) -> List[str]:
    kind = "GPU" if len(tf.config.list_physical_devices("GPU")) >= partitions else "CPU"
    if kind == "CPU":
        (cpu,) = tf.config.list_physical_devices("CPU")
        have = tf.config.get_logical_device_configuration(cpu) or [None]
        if len(have) < partitions:
            wanted = [tf.config.LogicalDeviceConfiguration() for _ in range(partitions)]
            try:
                tf.config.set_logical_device_configuration(cpu, wanted)
            except RuntimeError:
                raise RuleBroken("smp.init() comes after TensorFlow has begun", "Call it first of all") from None
    return [f"/job:localhost/replica:0/task:0/device:{kind}:{number}" for number in range(partitions)]
