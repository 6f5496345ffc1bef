"""One process of a launched job: python -m lm.worker RUN/config.yaml. It reads a resolved configuration and trains."""

from __future__ import annotations

import sys
from pathlib import Path

from lm.config import load_file
from lm.job import status_of, train_here
from lm.plan import make_plan


def main(path: str) -> int:
    """Trains with the configuration in a file. Returns the exit status."""

    def work() -> int:
        config = load_file(Path(path))
        return train_here(config, make_plan(config))

    return status_of(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
