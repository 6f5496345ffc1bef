"""Checkpoints: whole or not at all, newest complete first, never of another run, never more deleted than written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Dict, Optional

import numpy as np
import pytest
import tensorflow as tf

from lm.checkpoint import Checkpoints, Progress
from lm.refusal import ConfigError
from lm.run import RunFailed

IDENTITY = {"model.width": 4, "dataset": "abcd1234"}


def variables(fill: float = 0.0) -> Dict[str, tf.Variable]:
    return {
        "embedding.tokens": tf.Variable(tf.fill([3, 4], fill)),
        "first_moment.embedding.tokens": tf.Variable(tf.cast(tf.fill([3, 4], fill / 3), tf.bfloat16)),
        "optimizer.step": tf.Variable(tf.cast(fill, tf.int64)),
    }


def checkpoints(keep: int = 2, **identity: Any) -> Checkpoints:
    return Checkpoints(Path("checkpoints"), {**IDENTITY, **identity}, keep)


def save(step: int, val_loss: Optional[float] = None, keep: int = 2) -> None:
    checkpoints(keep).save(Progress(step=step, sequences=8 * step, val_loss=val_loss), variables(float(step)))


def restored() -> Dict[str, Any]:
    fresh = variables(-1.0)
    progress = checkpoints().restore(fresh)
    assert progress is not None
    assert progress.sequences == 8 * progress.step
    for name, expected in variables(float(progress.step)).items():
        np.testing.assert_array_equal(fresh[name], expected)
    return {"step": progress.step}


def names() -> list[str]:
    return sorted(path.name for path in Path("checkpoints").iterdir())


def test_what_is_restored_is_what_was_saved_to_the_bit() -> None:
    save(7)
    assert restored() == {"step": 7}


def test_without_any_checkpoint_there_is_nothing_to_resume() -> None:
    assert checkpoints().restore(variables()) is None


@pytest.mark.parametrize(
    ("damage", "reason"),
    [  # K01: what a kill or a full disk leaves behind
        (lambda path: (path / "checkpoint.json").unlink(), "no checkpoint.json"),
        (lambda path: (path / "checkpoint.json").write_text(""), "is not JSON"),
        (lambda path: (path / "weights.safetensors").unlink(), "no weights.safetensors"),
        (lambda path: truncate(path / "weights.safetensors"), "is damaged"),
        (lambda path: truncate(path / "optimizer.safetensors"), "is damaged"),
        (lambda path: flip(path / "weights.safetensors"), "is damaged"),
        (lambda path: path.rename(path.with_name(f".{path.name}.partial")), ""),
    ],
)
def test_a_damaged_checkpoint_is_skipped_with_its_reason(
    damage: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(5), save(10)
    damage(Path("checkpoints/step-00000010"))
    import logging

    logging.getLogger("lm").propagate = True
    assert restored() == {"step": 5}
    assert reason in caplog.text
    save(11)  # and the run goes on
    assert restored() == {"step": 11}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def test_no_usable_checkpoint_among_several_is_an_error_and_not_step_0() -> None:
    save(5), save(10)
    for path in Path("checkpoints").iterdir():
        truncate(path / "weights.safetensors")
    with pytest.raises(RunFailed, match="none of the checkpoints") as caught:
        checkpoints().restore(variables())
    assert "step-00000005" in str(caught.value)
    assert "step-00000010" in str(caught.value)
    assert "run.resume=never starts again" in str(caught.value)


def test_another_model_tokenizer_or_dataset_is_refused_by_name() -> None:
    save(5)
    with pytest.raises(ConfigError) as caught:
        checkpoints(**{"model.width": 8, "dataset": "ffff0000"}).restore(variables())
    assert "model.width is 8, and checkpoints/step-00000005 was written with 4" in str(caught.value)
    assert "dataset is ffff0000" in str(caught.value)


def test_every_variable_must_be_restored() -> None:
    save(5)
    more = {**variables(), "head.kernel": tf.Variable(0.0)}
    with pytest.raises(RunFailed, match=r"lacks \['head.kernel'\]"):
        checkpoints().restore(more)
    fewer = {"embedding.tokens": tf.Variable(tf.zeros([3, 4]))}
    with pytest.raises(RunFailed, match="that this run does not know"):
        checkpoints().restore(fewer)
    other = {**variables(), "embedding.tokens": tf.Variable(tf.zeros([4, 4]))}
    with pytest.raises(RunFailed, match=r"step-00000005: embedding.tokens has shape \(4, 4\), the file's has \(3, 4\)"):
        checkpoints().restore(other)


def test_the_newest_and_the_best_stay() -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5)):
        save(step, loss)
    assert names() == ["step-00000002", "step-00000004", "step-00000005"]


def test_what_this_run_did_not_write_is_never_deleted() -> None:
    Path("checkpoints/step-00000000").mkdir(parents=True)
    Path("checkpoints/step-00000000/thesis.txt").write_text("mine")
    Path("checkpoints/notes").mkdir()
    Checkpoints(Path("checkpoints"), {"model.width": 99}, 1).save(Progress(step=1), variables())
    for step in (2, 3, 4):
        save(step, keep=1)
    assert names() == ["notes", "step-00000000", "step-00000001", "step-00000004"]
    assert Path("checkpoints/step-00000000/thesis.txt").read_text() == "mine"


def test_a_folder_with_a_new_checkpoints_name_is_kept_beside_it() -> None:
    Path("checkpoints/step-00000005").mkdir(parents=True)
    Path("checkpoints/step-00000005/thesis.txt").write_text("mine")
    save(5), save(5)
    assert names() == ["step-00000005", "step-00000005.replaced1"]
    assert Path("checkpoints/step-00000005.replaced1/thesis.txt").read_text() == "mine"
    assert restored() == {"step": 5}


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_newer_checkpoints_never_push_out_the_good_ones(keep: int) -> None:
    for step in (100, 200, 300):
        save(step, keep=3)
    for step in (200, 300):
        truncate(Path(f"checkpoints/step-00000{step}/weights.safetensors"))
    assert restored() == {"step": 100}
    save(150, keep=keep)
    assert restored() == {"step": 150}


def test_weights_that_are_not_finite_are_not_saved() -> None:
    save(5)
    bad = variables(1.0)
    bad["embedding.tokens"].assign(tf.fill([3, 4], float("nan")))
    with pytest.raises(RunFailed, match=r"step 6: embedding\.tokens is not finite, so no checkpoint was written"):
        checkpoints().save(Progress(step=6), bad)
    assert names() == ["step-00000005"]


def test_a_checkpoint_is_read_by_plain_safetensors_and_json() -> None:
    from safetensors.numpy import load_file

    save(3, val_loss=1.5)
    content = json.loads(Path("checkpoints/step-00000003/checkpoint.json").read_text())
    assert content["identity"] == IDENTITY
    assert content["progress"]["val_loss"] == 1.5
    weights = load_file("checkpoints/step-00000003/weights.safetensors")
    np.testing.assert_array_equal(weights["embedding.tokens"], np.full([3, 4], 3.0))


def test_leftovers_of_a_kill_are_cleared_by_the_next_save() -> None:
    save(5)
    shutil.copytree("checkpoints/step-00000005", "checkpoints/.step-00000006.partial")
    shutil.copytree("checkpoints/step-00000005", "checkpoints/.step-00000004.old")
    save(7)
    assert names() == ["step-00000005", "step-00000007"]
