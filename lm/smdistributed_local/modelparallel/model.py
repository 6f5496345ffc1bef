"""DistributedModel: a Keras model whose layers run on the devices of their partitions, called inside a step alone."""

from __future__ import annotations

import contextlib
import contextvars
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

import tensorflow as tf

from lm.smdistributed_local import RuleBroken
from lm.smdistributed_local.modelparallel import state as process
from lm.smdistributed_local.modelparallel.order import Order
from lm.smdistributed_local.modelparallel.partitioner import Unit, assign, describe
from lm.smdistributed_local.modelparallel.placement import move, resources

_by_hand: contextvars.ContextVar[Optional[int]] = contextvars.ContextVar("smp.partition", default=None)
_step: contextvars.ContextVar[Optional[Order]] = contextvars.ContextVar("smp.step", default=None)
_hooks: List[Callable[[], None]] = []


class DistributedModel(tf.keras.Model):
    """A model to subclass. A layer lies on one partition; layers that share a variable lie on the same."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        order = _step.get()
        if order is None:
            raise RuleBroken(
                "a DistributedModel is called outside of a function decorated by smp.step",
                "Call it in one, evaluation and sampling included",
            )
        state = process.current()
        partition_of = state.partition_of.get(id(self))
        if partition_of is None:
            with _recording() as units:
                result = super().__call__(*args, **kwargs)
            partition_of = state.partition_of[id(self)] = assign(units, state.parameters)
            describe(units, partition_of, state.parameters)
            for unit in units:
                device = state.devices[partition_of[unit.layer]]
                state.device_of.update({key: (one, device) for key, one in unit.variables.items()})
            return result
        with _placing(partition_of, state.devices):
            return tf.nest.map_structure(order.forward_done, super().__call__(*args, **kwargs))

    def save_model(self, save_path: str = "/opt/ml/model") -> None:
        """Writes one SavedModel of the whole. SageMaker's serving wants a number as the last folder."""
        with inside_a_step(Order(process.current().parameters)):
            tf.saved_model.save(self, save_path)


@contextlib.contextmanager
def inside_a_step(order: Order) -> Iterator[None]:
    """Allows the calls of a DistributedModel, which tell the order of their passes."""
    token = _step.set(order)
    try:
        yield
    finally:
        _step.reset(token)


@contextlib.contextmanager
def partition(index: int) -> Iterator[None]:
    """Places the layers that are called within on a partition; the innermost wins. Nothing under auto_partition.

    Raises RuleBroken for a partition that there is not.
    """
    parameters = process.current().parameters
    if not 0 <= index < parameters.partitions:
        raise RuleBroken(f"smp.partition({index}) of {parameters.partitions} partitions", "Count from 0")
    token = _by_hand.set(index)
    try:
        yield
    finally:
        _by_hand.reset(token)


def register_post_partition_hook(hook: Callable[[], None]) -> Callable[[], None]:
    """Has a function called once, eagerly, when the model has been partitioned and before its first forward pass."""
    _hooks.append(hook)
    return hook


def finish_partitioning() -> None:
    """Moves the variables to their partitions and calls the hooks, after the first pass has recorded the model."""
    state = process.current()
    state.stepped = True
    with tf.init_scope():
        for variable, device in state.device_of.values():
            if variable.device != device:
                move(variable, device)
        while _hooks:
            _hooks.pop(0)()


class CheckpointManager:
    """Checkpoints of a model that is partitioned. Here one process holds it whole, so one checkpoint is all of it."""

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str = "/opt/ml/checkpoints",
        max_to_keep: Optional[int] = None,
        checkpoint_name: str = "ckpt",
    ) -> None:
        folder = Path(directory) / f"dp_{process.dp_rank()}"
        self._manager = tf.train.CheckpointManager(
            checkpoint, str(folder), max_to_keep, checkpoint_name=checkpoint_name
        )

    def save(self) -> str:
        return self._manager.save()

    def restore(self) -> Optional[str]:
        """Restores the newest. Raises RuleBroken before the first step, when there is nothing to restore into."""
        if not process.current().stepped:
            raise RuleBroken(
                "a checkpoint is restored before the first smp.step has partitioned the model",
                "Restore after the first step, or in a function under smp.register_post_partition_hook",
            )
        return self._manager.restore_or_initialize()


@contextlib.contextmanager
def _intercepted(around: Callable[..., Any]) -> Iterator[None]:
    """Has `around` called in place of every outermost layer of a model that is not itself a model."""
    layer_class = tf.keras.layers.Layer
    original = layer_class.__call__
    inside = False

    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or isinstance(layer, tf.keras.Model):
            return original(layer, *args, **kwargs)
        inside = True
        try:
            return around(layer, lambda: original(layer, *args, **kwargs))
        finally:
            inside = False

    layer_class.__call__ = call
    try:
        yield
    finally:
        layer_class.__call__ = original


@contextlib.contextmanager
def _recording() -> Iterator[List[Unit]]:
    """Collects the layers that a call goes through, in order, with what each costs."""
    units: Dict[int, Unit] = {}

    def record(layer: Any, call: Callable[[], Any]) -> Any:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        result = call()
        operations = graph.get_operations()[before:]
        unit = units.setdefault(id(layer), Unit(layer.name, id(layer), by_hand=_by_hand.get()))
        unit.count(operations, resources(layer))
        return result

    with _intercepted(record):
        ordered: List[Unit] = []
        yield ordered
        ordered += units.values()


@contextlib.contextmanager
def _placing(partition_of: Dict[int, int], devices: List[str]) -> Iterator[None]:
    def place(layer: Any, call: Callable[[], Any]) -> Any:
        with tf.device(devices[partition_of.get(id(layer), 0)]):
            return call()

    with _intercepted(place):
        yield
