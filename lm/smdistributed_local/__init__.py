"""SageMaker's two distributed libraries for TensorFlow, their public interfaces on open parts, to run anywhere.

Written from the public documentation alone (docs/parallelism.md names the pages). Inside SageMaker's training images
the real libraries are used; here these are, so that the same adapter runs on a laptop and is tested there. Every
documented rule is enforced by an error that names it: the real libraries may hang or give wrong numbers instead.
"""

from __future__ import annotations

from typing import Set


class RuleBroken(RuntimeError):
    """A documented rule of a library was broken; the message names the rule and what to do."""

    def __init__(self, rule: str, instead: str) -> None:
        super().__init__(f"{rule}. {instead}")


_claimed: Set[str] = set()


def claim(library: str) -> None:
    """Takes a library into use. Raises RuleBroken for a second time, and where the other one is in use."""
    if library in _claimed:
        raise RuleBroken(f"{library}.init() was called twice", "Call it once, first of all")
    for other in _claimed:
        rule = f"{library} and {other} in one run: SageMaker's libraries cannot be used together"
        raise RuleBroken(rule, "Choose parallel=sdp, or parallel=smp with parallel.horovod=true for replicas")
    _claimed.add(library)


def release(library: str) -> None:
    """Gives a library back, as shutdown() does."""
    _claimed.discard(library)


def must_be_claimed(library: str) -> None:
    """Raises RuleBroken where a library is used before its init()."""
    if library not in _claimed:
        raise RuleBroken(f"{library} is used before init()", "Call init() first of all")
