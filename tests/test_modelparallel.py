"""SMP's interface here: steps over microbatches, partitions, and each documented rule by its error."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List

import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.smdistributed_local import RuleBroken
from lm.smdistributed_local import modelparallel as smp
from lm.smdistributed_local.modelparallel.parameters import VARIABLE, Parameters, check_parameters
from lm.smdistributed_local.modelparallel.partitioner import Unit, assign
from lm.smdistributed_local.modelparallel.state import groups

# --- parameters ----------------------------------------------------------------------------------------


def test_the_documented_defaults() -> None:
    assert check_parameters({"partitions": 2}) == Parameters(
        2, 1, "interleaved", "memory", "cluster", True, 0, True, False
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "partitions is required"),
        ({"partitions": 2, "microbatchs": 4}, "microbatchs is no parameter .* Did you mean microbatches?"),
        ({"partitions": 2, "tensor_parallel_degree": 2}, "tensor_parallel_degree is a parameter of the PyTorch"),
        ({"partitions": 2, "sdp_reduce_bucket_size": 1}, "sdp_reduce_bucket_size is a parameter of the PyTorch"),
        ({"partitions": "2"}, "partitions='2' is no int"),
        ({"partitions": 2, "horovod": 1}, "horovod=1 is no bool"),
        ({"partitions": 0}, "partitions=0 is below 1"),
        ({"partitions": 2, "pipeline": "fast"}, "pipeline='fast' is not one of interleaved, simple"),
        ({"partitions": 2, "auto_partition": False}, "auto_partition=false needs default_partition"),
        ({"partitions": 2, "default_partition": 2}, "default_partition=2 is no partition of 2"),
    ],
)
def test_a_parameter_that_is_wrong_is_named(values: Dict[str, Any], said: str) -> None:
    with pytest.raises(RuleBroken, match=said):
        check_parameters(values)


def test_ranks_lie_as_the_documentation_has_them() -> None:
    """Eight processes and two partitions: smd_model_parallel_general.rst, placement_strategy."""
    assert groups(8, 2, "cluster") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(8, 2, "spread") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(RuleBroken, match="3 partitions do not divide 8 processes"):
        groups(8, 3, "cluster")


# --- partitioning --------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(st.integers(1, 100), min_size=1, max_size=8), partitions=st.integers(1, 5))
def test_no_contiguous_split_has_a_smaller_largest_part(costs: List[int], partitions: int) -> None:
    units = [Unit(str(number), number, variable_bytes={number: cost}) for number, cost in enumerate(costs)]
    placed = list(assign(units, Parameters(partitions)).values())
    assert placed == sorted(placed)
    assert len(set(placed)) == min(partitions, len(costs))

    def largest(borders: Any) -> int:
        edges = [0, *borders, len(costs)]
        return max(sum(costs[a:b]) for a, b in zip(edges, edges[1:]))

    best = min(largest(borders) for borders in itertools.combinations(range(1, len(costs)), len(set(placed)) - 1))
    assert max(sum(c for c, p in zip(costs, placed) if p == part) for part in set(placed)) == best


def test_layers_that_share_a_variable_lie_together() -> None:
    units = [Unit(str(number), number, variable_bytes={number: 10}) for number in range(6)]
    units[5].variable_bytes[0] = 10  # a tied head
    placed = assign(units, Parameters(3))
    assert placed[5] == placed[0] == 0
    by_hand = [Unit("a", 0, 1, variable_bytes={7: 4}), Unit("b", 1, 0, variable_bytes={7: 4}), Unit("c", 2, None)]
    assert assign(by_hand, Parameters(3, auto_partition=False, default_partition=2)) == {0: 1, 1: 1, 2: 2}


def test_speed_balances_operations() -> None:
    units = [Unit(str(number), number, operations=cost) for number, cost in enumerate([9.0, 1.0, 1.0, 1.0])]
    assert list(assign(units, Parameters(2, optimize="speed")).values()) == [0, 1, 1, 1]


# --- steps ---------------------------------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, json.dumps({"partitions": 1, "microbatches": 4}))
    smp.init()
    yield
    smp.shutdown()


class Net(smp.DistributedModel):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = tf.keras.layers.Dense(16, activation="tanh"), tf.keras.layers.Dense(3)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.second(self.first(x))


X = np.random.RandomState(0).randn(8, 5).astype(np.float32)


def variables(model: Any) -> List[tf.Variable]:
    return [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables]


def test_gradients_of_microbatches_are_those_of_the_batch(library: None) -> None:
    model = Net()

    @smp.step
    def forward(x: tf.Tensor) -> Any:
        loss = tf.reduce_mean(tf.square(model(x)))
        return loss, tf.gradients(loss, variables(model))

    loss, gradients = forward(tf.constant(X))
    kernel, bias, kernel_2, bias_2 = (v.numpy() for v in variables(model))
    with tf.GradientTape() as tape:
        weights = [tf.constant(v) for v in (kernel, bias, kernel_2, bias_2)]
        tape.watch(weights)
        y = tf.tanh(tf.constant(X) @ weights[0] + weights[1]) @ weights[2] + weights[3]
        expected = tf.reduce_mean(tf.square(y))
    assert float(loss.reduce_mean()) == pytest.approx(float(expected), rel=1e-6)
    for ours, reference in zip(gradients, tape.gradient(expected, weights)):
        for method in ("variable", "add_n", "accumulate_n"):
            np.testing.assert_allclose(ours.accumulate(method).numpy(), reference.numpy(), atol=1e-6)


def test_outputs_by_microbatch(library: None) -> None:
    model = Net()

    @smp.step(non_split_inputs=["whole"], input_split_axes={"across": 1})
    def forward(x: tf.Tensor, whole: tf.Tensor, across: tf.Tensor, nested: Any, factor: int) -> Any:
        return {"y": model(x), "sums": tf.reduce_sum(whole) * factor, "across": tf.shape(across), "n": nested["a"][0]}

    found = forward(tf.constant(X), tf.ones([3]), tf.zeros([2, 8]), {"a": [tf.range(8)]}, factor=2)
    assert len(found["y"].outputs) == 4
    assert found["y"].concat().shape == found["y"].merge().shape == (8, 3)
    assert found["y"].stack().shape == (4, 2, 3)
    assert float(found["sums"].reduce_sum()) == 4 * 3 * 2
    assert found["across"].outputs[0].numpy().tolist() == [2, 2]
    assert found["n"].concat().numpy().tolist() == list(range(8))


def test_hooks_run_once_when_the_model_is_partitioned(library: None) -> None:
    model, told = Net(), []

    @smp.register_post_partition_hook
    def hook() -> None:
        told.append((tf.executing_eagerly(), len(variables(model))))

    forward = smp.step(lambda x: model(x))
    forward(tf.constant(X)), forward(tf.constant(X))
    assert told == [(True, 4)]


def test_checkpoints_after_the_first_step(library: None, tmp_path: Path) -> None:
    model = Net()
    manager = smp.CheckpointManager(tf.train.Checkpoint(model=model), str(tmp_path))
    with pytest.raises(RuleBroken, match=r"restored before the first smp\.step .* Restore after the first step"):
        manager.restore()
    forward = smp.step(lambda x: model(x))
    before = forward(tf.constant(X)).concat().numpy()
    manager.save()
    for variable in variables(model):
        variable.assign(variable * 2.0)
    assert manager.restore() is not None
    np.testing.assert_array_equal(forward(tf.constant(X)).concat().numpy(), before)


def test_one_saved_model_of_the_whole(library: None, tmp_path: Path) -> None:
    model = Net()
    expected = smp.step(lambda x: model(x))(tf.constant(X)).concat().numpy()
    model.save_model(str(tmp_path / "1"))
    assert (tmp_path / "1" / "saved_model.pb").exists()
    assert expected.shape == (8, 3)


# --- rules ---------------------------------------------------------------------------------------------


def test_each_broken_rule_has_its_own_error(library: None) -> None:
    model = Net()
    with pytest.raises(RuleBroken, match=r"called outside of a function decorated by smp\.step"):
        model(tf.constant(X))
    with pytest.raises(RuleBroken, match=r"smdistributed.modelparallel.init\(\) was called twice"):
        smp.init()

    @smp.step
    def with_a_tape(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape():
            return model(x)

    with pytest.raises(RuleBroken, match=r"GradientTape is used inside an smp.step\. .* optimizer.get_gradients"):
        with_a_tape(tf.constant(X))
    forward = smp.step(lambda x: model(x))
    tape = tf.GradientTape()
    with tape, pytest.raises(RuleBroken, match=r"called under a tf.GradientTape"):
        forward(tf.constant(X))
    with pytest.raises(RuleBroken, match=r"4 microbatches do not divide x, whose axis 0 has 6\. A batch of 8"):
        forward(tf.constant(X[:6]))
    with pytest.raises(RuleBroken, match=r"smp\.step takes no jit_compile"):
        smp.step(jit_compile=True)(lambda x: model(x))
    with pytest.raises(RuleBroken, match=r"smp.partition\(1\) of 1 partitions"), smp.partition(1):
        pass
    with pytest.raises(RuleBroken, match=r"accumulate\(method='fast'\)"):
        forward(tf.constant(X)).accumulate("fast")


def test_use_without_parameters_or_before_init_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(RuleBroken, match=f"{VARIABLE} is not set"):
        smp.init()
    with pytest.raises(RuleBroken, match=r"smdistributed.modelparallel is used before init\(\)"):
        smp.rank()


def test_horovods_init_is_refused_in_hybrid_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    import horovod.tensorflow as hvd

    monkeypatch.setenv(VARIABLE, json.dumps({"partitions": 1, "horovod": True}))
    smp.init()
    try:
        with pytest.raises(RuleBroken, match=r"hvd.init\(\) is called in hybrid mode"):
            hvd.init()
        assert [smp.rank(), smp.dp_rank(), smp.mp_rank(), smp.pp_rank()] == [0, 0, 0, 0]
        assert [smp.size(), smp.dp_size(), smp.mp_size(), smp.pp_size()] == [1, 1, 1, 1]
    finally:
        smp.shutdown()
    hvd.init()
    hvd.shutdown()


def test_data_divided_by_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a replica read the same: dp_rank() divides, never rank()."""
    numbers = tf.data.Dataset.range(8)
    monkeypatch.setenv(VARIABLE, json.dumps({"partitions": 1}))
    smp.init()
    try:
        monkeypatch.setattr(smp.state.current(), "parameters", Parameters(2))  # as in a process with two devices
        with pytest.raises(RuleBroken, match=r"divided among 2 ranks.* dataset\.shard\(smp\.dp_size\(\), smp\.dp_rank"):
            numbers.shard(smp.size(), smp.rank())
        assert list(numbers.shard(smp.dp_size(), smp.dp_rank()).as_numpy_iterator()) == list(range(8))
    finally:
        smp.shutdown()
    assert list(numbers.shard(2, 1).as_numpy_iterator()) == [1, 3, 5, 7]


def test_objects_between_ranks_of_one_process(library: None) -> None:
    smp.send({"a": 1}, 0, smp.RankType.WORLD_RANK)
    assert smp.recv_from(0, smp.RankType.WORLD_RANK) == {"a": 1}
    with pytest.raises(RuleBroken, match=r"recv_from\(0\) waits for rank 0, which this process drives"):
        smp.recv_from(0, smp.RankType.MP_RANK)
    assert smp.allgather(5, smp.WORLD) == smp.allgather(5, smp.MP_GROUP) == smp.allgather(5, smp.DP_GROUP) == [5]
    smp.barrier(), smp.mp_barrier(), smp.dp_barrier()
    assert (smp.get_mp_group(), smp.get_dp_group()) == ([0], [0])


# --- two partitions, in a process of their own: logical devices are made before TensorFlow begins -----------

TWO_PARTITIONS = """
import json, os, sys
os.environ["SM_HP_MP_PARAMETERS"] = sys.argv[1]
import numpy as np, tensorflow as tf
from lm.smdistributed_local import modelparallel as smp
smp.init()

class Net(smp.DistributedModel):
    def __init__(self):
        super().__init__()
        self.parts = [tf.keras.layers.Dense(32, activation="tanh", name=f"part{n}") for n in range(4)]
    def call(self, x):
        for number, part in enumerate(self.parts):
            with smp.partition(1 - number // 2):       # by hand in reverse; nothing under auto_partition
                x = part(x)
        return x

model = Net()

def variables():
    return [v if isinstance(v, tf.Variable) else v.value for v in model.trainable_variables]

@smp.step
def forward(x):
    loss = tf.reduce_mean(tf.square(model(x)))
    return loss, tf.gradients(loss, variables())

x = tf.constant(np.random.RandomState(0).randn(8, 32).astype("float32"))
loss, gradients = forward(x)
weights = [tf.constant(v.numpy()) for v in variables()]
with tf.GradientTape() as tape:
    tape.watch(weights)
    y = x
    for kernel, bias in zip(weights[::2], weights[1::2]):
        y = tf.tanh(y @ kernel + bias)
    expected = tf.reduce_mean(tf.square(y))
worst = max(float(tf.reduce_max(abs(a.accumulate() - b))) for a, b in zip(gradients, tape.gradient(expected, weights)))
(concrete,) = forward._compiled._list_all_concrete_functions()
above = {}  # the operations that each waits for, itself included

def ancestors(operation):
    stack = [operation]
    while stack:
        one = stack[-1]
        inputs = [t.op for t in one.inputs] + list(one.control_inputs)
        missing = [o for o in inputs if o.name not in above]
        if missing:
            stack += missing
            continue
        above[one.name] = {one.name}.union(*(above[o.name] for o in inputs))
        stack.pop()
    return above[operation.name]

everything = [o for o in concrete.graph.get_operations() if o.type == "MatMul"]
backward = [o for o in everything if "gradients" in o.name]
forward_names = {o.name for o in everything} - {o.name for o in backward}
# how many forward products each backward product waits for, of 4 microbatches x 4 layers
waits = sorted({len(forward_names & ancestors(o)) for o in backward})
products = {}
for operation in concrete.graph.get_operations():
    if operation.type == "MatMul":
        products[operation.device[-5:]] = products.get(operation.device[-5:], 0) + 1
first = min(n for n, o in enumerate(concrete.graph.get_operations()) if "part0" in o.name and o.type == "MatMul")
devices = [v.device[-5:] for v in variables()]
print(json.dumps({"waits": waits, "devices": devices, "worst": worst, "products": products,
                  "loss": float(loss.reduce_mean()) - float(expected),
                  "device": concrete.graph.get_operations()[first].device[-5:]}))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("more", "device"),
    [({}, "CPU:0"), ({"pipeline": "simple"}, "CPU:0"), ({"auto_partition": False, "default_partition": 0}, "CPU:1")],
)
def test_two_partitions_have_half_the_products_each_and_the_gradients_of_one(more: Dict[str, Any], device: str) -> None:
    Path("script.py").write_text(TWO_PARTITIONS)
    parameters = json.dumps({"partitions": 2, "microbatches": 4, **more})
    command = [sys.executable, "script.py", parameters]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["worst"] < 1e-6
    assert abs(found["loss"]) < 1e-6
    assert found["device"] == device
    low, high = found["devices"][:4], found["devices"][4:]  # kernels and biases, where their layer is
    assert (set(low), set(high)) == ({device}, {"CPU:0", "CPU:1"} - {device})
    if more.get("pipeline") == "simple":
        assert found["waits"] == [16]  # all forward passes come first
    else:  # its own four; from the third microbatch on those of the microbatches that had to be over, too
        assert found["waits"] == [4, 8, 12]
    # two layers a device, four microbatches, a product forward and two backward, which lie where the forward one does
    assert found["products"] == {"CPU:0": 2 * 4 * 3, "CPU:1": 2 * 4 * 3}


# --- two replicas, whose processes talk ------------------------------------------------------------------

TWO_REPLICAS = """
import json, os
os.environ["SM_HP_MP_PARAMETERS"] = json.dumps({"partitions": 2, "horovod": True, "placement_strategy": "spread"})
from lm.smdistributed_local import modelparallel as smp
smp.init()
W, D = smp.RankType.WORLD_RANK, smp.RankType.DP_RANK
found = [smp.rank(), smp.size(), smp.dp_rank(), smp.dp_size(), smp.get_mp_group(), smp.get_dp_group()]
if smp.dp_rank() == 0:
    smp.broadcast({"from": 0}, smp.DP_GROUP)
    found.append(smp.recv_from(1, D))
    smp.send("back", 1, D)
else:
    found.append(smp.recv_from(0, D))
    smp.broadcast({"from": 1}, smp.WORLD)
    found.append(smp.recv_from(0, W))
found += [smp.allgather(smp.dp_rank(), group) for group in (smp.WORLD, smp.DP_GROUP, smp.MP_GROUP)]
smp.barrier(), smp.dp_barrier(), smp.mp_barrier()
print("found " + json.dumps(found), flush=True)
"""


@pytest.mark.processes
def test_objects_between_two_replicas_of_two_partitions() -> None:
    """Under placement_strategy=spread rank 1 is the first of replica 1, and ranks 0 and 2 are replica 0's."""
    Path("script.py").write_text(TWO_REPLICAS)
    command = [sys.executable, "-m", "hydra_plugins.lm_launchers._gloo", "2", sys.executable, "-u", "script.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "launchers")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        line[: line.index("]") + 1]: json.loads(line.split("found ")[1])
        for line in done.stdout.splitlines()
        if "found " in line
    }
    assert found["[0]"] == [0, 4, 0, 2, [0, 2], [0, 1], {"from": 1}, [0, 1, 0, 1], [0, 1], [0, 0]]
    assert found["[1]"] == [1, 4, 1, 2, [1, 3], [0, 1], {"from": 0}, "back", [0, 1, 0, 1], [0, 1], [1, 1]]
