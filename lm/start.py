"""Imports TensorFlow without two seconds of libraries that nobody here needs, and without their native chatter."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from typing import Iterator

# Keras 3 imports these where they are installed (MLflow brings them), for wrappers that nothing here uses.
UNUSED = ("sklearn", "matplotlib")
# What TensorFlow's libraries print before they can be told not to: information, and CUDA's absence on a CPU.
CHATTER = re.compile(r"^(I\d{4} |WARNING: All log messages before absl|To enable the following|E\d{4} .*cuInit)|^$")


def import_tensorflow() -> None:
    """Imports TensorFlow and looks for devices. Lines that are no chatter are printed as they came."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with _absent(), _filtered_stderr():
        import tensorflow as tf

        tf.config.list_physical_devices()


@contextlib.contextmanager
def _absent() -> Iterator[None]:
    """Optional libraries that have not been imported yet look as if they were not installed."""
    hidden = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def _filtered_stderr() -> Iterator[None]:
    """Holds back what is written to file descriptor 2, native code's included, and then prints it less the chatter."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            held.seek(0)
            sys.stderr.writelines(line for line in held if not CHATTER.match(line))
