"""The devices of the partitions: those of other hosts, GPUs of this one, or logical devices of its CPU."""

from __future__ import annotations

import os
import re
import socket
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
    """The most memory in use of a partition's GPU here, or of the server on another host's CPU since it began.

    None where it cannot be told: logical devices of one CPU share this process, and of another host's GPU TensorFlow
    tells its own process alone.
    """
    if f"/job:{JOB}/" not in device:
        return int(tf.config.experimental.get_memory_info(device)["peak"]) if "GPU" in device else None
    if "GPU" in device:
        return None
    with tf.device(device):  # the server reads its own entry (proc(5)): VmHWM is the peak of its resident set
        status = tf.io.read_file("/proc/self/status").numpy().decode()
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def _of_hosts(hosts: List[str], partitions: int) -> List[str]:
    """Partitions dealt evenly over the hosts, in their order: on the GPUs of each, or its CPU where it has none."""
    if partitions < len(hosts):
        rule = f"{len(hosts)} hosts and {partitions} partitions: {', '.join(hosts[partitions:])} would have none"
        raise RuleBroken(rule, "A partition a host at least, or fewer hosts")
    cluster = tf.train.ClusterSpec({"run": [_own_address(hosts[0])], JOB: hosts})
    tf.config.experimental_connect_to_cluster(cluster, job_name="run", task_index=0)
    every = [device.name for device in tf.config.list_logical_devices()]
    devices: List[str] = []
    for task, host in enumerate(hosts):
        own = [name for name in every if f"/job:{JOB}/replica:0/task:{task}/" in name]
        own = [name for name in own if "device:GPU" in name] or [name for name in own if "device:CPU" in name]
        share = partitions // len(hosts) + (task < partitions % len(hosts))
        if share > len(own):
            rule = f"{partitions} partitions want a device each: {share} are {host}'s share, which has {len(own)}"
            raise RuleBroken(rule, "Fewer partitions, or more hosts")
        devices += own[:share]
    return devices


def _own_address(host: str) -> str:
    """Where that host reaches this process, which it asks for what the step takes from here."""
    name, _, port = host.rpartition(":")
    with socket.create_connection((name, int(port))) as way, socket.socket() as free:
        address = way.getsockname()[0]
        free.bind((address, 0))
        return f"{address}:{free.getsockname()[1]}"


def _of_this_host(partitions: int) -> List[str]:
    rank, replicas = int(os.environ.get("HOROVOD_LOCAL_RANK", "0")), int(os.environ.get("HOROVOD_LOCAL_SIZE", "1"))
    gpus = tf.config.list_physical_devices("GPU")
    kind = "GPU" if len(gpus) >= partitions * replicas else "CPU"
    if kind == "GPU":  # each replica of this host has its own
        tf.config.set_visible_devices(gpus[rank * partitions : (rank + 1) * partitions], "GPU")
        for gpu in tf.config.get_visible_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)
    else:
        (cpu,) = tf.config.list_physical_devices("CPU")
        have = tf.config.get_logical_device_configuration(cpu) or [None]
        if len(have) < partitions:
            wanted = [tf.config.LogicalDeviceConfiguration() for _ in range(partitions)]
            try:
                tf.config.set_logical_device_configuration(cpu, wanted)
            except RuntimeError:
                raise RuleBroken("smp.init() comes after TensorFlow has begun", "Call it first of all") from None
    return [f"/job:localhost/replica:0/task:0/device:{kind}:{number}" for number in range(partitions)]
