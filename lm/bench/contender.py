"""Processes that take training steps when they are asked to: so several can be measured in turn, in one run."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Dict, Iterator, List


class Contender:
    """A process that takes steps when it is asked to, and idles otherwise."""

    def __init__(self, command: List[str]) -> None:
        self.command = command
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: object) -> float:
        """Its answer to a line. Raises ChildProcessError where it ended instead."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(line, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise ChildProcessError(f"{' '.join(self.command)}: ended with status {self.process.wait()}")
        return float(answer)


def our_command(overrides: List[str]) -> List[str]:
    """The command of this project's contender (lm.bench.stepping)."""
    return [sys.executable, "-m", "lm.bench.stepping", *overrides]


@contextlib.contextmanager
def started(commands: Dict[str, List[str]]) -> Iterator[Dict[str, Contender]]:
    """The contenders of some commands, by name, each killed at the end."""
    contenders = {name: Contender(command) for name, command in commands.items()}
    try:
        yield contenders
    finally:
        for contender in contenders.values():
            contender.process.kill()
            contender.process.wait()
