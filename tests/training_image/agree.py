"""Trains 20 steps here and in the training image under every strategy, moves a run between them, compares the losses.

python tests/training_image/agree.py IMAGE_PYTHON. Ends with status 1 where a loss differs by more than 1e-4.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from conftest import SMALL, dataset_overrides, make_texts, train_lines  # noqa: E402

from lm.compose import compose  # noqa: E402
from lm.data.prepare import prepare  # noqa: E402
from lm.report import make_console  # noqa: E402
from lm.run import run_folder  # noqa: E402

TOLERANCE = 1e-4
STEPS = 20


def losses(python: str, overrides: List[str], processes: int) -> Dict[str, List[float]]:
    """Trains with an interpreter through the entry that is shipped, lm.worker; returns losses and validation losses."""
    config = compose(overrides)
    folder = run_folder(config)
    run = folder.path
    run.mkdir(parents=True, exist_ok=True)  # it may go on with another's
    folder.write_config(config)
    command = [python, "-u", "-m", "lm.worker", str(folder.config)]
    if processes > 1:
        command = [python, "-m", "hydra_plugins.lm_launchers._gloo", str(processes), *command]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launchers'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        sys.exit(f"{python} with {processes} processes ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert json.loads((run / "summary.json").read_text())["traces"] == 1
    return {
        "loss": [line["loss"] for line in train_lines(run)],
        "val_loss": [line["val_loss"] for line in lines if "val_loss" in line],
    }


def main(image: str) -> int:
    folder = Path(tempfile.mkdtemp())
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in make_texts(80)))
    overrides = [*SMALL, *dataset_overrides(corpus, folder / "set"), f"tracking.uri={(folder / 'mlruns').as_uri()}"]
    config = compose(overrides)
    prepare(config.dataset, config.prepare, make_console())
    reference = losses(sys.executable, [*overrides, f"run.directory={folder / 'here'}"], 1)
    assert len(reference["loss"]) == STEPS
    worst = 0.0
    for name, more, processes in (
        ("one process", [], 1),
        ("two Horovod processes", ["parallel=horovod", "cluster=local2"], 2),
        ("two SDP processes", ["parallel=sdp", "cluster=local2"], 2),
        ("two SMP partitions", ["parallel=smp"], 1),
    ):
        found = losses(image, [*overrides, *more, f"run.directory={folder / name}"], processes)
        for kind, expected in reference.items():
            assert len(found[kind]) == len(expected)
            difference = max(abs(a - b) for a, b in zip(found[kind], expected))
            worst = max(worst, difference)
            print(f"training image, {name}: {kind} differs from the workstation's by at most {difference:.1e}")
    constant = [*overrides, "schedule=constant", "schedule.warmup_steps=5"]  # the rate does not follow train.steps
    straight = losses(sys.executable, [*constant, f"run.directory={folder / 'straight'}"], 1)["loss"]
    here = sys.executable
    for name, first, then in (("here to the image", here, image), ("the image to here", image, here)):
        moved = [*constant, f"run.directory={folder / name}"]
        losses(first, [*moved, "parallel=smp", "train.steps=10"], 1)
        found = losses(then, moved, 1)["loss"]
        assert len(found) == STEPS
        difference = max(abs(a - b) for a, b in zip(found, straight))
        worst = max(worst, difference)
        print(f"ten steps in two partitions, then ten in one process, from {name}: differs by at most {difference:.1e}")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
