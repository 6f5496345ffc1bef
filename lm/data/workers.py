"""Runs the tasks of preparing: here, or on Dask; and shows how far they are."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import CancelledError
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Dict, List, Union

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from lm.data.encode import Progress, Task, encode_part
from lm.data.files import InputError
from lm.data.shards import PARTS, Part
from lm.refusal import ConfigError, Problem
from lm.run import RunFailed
from lm.schema import Prepare

TOPIC = "lm-prepare"
RETRIES = 2  # of a task that failed for another reason than its input: a network, say
ANSWER_SECONDS = 10.0  # to wait for a scheduler
WORKERS_SECONDS = 30.0  # to wait for the first worker
LINE_SECONDS = 30.0  # between lines of progress where there is no terminal


def cores() -> int:
    return len(os.sched_getaffinity(0))


def run_tasks(folder: Path, tasks: List[Task], prepare: Prepare, display: Display) -> List[Part]:
    """Every part of a dataset's folder, in the order of the tasks.

    Raises InputError of the first task that fails for its input, ConfigError where the scheduler cannot be used, and
    RunFailed for a full disk, a lost network, or a task whose workers are lost again and again.
    """
    try:
        if prepare.dask_address is None and (len(tasks) == 1 or cores() == 1 or prepare.workers == 1):
            threads = prepare.workers or cores()
            return [encode_part(replace(task, threads=threads), display.update) for task in tasks]
        return _on_dask(folder, tasks, prepare, display)
    except OSError as error:  # a full disk, a network that stays away
        raise RunFailed(f"{folder} is not finished, and goes on from here when started again: {error}") from error


def _on_dask(folder: Path, tasks: List[Task], prepare: Prepare, display: Display) -> List[Part]:
    from distributed import KilledWorker, LocalCluster, as_completed

    workers = min(prepare.workers or cores(), len(tasks))
    threads = max(1, (prepare.workers or cores()) // workers) if prepare.dask_address is None else 1
    cluster = None
    if prepare.dask_address is None:
        cluster = LocalCluster(
            n_workers=workers, threads_per_worker=1, dashboard_address=None, memory_limit=0, silence_logs=50
        )
    client = _connect(cluster, prepare, folder)
    try:
        client.subscribe_topic(TOPIC, lambda event: display.update(Progress(**event[1]["progress"])))
        sent = [replace(task, folder=folder.resolve(), threads=threads) for task in tasks]
        futures = {
            client.submit(encode_task, task, pure=False, retries=RETRIES): place for place, task in enumerate(sent)
        }
        parts: Dict[int, Part] = {}
        for future in as_completed(list(futures)):
            try:
                result = future.result()
            except (KilledWorker, CancelledError) as error:
                name = tasks[futures[future]].name
                text = f"part {name} was lost with Dask's workers or scheduler ({type(error).__name__}: {error})"
                raise RunFailed(f"{text}; {folder} goes on from here when started again") from None
            if isinstance(result, InputError):
                raise result
            parts[futures[future]] = result
        return [parts[place] for place in range(len(tasks))]
    finally:
        client.close()
        if cluster is not None:
            cluster.close()


def check_scheduler(prepare: Prepare, folder: Path) -> None:
    """Refuses a scheduler that does not answer, before anything slow. Raises ConfigError."""
    if prepare.dask_address is not None:
        _connect(None, prepare, folder).close()


def _connect(cluster: Any, prepare: Prepare, folder: Path) -> Any:
    """A client of the local cluster, or of the scheduler that the settings name, whose workers see the folder."""
    from distributed import Client
    from distributed.comm.core import CommClosedError

    key, address = ("prepare.dask_address",), prepare.dask_address
    try:
        client = Client(cluster or address, timeout=ANSWER_SECONDS)
    except (CommClosedError, OSError, ValueError) as error:
        text = f"prepare.dask_address={address} does not answer: {error}"
        raise ConfigError([Problem(key, text, "prepare.dask_address=tcp://HOST:PORT of a scheduler")]) from None
    if cluster is not None:
        return client
    try:
        client.wait_for_workers(1, timeout=WORKERS_SECONDS)
    except TimeoutError:
        text = f"the scheduler at {address} has no worker"
        raise ConfigError([Problem(key, text, f"dask worker {address} --nthreads 1, on each host")]) from None
    blind = [worker for worker, sees in client.run(_sees, str(folder.resolve())).items() if not sees]
    if blind:
        text = f"{folder.resolve()} is not to be seen from the worker {blind[0]} ({len(blind)} such)"
        raise ConfigError([Problem(("dataset.output", *key), text, "dataset.output=A_FOLDER that all hosts share")])
    return client


def _sees(folder: str) -> bool:
    return Path(folder, PARTS).is_dir()


def encode_task(task: Task) -> Union[Part, InputError]:
    """`encode_part` on a Dask worker; its progress goes to the client as events."""
    from distributed import get_worker

    worker = get_worker()

    def report(progress: Progress) -> None:
        worker.log_event(TOPIC, {"progress": asdict(progress)})

    try:
        return encode_part(task, report)
    except InputError as error:  # as a result: to try it again would only fail again
        return error


class Display:
    """The progress of all tasks: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console, total_bytes: int) -> None:
        self.console, self.total_bytes = console, total_bytes
        self._tasks: Dict[str, Progress] = {}
        self._found_bytes = 0  # of text in parts that were done before
        self._begun = self._said = time.monotonic()
        columns = [
            TextColumn("[bold]encoding"),
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        ]
        self._bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._row = self._bar.add_task("encode", total=total_bytes, numbers="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def update(self, progress: Progress) -> None:
        """Takes what one task tells of itself."""
        if progress.found:
            self._found_bytes += progress.text_bytes
        self._tasks[progress.part] = progress
        tasks = list(self._tasks.values())
        read = sum(task.read_bytes for task in tasks)
        self._bar.update(self._row, completed=read, numbers=self._numbers(tasks))
        now = time.monotonic()
        if self._bar.disable and now - self._said > LINE_SECONDS:
            self._said = now
            left = (now - self._begun) * (self.total_bytes - read) / max(read, 1)
            self.console.print(f"  {read / max(self.total_bytes, 1):.0%}  {self._numbers(tasks)}  {left:,.0f} s left")

    def _numbers(self, tasks: List[Progress]) -> str:
        text = sum(task.text_bytes for task in tasks) - self._found_bytes
        rejected = sum((Counter(task.rejected) for task in tasks), Counter[str]())
        documents = sum(task.documents for task in tasks)
        reasons = "".join(f", {count:,} {reason}" for reason, count in rejected.items())
        rate = text / 1e6 / max(time.monotonic() - self._begun, 1e-9)
        return f"{rate:,.1f} MB/s of text, {documents:,} documents{reasons}"
