"""A request to stop, by signal: noticed after the step that it falls in, so that the run is saved first."""

from __future__ import annotations

import signal


class StopRequest:
    """SIGTERM or SIGINT. A second one ends the process at once.

    number: of the signal that came, 0 before one came. A run that stops for it exits with 128 + number.
    """

    def __init__(self) -> None:
        self.number = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._notice)

    def _notice(self, number: int, _frame: object) -> None:
        if self.number:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.number = number
