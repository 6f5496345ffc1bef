"""Preparing in processes of its own: on a Dask cluster that loses a worker, killed itself, and twice at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, List

import pytest
from conftest import free_port, make_texts
from inputs import record, skippable, zst
from test_prepare import files_of

from lm.data.shards import PARTS

pytestmark = pytest.mark.processes

FILES = 14


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> List[str]:
    """A set that takes some seconds: 14 files, a task each, compressed, of four sources."""
    folder = tmp_path_factory.mktemp("input")
    texts = make_texts(3000)
    for number in range(FILES):
        lines = [record(f"{number} {at} {text}", "ABCD"[at % 4]) for at, text in enumerate(texts)]
        zst(folder / f"{number:02d}.jsonl.zst", [b"".join(lines)])
    pad = bytes(5 * 2**20)  # in a frame to skip: so that every file is large enough to be a task of its own
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes() + skippable(pad))
    return ["dataset=text", f"dataset.source={folder}/*.zst", "dataset.vocabulary_size=300"]


def lm(*arguments: str) -> List[str]:
    return [str(Path(sys.executable).with_name("lm")), *arguments]


def start(command: List[str], log: str) -> subprocess.Popen[bytes]:
    with open(log, "wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def done_parts(folder: Path) -> List[str]:
    return sorted(path.name for path in (folder / PARTS).glob("[0-9]*")) if folder.exists() else []


@pytest.fixture(scope="module")
def reference(overrides: List[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set as one process makes it."""
    folder = tmp_path_factory.mktemp("reference") / "set"
    command = lm("prepare", *overrides, f"dataset.output={folder}", "prepare.workers=1")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    assert len(done_parts(folder)) == FILES
    return folder


def test_killed_and_started_again_it_makes_the_same_set(overrides: List[str], reference: Path) -> None:
    folder = Path("set").resolve()
    command = lm("prepare", *overrides, f"dataset.output={folder}")
    first = start(command, "first.log")
    wait_for(lambda: len(done_parts(folder)) >= 2, 60, "no part was done")
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert f"another process is preparing {folder}" in again.stderr
    first.kill()
    first.wait()
    before = {name: (folder / PARTS / name / "part.json").stat().st_mtime_ns for name in done_parts(folder)}
    assert 2 <= len(before) < FILES
    assert not (folder / "manifest.json").exists()
    last = subprocess.run(command, capture_output=True, text=True, check=False)
    assert last.returncode == 0, last.stderr
    assert files_of(folder) == files_of(reference)
    after = {name: (folder / PARTS / name / "part.json").stat().st_mtime_ns for name in before}
    assert after == before
    verified = subprocess.run(lm("verify", str(folder)), capture_output=True, text=True, check=False)
    assert "whole: " in verified.stdout


def test_a_dask_cluster_that_loses_a_worker(overrides: List[str], reference: Path) -> None:
    """A scheduler and two workers in processes of their own; one is killed while it has work."""
    port, folder = free_port(), Path("set").resolve()
    address = f"tcp://127.0.0.1:{port}"
    dask = str(Path(sys.executable).with_name("dask"))
    with ExitStack() as stack:

        def background(*arguments: str) -> subprocess.Popen[bytes]:
            process = start([dask, *arguments], f"{arguments[0]}-{len(list(Path().glob('*.log')))}.log")
            stack.callback(process.wait)
            stack.callback(lambda: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
            return process

        background("scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard")
        worker = ["worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--memory-limit", "0"]
        workers = [background(*worker), background(*worker)]
        command = lm("prepare", *overrides, f"dataset.output={folder}", f"prepare.dask_address={address}")
        main = start(command, "main.log")
        wait_for(lambda: len(done_parts(folder)) >= 3 or main.poll(), 90, "no part was done")
        os.kill(workers[0].pid, signal.SIGKILL)
        killed_at = len(done_parts(folder))
        assert main.wait(timeout=120) == 0, Path("main.log").read_text()
    assert 3 <= killed_at < FILES
    assert files_of(folder) == files_of(reference)


def test_a_scheduler_that_is_not_there_is_refused(overrides: List[str]) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    command = lm("prepare", *overrides, "dataset.output=set", f"prepare.dask_address={address}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"prepare.dask_address={address} does not answer" in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("set").exists()
