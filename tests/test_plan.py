"""The plan's arithmetic against published numbers and against the model itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lm.compose import compose
from lm.plan import human_bytes, make_plan
from lm.shapes import flops_per_token

PILE = ["dataset=pile"]


@pytest.mark.parametrize(
    ("overrides", "parameters"),
    [  # Radford et al. 2019, as transformers counts gpt2, gpt2-medium, gpt2-large and gpt2-xl
        (["model=125m"], 124_439_808),
        (["model=350m"], 354_823_168),
        (["model=760m"], 774_030_080),
        (["model=760m", "model.layers=48", "model.width=1600", "model.heads=25"], 1_557_611_200),
    ],
)
def test_gpt2s_published_sizes_come_out_exactly(overrides: list[str], parameters: int) -> None:
    assert make_plan(compose(PILE + overrides)).parameters == parameters


def test_lm_plan_prints_json_and_needs_no_data() -> None:
    lm = str(Path(sys.executable).with_name("lm"))
    done = subprocess.run(
        [lm, "plan", "model=125m", "dataset=pile", "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["parameters"] == 124439808
    table = subprocess.run([lm, "plan", "model=1b", "dataset=pile"], capture_output=True, text=True, check=True)
    assert "1,315,723,264" in table.stdout


def test_lm_plan_refuses_with_status_2() -> None:
    lm = str(Path(sys.executable).with_name("lm"))
    done = subprocess.run([lm, "plan", "model=125n"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "did you mean 125m?" in done.stderr


def test_flops_are_six_a_weight_and_twelve_a_score() -> None:
    config = compose([*PILE, "model=125m"])
    blocks = 12 * (768 * 3 * 768 + 768 * 768 + 2 * 768 * 3072)
    head = 768 * 50257
    attention = 12 * 12 * 768 * 1024  # PaLM, appendix B: 12 L H Q T
    assert flops_per_token(config.model, 50257) == 6 * (blocks + head) + attention


def test_batch_steps_and_tokens() -> None:
    plan = make_plan(
        compose(
            [
                "parallel=horovod",
                "cluster.processes=4",
                "train.global_batch_sequences=64",
                "train.microbatch_sequences=8",
                "train.steps=100",
            ]
        )
    )
    assert (plan.replicas, plan.accumulation, plan.microbatch_sequences) == (4, 2, 8)
    assert plan.tokens_per_step == 64 * 256
    assert plan.tokens == 100 * 64 * 256


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_learning_rate_scaling(scaling: str, factor: float) -> None:
    overrides = ["parallel=horovod", "cluster=local4", f"parallel.lr_scaling={scaling}"]
    plan = make_plan(compose([*overrides, "optimizer.learning_rate=1e-3"]))
    assert plan.peak_learning_rate == pytest.approx(factor * 1e-3)


def test_memory_counts_weights_gradients_and_moments() -> None:
    plan = make_plan(compose([*PILE, "model=125m"]))
    assert plan.memory_per_device.weights == plan.memory_per_device.gradients == 4 * plan.parameters
    assert plan.memory_per_device.optimizer == 8 * plan.parameters
    half = make_plan(compose([*PILE, "model=125m", "optimizer.moments_dtype=bfloat16"]))
    assert half.memory_per_device.optimizer == 4 * plan.parameters


def test_bytes_as_people_read_them() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 3 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]


def test_memory_at_once_is_less_than_its_kinds_and_more_than_what_stays() -> None:
    for overrides in ([], ["model.recompute=block"], ["train.microbatch_sequences=1"], ["train.precision=bfloat16"]):
        memory = make_plan(compose(["model=125m", *overrides])).memory_per_device
        assert memory.steady < memory.total < sum(memory.kinds().values())


def test_memory_by_hand() -> None:
    """model=10m, 8 sequences of 256: traced, the step asked for 699 MiB at its peak."""
    memory = make_plan(compose(["model=10m"])).memory_per_device
    parameters, tokens, width = 12_318_720, 2048, 384
    block = 4 * (4 * width + 5 * width + 2 * 4 * width + 2 * 6 * 256)
    assert memory.weights == 4 * parameters
    assert memory.activations == tokens * (6 * block + 6 * 4 * width)
    assert memory.logits == tokens * 4096 * 12 + 2 * 4 * 4096 * width
    at_once = 12 * parameters + memory.activations + memory.logits
    assert memory.total == at_once + memory.slack
    assert at_once / 2**20 == pytest.approx(699, rel=0.05)


def test_several_processes_have_a_buffer_for_their_gradients() -> None:
    two = make_plan(compose(["parallel=horovod", "cluster=local2"])).memory_per_device
    assert two.communication == 128 * 2**20
    assert make_plan(compose([])).memory_per_device.communication == 0


def test_half_precision_copies_are_a_blocks_where_blocks_are_computed_again() -> None:
    half = ["model=125m", "train.precision=bfloat16"]
    whole = make_plan(compose(half))
    assert whole.memory_per_device.copies == 2 * whole.parameters
    again = make_plan(compose([*half, "model.recompute=block"]))
    assert again.memory_per_device.copies == pytest.approx(2 * 12 * 768**2, rel=0.01)
