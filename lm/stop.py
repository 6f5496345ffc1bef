"""A request to stop, by signal: noticed after the step that it falls in, so that the run is saved first."""

from __future__ import annotations

import signal
import time

SAME_REQUEST_SECONDS = 2.0  # a group of processes that is signalled as one gets it from the launcher too

class StopRequest:
    """SIGTERM or SIGINT. A second one, two seconds later or more, ends the process at once.

    number: of the signal that came, 0 before one came. A run that stops for it exits with 128 + number.
    """

    def __init__(self) -> None:
        self.number = 0
        self._came = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._notice)

    def _notice(self, number: int, _frame: object) -> None:
        if self.number and time.monotonic() - self._came > SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.number = self.number or number
        self._came = self._came or time.monotonic()
