"""README's commands, each run as it stands, in a folder of its own; and what README says of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import List

import pytest
from conftest import ROOT, free_port, only_run

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("uv run ")
]
OTHERS = ("mlflow ui", "uv run pytest", "lm prepare", "lm verify")  # each in a test of its own
QUICK = [command for command in COMMANDS if not any(other in command for other in OTHERS)]

pytestmark = pytest.mark.processes


def here(command: str) -> List[str]:
    """A README command in this environment: uv run NAME is NAME in the environment's bin folder."""
    words = shlex.split(command)[2:]
    program = str(Path(sys.executable).with_name(words[0]))
    return [program, *(str(ROOT / word) if word == "train.py" else word for word in words[1:])]


def test_readme_has_its_commands() -> None:
    assert COMMANDS[:2] == ["uv run python train.py", "uv run pytest"]
    assert len(COMMANDS) == 15


@pytest.mark.parametrize("command", QUICK)
def test_a_command_does_what_it_says(command: str) -> None:
    done = subprocess.run(here(command), capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    if command == "uv run python train.py":
        main_job(done.stdout)


def main_job(shown: str) -> None:
    """The first command's promises: finished, tracked, sampled, and better than gzip -9 on held-out text."""
    run = only_run()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["val_bits_per_byte"] < summary["gzip_bits_per_byte"]
    assert "better than gzip -9's" in shown
    assert ">>>" in (run / "sample.txt").read_text()
    assert (run / "checkpoints" / f"step-{summary['steps']:08d}" / "checkpoint.json").exists()
    assert Path("outputs/mlflow.db").exists()
    # nothing but this project's own words reaches a new user's terminal
    assert "oneDNN" not in shown
    assert "alembic" not in shown


def test_what_is_prepared_is_verified() -> None:
    prepare, verify = (next(c for c in COMMANDS if name in c) for name in ("lm prepare", "lm verify"))
    for command in (prepare, verify):
        done = subprocess.run(here(command), capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
    assert "whole: 2 shards, " in done.stdout


def test_mlflow_ui_starts() -> None:
    (command,) = [command for command in COMMANDS if "mlflow ui" in command]
    Path("outputs").mkdir()
    port = free_port()
    arguments = [*here(command), "--port", str(port), "--workers", "1"]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open("mlflow.log", "wb") as log:
        process = subprocess.Popen(arguments, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                page = urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).read().decode()
                break
            except OSError:
                assert time.monotonic() < deadline, Path("mlflow.log").read_text()
                time.sleep(0.5)
        assert "MLflow" in page
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_refusal_is_the_one_that_readme_shows() -> None:
    shown = README.split("$ uv run python train.py modle=tiny")[1].split("\n", 1)[1].split("```")[0]
    command = "uv run python train.py modle=tiny train.steps=1e3 model.heads=5"
    assert command in README
    done = subprocess.run(here(command), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == shown
