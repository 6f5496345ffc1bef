"""What tests share: a folder of their own, a corpus that is the same everywhere, and a small configuration."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test runs in a folder of its own, and leaves no signal handler behind."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def make_texts(count: int, seed: int = 0) -> List[str]:
    """Documents of a small language with some structure to learn, made by arithmetic alone."""
    generator = random.Random(seed)
    words = ["".join(generator.choice("abcdefghij") for _ in range(generator.randint(2, 6))) for _ in range(60)]
    texts = []
    for _ in range(count):
        at, text = generator.randrange(60), []
        for _ in range(300):
            at = (at * 7 + generator.randrange(3)) % 60
            text.append(words[at])
        texts.append(" ".join(text) + ".\n")
    return texts


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .jsonl file of 80 documents."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with open(path, "w") as file:
        for text in make_texts(80):
            file.write(json.dumps({"text": text, "meta": {"pile_set_name": "Words"}}) + "\n")
    return path


@pytest.fixture(scope="session")
def prepared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus, prepared once for all tests."""
    from lm.compose import compose
    from lm.data.prepare import prepare
    from lm.report import make_console

    folder = tmp_path_factory.mktemp("prepared") / "words"
    config = compose(dataset_overrides(corpus, folder))
    prepare(config.dataset, config.prepare, make_console())
    return folder


def dataset_overrides(corpus: Path, folder: Path) -> List[str]:
    return [
        "dataset=text",
        f"dataset.source={corpus}",
        f"dataset.output={folder}",
        "dataset.vocabulary_size=300",
        "dataset.validation_fraction=0.1",
    ]


SMALL = [
    "model.layers=2",
    "model.width=32",
    "model.heads=2",
    "model.context=32",
    "train.steps=20",
    "train.global_batch_sequences=8",
    "train.log_every_steps=1",
    "train.eval_every_steps=10",
    "train.sample_tokens=8",
    "schedule.warmup_steps=5",
    "checkpoint.every_steps=5",
    "cluster.peak_tflops_per_process=0.1",
    "profiling=none",
    "tracking.uri=null",
]


@pytest.fixture
def small(corpus: Path, prepared: Path, request: pytest.FixtureRequest) -> List[str]:
    """The overrides of a run of 20 steps that takes a second; with MLflow where a test is marked so."""
    tracked = request.node.get_closest_marker("tracked") is not None
    more = ["tracking.uri=sqlite:///outputs/mlflow.db"] if tracked else []
    return [*SMALL, *dataset_overrides(corpus, prepared), *more]


def run_here(overrides: List[str]) -> Dict[str, Any]:
    """Trains in this process, as train.py would. Returns the summary."""
    from lm import job
    from lm.compose import compose
    from lm.loop import train
    from lm.plan import make_plan
    from lm.stopwatch import Stopwatch

    config = compose(overrides)
    plan = make_plan(config)
    run, done = job.begin(config, plan)
    if done:
        return run.read_summary()
    data, manifest = job.data_of(config)
    try:
        return train(config, plan, run, data, manifest, Stopwatch())
    finally:
        run.unlock()


def train_py(*overrides: str, timeout: float = 600, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs train.py in a process of its own."""
    command = [sys.executable, str(ROOT / "train.py"), *overrides]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **environment}, check=False
    )


def start(*overrides: str) -> subprocess.Popen[str]:
    """train.py in a session of its own, to be signalled or killed."""
    command = [sys.executable, str(ROOT / "train.py"), *overrides]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Returns once a condition holds; fails where the process ends before, or after five minutes."""
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_worker(port: int) -> subprocess.Popen[str]:
    """`lm worker PORT`, once it answers."""
    command = [sys.executable, "-m", "lm.cli", "worker", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert f"{port}: this host's devices are here for cluster=tf_hosts" in process.stdout.readline()
    return process


@pytest.fixture
def two_hosts() -> Iterator[List[int]]:
    """The ports of two workers on this machine."""
    ports = [free_port(), free_port()]
    started = [start_worker(port) for port in ports]
    yield ports
    for process in started:
        process.kill()
        process.wait()


def on_hosts(ports: List[int]) -> List[str]:
    """The overrides of two partitions on workers of this machine."""
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    return ["parallel=smp", "cluster=tf_hosts", f"cluster.hosts=[{hosts}]"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """Starts a real MLflow server on a port when it is asked to."""
    started: List[subprocess.Popen[bytes]] = []

    def start(port: int, store: str = f"sqlite:///{tmp_path}/server.db", proxy: bool = True) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
        command += ["--backend-store-uri", store]
        kept = str(tmp_path / "artifacts")
        own = ["--no-serve-artifacts", "--default-artifact-root", kept]
        command += ["--artifacts-destination", kept] if proxy else own
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with open(tmp_path / "server.log", "wb") as log:
            started.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            )
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        raise AssertionError((tmp_path / "server.log").read_text())

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def only_run(experiment: str = "default") -> Path:
    """The folder of the single run of an experiment."""
    runs = [path for path in Path("outputs", experiment).iterdir() if path.is_dir()]
    assert len(runs) == 1, runs
    return runs[0]


def train_lines(run: Path) -> List[Dict[str, Any]]:
    """The training lines of metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]
