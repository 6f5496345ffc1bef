"""The devices and threads of this process: a GPU of its own, or its share of the cores."""

from __future__ import annotations

import os
import time
from typing import Tuple

import tensorflow as tf

from lm.schema import Config
from lm.strategies import Strategy


def take(local_rank: int, local_size: int) -> None:
    """Pins the GPU of this local rank with memory growth; without GPUs, shares the cores evenly.

    Before any operation runs. With GPUs, raises ValueError if there are fewer than processes on the host.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        if local_size > len(gpus):
            raise ValueError(f"{local_size} processes on a host of {len(gpus)} GPUs: a process needs its own")
        tf.config.set_visible_devices(gpus[local_rank], "GPU")
        tf.config.experimental.set_memory_growth(gpus[local_rank], True)
    else:
        share_cores(local_size)


def share_cores(local_size: int) -> None:
    """Gives this process its share of the host's cores, before any operation runs."""
    if local_size > 1:
        cores = max(1, len(os.sched_getaffinity(0)) // local_size)
        tf.config.threading.set_intra_op_parallelism_threads(cores)


def peak_flops(config: Config, strategy: Strategy) -> Tuple[float, str]:
    """The FLOP/s, of all processes together, that a run's own are a share of, and where the number is from."""
    stated, processes = config.cluster.peak_tflops_per_process, strategy.topology.size
    if stated is not None:
        return stated * 1e12 * processes, "cluster.peak_tflops_per_process"
    each = strategy.mean(sum(matrix_product_flops(config.train.precision, device) for device in strategy.devices))
    return each * processes, f"a {config.train.precision} matrix product here"


def matrix_product_flops(precision: str, device: str) -> float:
    """FLOP/s of square matrix products on a device: the best of five."""
    size = 4096 if tf.config.list_logical_devices("GPU") else 1024
    seconds = []
    with tf.device(device or None):
        a = tf.cast(tf.random.stateless_uniform([size, size], [0, 0]), tf.as_dtype(precision))
        for _ in range(6):  # the first prepares the kernel
            began = time.perf_counter()
            tf.reduce_max(tf.matmul(a, a)).numpy()
            seconds.append(time.perf_counter() - began)
    return 2.0 * size**3 / min(seconds[1:])
