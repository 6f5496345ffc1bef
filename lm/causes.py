"""Which of several processes' last words tell why a job ended: the first traceback that is no consequence."""

from __future__ import annotations

import re
from typing import Dict, List

CAUSE_LINES = 80  # of a traceback that are shown again
# What a rank says when another one has gone: TensorFlow's error around Horovod's, or Gloo's own.
CONSEQUENCES = ("HorovodInternalError", "Horovod has been shut down", "Connection closed by peer", "Connection reset")
BEGINNINGS = ("Traceback (most recent call last)", "failed: ", "refused: ")
ENDED = re.compile(r"Process \d+ exit with status code")


class Causes:
    """What the processes said of their end: tracebacks by rank in the order in which they began, and refusals."""

    def __init__(self) -> None:
        self.blocks: List[List[str]] = []
        self.refused = False
        self._open: Dict[str, List[str]] = {}
        self._ended: List[str] = []

    def hear(self, rank: str, text: str) -> None:
        """A line of a rank; "" where there is one process."""
        if text.startswith(BEGINNINGS):
            self.refused |= text.startswith("refused: ")
            self._open[rank] = [f"[{rank}] {text}" if rank else text]
            self.blocks.append(self._open[rank])
        elif rank in self._open and len(self._open[rank]) < CAUSE_LINES:
            self._open[rank].append(text)
        elif ENDED.match(text):
            self._ended.append(text)

    def first(self) -> str:
        """The first traceback that is no consequence of another rank's end; else the first process that ended."""
        real = ("\n".join(block) for block in self.blocks)
        causes = [text for text in real if not any(sign in text for sign in CONSEQUENCES)]
        return next(iter([*causes, *self._ended]), "")
