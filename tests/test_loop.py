"""Whole runs in this process: the golden curve, evaluation, non-finite losses, precision, and going on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, List

import pytest
from conftest import ROOT, only_run, run_here, train_lines

from lm.compose import compose
from lm.plan import make_plan
from lm.refusal import ConfigError
from lm.run import RunFailed

GOLDEN = ROOT / "tests/golden/loss_curve.txt"


def losses(run: Path) -> List[float]:
    return [line["loss"] for line in train_lines(run)]


def test_the_loss_curve_is_the_golden_one(small: List[str]) -> None:
    """To 1e-4, the promise between TensorFlow 2.6 and 2.21 too: float32 sums differ with vector width and order."""
    run_here(small)
    golden = [float(line.split()[1]) for line in GOLDEN.read_text().splitlines()]
    assert losses(only_run()) == pytest.approx(golden, abs=1e-4)


def test_a_run_leaves_its_files_and_says_what_it_did(small: List[str], capsys: pytest.CaptureFixture[str]) -> None:
    summary = run_here(small)
    run = only_run()
    assert summary == {**json.loads((run / "summary.json").read_text())}
    assert (summary["status"], summary["step"], summary["tokens"]) == ("finished", 20, 20 * 8 * 32)
    assert summary["traces"] == 1  # compiled once
    assert summary["parameters"] == json.loads((run / "plan.json").read_text())["parameters"]
    assert summary["val_loss"] < math.log(300)
    split = summary["goodput_seconds"]
    assert sum(seconds for kind, seconds in split.items() if kind != "total") == pytest.approx(split["total"])
    names = {path.name for path in run.iterdir()}
    assert {"config.yaml", "plan.json", "metrics.jsonl", "summary.json", "log.txt", "sample.txt"} <= names
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "val_loss" in line] == [10, 20]
    assert all(line["tokens"] == line["step"] * 256 for line in lines)
    shown = capsys.readouterr().out
    assert "finished at step 20 of 20" in shown
    assert "gzip -9's" in shown
    assert "step 20/20" in (run / "log.txt").read_text()
    assert not any(character in str(run) for character in "=, ")


def test_evaluation_is_the_token_weighted_mean_whatever_the_batch(small: List[str]) -> None:
    overrides = [*small, "train.steps=6", "schedule.warmup_steps=1"]
    one = run_here([*overrides, "train.microbatch_sequences=8"])
    run_here([*overrides, "run.resume=never"])
    other = run_here([*overrides, "run.resume=never", "train.microbatch_sequences=1"])
    assert other["val_loss"] == pytest.approx(one["val_loss"], abs=1e-5)
    assert other["val_bits_per_byte"] == pytest.approx(one["val_bits_per_byte"], abs=1e-5)


def test_a_done_run_says_so_and_does_nothing(small: List[str], capsys: pytest.CaptureFixture[str]) -> None:
    run_here(small)
    before = {path: path.stat().st_mtime_ns for path in only_run().rglob("*")}
    run_here(small)
    assert "this run is done; run.resume=never starts it again" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in only_run().rglob("*")}
    del before[only_run() / "lock"], after[only_run() / "lock"]
    assert after == before


def test_never_starts_again_and_keeps_the_old_run_aside(small: List[str]) -> None:
    run_here(small)
    run_here([*small, "run.resume=never"])
    runs = sorted(path.name for path in Path("outputs/default").iterdir())
    assert len(runs) == 2
    assert runs[1] == runs[0] + ".old1"
    assert losses(Path("outputs/default") / runs[0]) == losses(Path("outputs/default") / runs[1])


def test_must_refuses_where_there_is_nothing_to_resume(small: List[str]) -> None:
    with pytest.raises(ConfigError, match=r"run\.resume=must, and there is no checkpoint"):
        run_here([*small, "run.resume=must"])


def test_the_same_losses_without_xla(small: List[str]) -> None:
    """To 1e-5 over 20 steps: only the order of sums differs."""
    run_here([*small, "run.experiment=with"])
    run_here([*small, "run.experiment=without", "train.xla=false"])
    assert losses(only_run("without")) == pytest.approx(losses(only_run("with")), abs=1e-5)
    assert only_run("without").name == only_run("with").name


def test_a_gpu_without_cudas_compiler_is_told_what_to_type(small: List[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    from lm import job, loop

    def fail(*_: Any) -> None:
        raise tf.errors.InternalError(None, None, "libdevice not found at ./libdevice.10.bc [Op:__inference_norm_12]")

    monkeypatch.setattr(loop, "train", fail)
    config = compose(small)
    with pytest.raises(RunFailed, match=r"train\.xla=false"):
        job.train_here(config, make_plan(config))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains_as_float32_does(small: List[str], precision: str) -> None:
    """M01: within a few percent of float32 after twenty steps, clipping on."""
    run_here([*small, "run.experiment=full"])
    run_here([*small, "run.experiment=half", f"train.precision={precision}"])
    full, half = losses(only_run("full")), losses(only_run("half"))
    assert half == pytest.approx(full, rel=0.03)
    norms = [[line["grad_norm"] for line in train_lines(only_run(name))] for name in ("full", "half")]
    assert norms[1] == pytest.approx(norms[0], rel=0.1)  # the unscaled norm is what is logged


def test_overflows_are_skipped_counted_and_no_steps_of_the_schedule(small: List[str]) -> None:
    """M01: an initial loss scale of 2^30 overflows float16 until it has come down."""
    overrides = [*small, "train.precision=float16", "train.initial_loss_scale=1073741824"]
    summary = run_here(overrides)
    lines = train_lines(only_run())
    skipped = [line for line in lines if line["skipped"]]
    assert 3 < len(skipped) < 20
    assert summary["skipped_steps"] == len(skipped)
    scales = [line["loss_scale"] for line in skipped]
    assert all(after == before / 2 for before, after in zip(scales, scales[1:]))
    assert {line["learning_rate"] for line in skipped} == {lines[0]["learning_rate"]}
    assert lines[-1]["loss"] < lines[0]["loss"]
    stored = json.loads((only_run() / "checkpoints/step-00000020/checkpoint.json").read_text())
    assert stored["progress"]["skipped_steps"] == len(skipped)


def test_a_float16_run_goes_on_with_its_loss_scale(small: List[str]) -> None:
    """M01: stopped after the scale has come down from 2^30, and continued to the bit, mid-epoch."""
    half = ["train.precision=float16", "train.initial_loss_scale=1073741824", "schedule=constant"]
    run_here([*small, *half, "run.experiment=straight"])
    run_here([*small, *half, "run.experiment=parts", "train.steps=12"])
    run_here([*small, *half, f"run.directory={only_run('parts')}"])
    lines = [train_lines(only_run(name)) for name in ("straight", "parts")]
    assert lines[1][12]["loss_scale"] < 2**30
    for key in ("step", "loss", "loss_scale", "learning_rate", "skipped_steps"):
        assert [line[key] for line in lines[0]] == [line[key] for line in lines[1]]


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_checkpoints(small: List[str]) -> None:
    """TR01: the run fails by the step's name, and the last finite checkpoint is there to resume."""
    overrides = [*small, "optimizer.learning_rate=1e6", "train.steps=60", "checkpoint.every_steps=1"]
    with pytest.raises(RunFailed, match=r"step \d+: loss .* not finite for 3 steps in a row") as caught:
        run_here(overrides)
    run = only_run()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "not finite" in summary["reason"]
    kept = sorted((run / "checkpoints").iterdir())
    assert kept
    assert f"of step {int(kept[-1].name[5:])}" in str(caught.value)
    from safetensors.numpy import load_file

    for path in kept:
        weights = load_file(str(path / "weights.safetensors"))
        assert all(math.isfinite(float(abs(value).max())) for value in weights.values())
    for line in (run / "metrics.jsonl").read_text().splitlines():
        assert "NaN" not in line
        assert "Infinity" not in line


def test_a_run_never_ends_well_on_a_loss_that_is_not_finite(small: List[str]) -> None:
    """TR01: fewer such steps than train.max_nonfinite_steps, but they are the last ones."""
    overrides = ["optimizer.learning_rate=1e6", "train.max_nonfinite_steps=1000", "train.eval_every_steps=1000"]
    with pytest.raises(RunFailed, match=r"step 20: loss .* not finite for \d+ steps"):
        run_here([*small, *overrides])
    assert json.loads((only_run() / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("change", "key"), [("run.seed=1", "run.seed"), ("train.precision=float16", "train.precision")]
)
def test_another_seed_or_precision_in_the_same_folder_is_refused(small: List[str], change: str, key: str) -> None:
    run_here(small)
    with pytest.raises(ConfigError, match=f"{key} is"):
        run_here([*small, f"run.directory={only_run()}", change, "train.steps=30"])


def test_a_summary_that_a_kill_prevented_is_made_whole_by_the_next_start(small: List[str]) -> None:
    expected = run_here(small)
    (only_run() / "summary.json").unlink()
    again = run_here(small)
    for key in ("status", "step", "loss", "val_loss", "val_bits_per_byte", "best_val_loss"):
        assert again[key] == expected[key]


def test_another_model_or_dataset_in_the_same_folder_is_refused_by_name(small: List[str], tmp_path: Path) -> None:
    run_here(small)
    there = f"run.directory={only_run()}"
    with pytest.raises(ConfigError, match=r"model\.layers is 1, and .* was written with 2"):
        run_here([*small, there, "model.layers=1", "train.steps=30"])
    other = [f"dataset.output={tmp_path / 'other'}", "dataset.validation_fraction=0.2"]
    with pytest.raises(ConfigError, match=r"dataset is .*, and .* was written with"):
        run_here([*small, there, *other, "train.steps=30"])


def test_a_run_is_extended_in_its_folder(small: List[str]) -> None:
    run_here([*small, "schedule=constant"])
    summary = run_here([*small, "schedule=constant", f"run.directory={only_run()}", "train.steps=25"])
    assert (summary["status"], summary["step"]) == ("finished", 25)
    assert [line["step"] for line in train_lines(only_run())] == list(range(1, 26))


def test_two_processes_in_one_run_folder_are_refused(small: List[str]) -> None:
    from lm.run import run_folder

    folder = run_folder(compose(small))
    folder.lock()
    with pytest.raises(RunFailed, match="another process is training in"):
        run_here(small)
    folder.unlock()
    assert run_here(small)["status"] == "finished"
