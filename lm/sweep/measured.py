"""What a running job has measured so far, as its metrics.jsonl tells: for a bar, and for whoever ends it early."""

from __future__ import annotations

from typing import List, Optional, Tuple

from lm.run import RunFolder


class Measured:
    """What a running job's metrics.jsonl says of its objective, line by line."""

    def __init__(self, run: RunFolder, objective: str) -> None:
        self.run, self.objective = run, objective
        self.last: Optional[float] = None
        self._offset, self._file = 0, 0

    def new(self) -> List[Tuple[int, Optional[float]]]:
        """(step, objective or None) of each line since the last call."""
        if not self.run.metrics.exists():
            return []
        file = self.run.metrics.stat().st_ino
        if file != self._file:  # written anew at a resume
            self._file, self._offset = file, 0
        found = []
        for line, end in self.run.metric_lines(self._offset):
            self._offset = end
            value = line.get(self.objective)
            self.last = value if value is not None else self.last
            found.append((line["step"], value))
        return found
