"""horovodrun's engine for one host: python -m hydra_plugins.lm_launchers._gloo PROCESSES COMMAND...

The horovodrun command itself imports TensorFlow to ask whether Gloo was built, seven seconds before the first process
starts. This calls what it calls next, with the same output prefixes and the same end of all processes when one fails.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import List

from horovod.runner import gloo_run
from horovod.runner.common.util.settings import Settings


def main(processes: int, command: List[str]) -> int:
    """Runs a command in several Horovod processes over the loopback interface. Returns 0, or 1 if one failed."""
    # Horovod answers a signal by killing its processes; they are to save first, and the launcher sees to the rest.
    gloo_run.register_shutdown_event = threading.Event
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    settings = Settings(num_proc=processes, hosts=f"localhost:{processes}", verbose=0)
    try:
        gloo_run.gloo_run(settings, ["lo"], dict(os.environ), "127.0.0.1", command)
    except RuntimeError as error:  # Horovod's word that a process ended with another status than 0
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
