"""SDP's interface here: averages and broadcasts between processes, and each documented rule by its error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest
import tensorflow as tf
from conftest import ROOT

from lm import smdistributed_local
from lm.smdistributed_local import RuleBroken
from lm.smdistributed_local import dataparallel as sdp


@pytest.fixture
def initialised() -> Iterator[None]:
    sdp.init()
    yield
    sdp.shutdown()


def test_a_second_init_is_refused(initialised: None) -> None:
    with pytest.raises(RuleBroken, match=r"dataparallel\.init\(\) was called twice\. Call it once"):
        sdp.init()


def test_other_than_eight_processes_a_host_are_refused_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINING_JOB_NAME", "job")  # as SageMaker sets it in the container
    with pytest.raises(RuleBroken, match="always has 8 processes a host, and here are 1"):
        sdp.init()
    sdp.shutdown()


def test_use_before_init_is_refused() -> None:
    with pytest.raises(RuleBroken, match=r"used before init\(\)\. Call init\(\) first"):
        sdp.oob_allreduce(tf.constant(1.0))


def test_both_libraries_in_one_run_are_refused() -> None:
    smdistributed_local.claim("smdistributed.modelparallel")
    try:
        with pytest.raises(RuleBroken, match="cannot be used together"):
            sdp.init()
    finally:
        smdistributed_local.release("smdistributed.modelparallel")


@pytest.mark.parametrize(("index", "count"), [(-1, 3), (3, 3), (0, 0)])
def test_an_index_that_is_none_is_refused(initialised: None, index: int, count: int) -> None:
    with pytest.raises(RuleBroken, match=f"param_index={index}, num_params={count}"):
        sdp.allreduce(tf.constant(1.0), index, count)


def test_index_and_count_are_required(initialised: None) -> None:
    with pytest.raises(TypeError, match="param_index"):
        sdp.allreduce(tf.constant(1.0))  # type: ignore[call-arg]


def test_only_averages_where_the_library_only_averages(initialised: None) -> None:
    with pytest.raises(RuleBroken, match=r"oob_allreduce takes op=ReduceOp\.AVERAGE alone"):
        sdp.oob_allreduce(tf.constant(1.0), op=sdp.ReduceOp.SUM)
    with pytest.raises(RuleBroken, match=r"DistributedGradientTape takes op=ReduceOp\.AVERAGE alone"):
        sdp.DistributedGradientTape(tf.GradientTape(), op=sdp.ReduceOp.MAX)
    with pytest.raises(RuleBroken, match="takes no device_dense or device_sparse"):
        sdp.DistributedGradientTape(tf.GradientTape(), device_dense="/GPU:0")


def test_other_than_eight_processes_a_host_are_told(caplog: pytest.LogCaptureFixture) -> None:
    sdp.init()
    sdp.shutdown()
    assert "always has 8 processes a host on SageMaker; here are 1" in caplog.text


SCRIPT = """
import tensorflow as tf
from lm.smdistributed_local import dataparallel as sdp
sdp.init()
rank, size = sdp.rank(), sdp.size()
assert (size, sdp.local_size(), sdp.local_rank()) == (2, 2, rank)
mine = tf.constant([1.0 + rank, 10.0 * rank])
ops = sdp.ReduceOp
for op, expected in ((ops.AVERAGE, [1.5, 5.0]), (ops.SUM, [3.0, 10.0]), (ops.MIN, [1.0, 0.0]), (ops.MAX, [2.0, 10.0])):
    assert sdp.allreduce(mine, 0, 1, op=op).numpy().tolist() == expected, op
assert sdp.oob_allreduce(mine, compression=sdp.Compression.fp16).numpy().tolist() == [1.5, 5.0]
assert sdp.broadcast(mine, 1).numpy().tolist() == [2.0, 10.0]
variable, unused = tf.Variable([[1.0 + rank], [2.0]]), tf.Variable(1.0)
sdp.broadcast_variables([variable], root_rank=0)
assert variable.numpy().tolist() == [[1.0], [2.0]]

@tf.function
def gradients():
    with tf.GradientTape() as tape:
        rows = tf.gather(variable, [rank])          # a sparse gradient
        loss = (3.0 + rank) * tf.reduce_sum(rows) + 0.0 * tf.reduce_sum(variable)
    tape = sdp.DistributedGradientTape(tape)
    return tape.gradient(loss, [variable, unused])

found, none = gradients()
assert found.numpy().tolist() == [[1.5], [2.0]], found
assert none is None
print("both agree")
"""


@pytest.mark.processes
def test_two_processes_average_and_broadcast() -> None:
    Path("script.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "hydra_plugins.lm_launchers._gloo", "2"]
    command = [*launch, sys.executable, "-u", "script.py"]
    path = f"{ROOT}:{ROOT / 'launchers'}"
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("both agree") == 2
