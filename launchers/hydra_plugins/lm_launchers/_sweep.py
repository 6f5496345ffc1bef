"""A sweep at work: its jobs, so many at once, each in the ledger before it starts and after it ends."""

from __future__ import annotations

import dataclasses
import hashlib
import signal
import sys
import traceback
from collections import Counter, deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Callable, Deque, Dict, List, NamedTuple, Optional, Protocol, Sequence, Set

from lm.failure import Failure, classify, failure_of
from lm.job import FAILED
from lm.refusal import ConfigError, Problem
from lm.report import SweepDisplay, make_console
from lm.run import RunFolder, run_folder, run_name, write_whole
from lm.schema import Config
from lm.sweep.ledger import Job, Ledger
from lm.sweep.measured import Measured
from lm.sweep.table import in_words, sweep_table, write_page
from lm.sweep.tracking import SweepTracker

_at_work: Dict[Path, "Sweep"] = {}  # of this process: Hydra hands a sweep over in batches, and says nothing of its end
LOOK_SECONDS = 0.5  # between two looks at what the running jobs have measured
Judge = Callable[[int, int, float], bool]  # number in the batch, step, objective -> whether to end that job


class Point(NamedTuple):
    """A job as Hydra asks for it. config: None where it is refused.

    overrides: those that the sweep chose.
    """

    overrides: List[str]
    config: Optional[Config]
    refusal: ConfigError = ConfigError([])

    @property
    def shown(self) -> str:
        return " ".join(self.overrides)

    @property
    def refused_key(self) -> str:
        return f"refused-{hashlib.sha256(self.shown.encode()).hexdigest()[:8]}"


class Outcome(NamedTuple):
    """How a job's work ended. status: None where it goes on without us. failure: where it is known."""

    status: Optional[int]
    failure: Optional[Failure] = None


class Work(Protocol):
    """Where jobs run: this machine, or SageMaker."""

    at_once: int

    def run(self, job: Job, config: Config, log: Path, slot: int) -> Outcome:
        """Runs a job to its end; in a thread. slot: its place among at_once. What it says goes to the log."""

    def end_early(self, job: Job, config: Config) -> None:
        """Asks a running job to save and stop."""

    def interrupted(self, number: int) -> None:
        """This process was asked to end by a signal."""


class Sweep:
    """One command's work on a sweep. Hydra hands its jobs over in one batch or several."""

    def __init__(self, ledger: Ledger, config: Config, tracked: bool) -> None:
        self.ledger, self.settings = ledger, config.sweep
        self.console = make_console()
        self.tracker: Optional[SweepTracker] = None
        self.tries: Counter[str] = Counter()  # of this command
        self.early: List[str] = []  # how the first jobs of this command failed
        self.elsewhere = 0  # jobs that go on without us
        self.halted = ""
        self.signal = 0
        left = ledger.begin(sys.argv[1:], config.sweep.objective)
        self.succeeded = ledger.count("done", "pruned") > 0
        before = f": {in_words(ledger)}" if ledger.jobs else ""
        again = f"; {left} were interrupted and go on" if left else ""
        self.console.print(f"sweep {ledger.folder}{before}{again}", markup=False)
        if tracked and config.tracking.uri is not None:
            self.tracker = SweepTracker(config.tracking.uri, config.run.experiment, ledger)
            self.tracker.start()

    def run(self, points: Sequence[Point], work: Work, judge: Optional[Judge] = None) -> List[Job]:
        """Runs a batch. Returns each point's job. Ends the process after a signal."""
        jobs = [self._enter(point) for point in points]
        queue: Deque[int] = deque()
        for at, (job, point) in enumerate(zip(jobs, points)):
            if job.folder and job not in jobs[:at] and point.config is not None and self._is_due(job, point.config):
                queue.append(at)
        earlier = {number: signal.signal(number, self._on_signal(work)) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._work_off(queue, jobs, points, work, judge)
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)
        if self.signal:
            self.close()
            sys.exit(128 + self.signal)
        return jobs

    def close(self) -> int:
        """The closing table, the page, MLflow's last word. Returns the exit status: 1 where a job did not finish."""
        unfinished = self.ledger.count("failed", "pending") - self.elsewhere
        page = write_page(self.ledger)
        if self.tracker is not None:
            status = "stopped" if self.signal else "failed" if unfinished else "finished"
            self.tracker.close(None if self.elsewhere else status)
        self.console.print(sweep_table(self.ledger))
        if self.halted:
            self.console.print(self.halted, markup=False)
        for job in self.ledger.all():
            if job.status == "failed":
                print(f"job {job.number} failed ({job.kind}): {self.ledger.log_of(job)}", file=sys.stderr)
        if unfinished:
            total, folder = len(self.ledger.jobs), self.ledger.folder
            print(f"{unfinished} of {total} jobs did not finish; lm sweep resume {folder}", file=sys.stderr)
        if self.elsewhere:
            self.console.print(f"{self.elsewhere} jobs go on: lm jobs lists them, the same command brings them home")
        if page is not None:
            self.console.print(f"{page}: the runs side by side", markup=False)
        return FAILED if unfinished else 0

    # --- one batch -----------------------------------------------------------------------------------

    def _enter(self, point: Point) -> Job:
        """The point's job in the ledger; a refused one has failed with that."""
        if point.config is None:
            return self._refuse(point, point.refusal)
        name = run_name(point.config)
        known = self.ledger.jobs.get(name)
        if known is not None and known.overrides != point.overrides:
            text = f"{point.shown} learns just what job {known.number} does ({known.shown}), in the same run folder"
            fix = "a run.name for each, say run.name='b${train.microbatch_sequences}'"
            return self._refuse(point, ConfigError([Problem(("run.name",), text, fix)]))
        self.ledger.drop(point.refused_key)  # by a command that came before
        return self.ledger.add(name, point.overrides, str(run_folder(point.config).path))

    def _refuse(self, point: Point, refusal: ConfigError) -> Job:
        job = self.ledger.add(point.refused_key, point.overrides, None)
        log = self.ledger.log_of(job)
        log.parent.mkdir(exist_ok=True)
        write_whole(log, f"{refusal}\n")
        self.ledger.end(job, "failed", failure_of(str(refusal), ""))
        print(f"job {job.number}: {job.shown}\n{refusal}", file=sys.stderr)
        return job

    def _is_due(self, job: Job, config: Config) -> bool:
        """Whether there is something to do: not where it is done, or failed in a way that is not tried again."""
        if config.run.resume == "never":
            return True
        if job.status in ("done", "pruned") and run_folder(config).summary.exists():
            self.console.print(f"job {job.number} is {job.status} already: {job.shown}", markup=False)
            return False
        if job.status == "failed" and job.kind != "configuration" and not self.settings.retry.get(job.kind or "", 0):
            again = f"sweep.retry.{job.kind}=1 tries it again"
            self.console.print(f"job {job.number} failed before ({job.kind}), {again}: {job.shown}", markup=False)
            return False
        return True

    def _work_off(
        self, queue: Deque[int], jobs: List[Job], points: Sequence[Point], work: Work, judge: Optional[Judge]
    ) -> None:
        running: Dict[Future[Outcome], int] = {}
        slots: Dict[int, int] = {}
        pruned: Set[str] = set()
        watched: Dict[int, Measured] = {}
        with ThreadPoolExecutor(work.at_once) as pool, SweepDisplay(self.console, len(jobs)) as display:
            while running or (queue and not self.signal and not self.halted):
                while queue and len(running) < work.at_once and not self.signal and not self.halted:
                    at = queue.popleft()
                    job, config = jobs[at], points[at].config
                    assert config is not None
                    slots[at] = next(slot for slot in range(work.at_once) if slot not in slots.values())
                    if self.tries[job.key]:  # it goes on, and is no new beginning
                        config = dataclasses.replace(config, run=dataclasses.replace(config.run, resume="auto"))
                    self.tries[job.key] += 1
                    self.ledger.start(job)
                    self.console.print(f"job {job.number} starts: {job.shown}", markup=False)
                    watched[at] = Measured(RunFolder(Path(job.folder or "")), self.settings.objective)
                    log = self.ledger.log_of(job)
                    running[pool.submit(_guarded, work, job, config, log, slots[at])] = at
                ended, _ = wait(running, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
                for at in running.values():
                    job, config = jobs[at], points[at].config
                    assert config is not None
                    for step, value in watched[at].new():
                        display.step(job.number, job.shown, step, config.train.steps)
                        if value is None or judge is None or job.key in pruned or step >= config.train.steps:
                            continue
                        if self._ends_early(judge, at, step, value, work, job, config):
                            pruned.add(job.key)
                for future in ended:
                    at = running.pop(future)
                    del slots[at]
                    self._ended(jobs[at], future.result(), jobs[at].key in pruned, watched[at])
                    display.ended(jobs[at].number)
                    if self._is_to_be_retried(jobs[at]):
                        queue.append(at)

    def _ends_early(
        self, judge: Judge, at: int, step: int, value: float, work: Work, job: Job, config: Config
    ) -> bool:
        """Whether the job was asked to end. What goes wrong with the asking costs time and no result, so it is said."""
        try:
            if judge(at, step, value):
                work.end_early(job, config)
                return True
        except Exception as error:
            print(f"job {job.number} goes on: {type(error).__name__}: {error}", file=sys.stderr)
        return False

    def _ended(self, job: Job, outcome: Outcome, pruned: bool, measured: Measured) -> None:
        """Writes a job's end into the ledger and says it."""
        status, summary = outcome.status, measured.run.read_summary()
        value = summary.get(self.settings.objective)
        if status is None:
            self.elsewhere += 1
            self.ledger.end(job, "pending", value=value)
        elif status == 0:
            self.ledger.end(job, "done", value=value)
        elif status > 128 and pruned:
            self.ledger.end(job, "pruned", value=measured.last)
        elif status > 128 and (self.signal or outcome.failure is None):  # it was asked to stop, and has saved
            self.ledger.end(job, "pending")
        else:
            self.ledger.end(job, "failed", outcome.failure, value=None)
        self.succeeded |= job.status in ("done", "pruned")
        reached = f", {self.settings.objective} {job.value:.5g}" if job.value is not None else ""
        why = f" ({job.kind}): {job.reason}" if job.status == "failed" else ""
        self.console.print(f"job {job.number} is {job.status}{reached}{why}", markup=False)
        if job.status == "failed" and not self.succeeded and not self._is_to_be_retried(job):
            self.early.append(f"{job.kind}: {job.reason}")
            alike = self.settings.alike
            if len(self.early) == alike and len(set(self.early)) == 1:
                self.halted = f"the first {alike} jobs failed alike, so no other was begun (sweep.alike={alike})"
        if self.tracker is not None:
            self.tracker.wake()

    def _is_to_be_retried(self, job: Job) -> bool:
        allowed = self.settings.retry.get(job.kind or "", 0) if job.status == "failed" else 0
        return self.tries[job.key] <= allowed and not self.signal and not self.halted

    def _on_signal(self, work: Work) -> Callable[[int, object], None]:
        def pass_on(number: int, _frame: object) -> None:
            if not self.signal:
                self.signal = number
                work.interrupted(number)

        return pass_on


def _guarded(work: Work, job: Job, config: Config, log: Path, slot: int) -> Outcome:
    """A job's work; what goes wrong with starting or following it is this job's failure, and not the sweep's."""
    log.parent.mkdir(exist_ok=True)
    try:
        return work.run(job, config, log, slot)
    except Exception:
        told = traceback.format_exc()
        with open(log, "a") as file:
            file.write(told)
        return Outcome(FAILED, classify("", told))


def sweep_in(folder: Path, config: Config, tracked: bool = True) -> Sweep:
    """This process's work on the sweep of a folder, begun where it is not. Raises RunFailed where another has it."""
    if folder not in _at_work:
        _at_work[folder] = Sweep(Ledger(folder), config, tracked)
    return _at_work[folder]


def close() -> int:
    """Ends this process's sweeps, of which there is one or none. Returns the exit status."""
    statuses = [sweep.close() for sweep in _at_work.values()]
    _at_work.clear()
    return max(statuses, default=0)
