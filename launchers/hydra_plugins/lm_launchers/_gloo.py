"""horovodrun's engine for one host: python -m hydra_plugins.lm_launchers._gloo PROCESSES COMMAND...

The horovodrun command itself imports TensorFlow to ask whether Gloo was built, seven seconds before the first process
starts. This calls what it calls next, with the same output prefixes and the same end of all processes when one fails.
"""

from __future__ import annotations

import os
import sys
from typing import List

from horovod.runner.common.util.settings import Settings
from horovod.runner.gloo_run import gloo_run


def main(processes: int, command: List[str]) -> int:
    """Runs a command in several Horovod processes over the loopback interface. Returns 0, or 1 if one failed."""
    settings = Settings(num_proc=processes, hosts=f"localhost:{processes}", verbose=0)
    try:
        gloo_run(settings, ["lo"], dict(os.environ), "127.0.0.1", command)
    except RuntimeError as error:  # Horovod's word that a process ended with another status than 0
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
