"""smp.step: a function run on the microbatches of a batch; TensorFlow overlaps what does not depend on each other."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import tensorflow as tf
from tensorflow.python import pywrap_tfe

from lm.smdistributed_local import RuleBroken
from lm.smdistributed_local.modelparallel import state as process
from lm.smdistributed_local.modelparallel.model import finish_partitioning, inside_a_step
from lm.smdistributed_local.modelparallel.order import Order


class StepOutput:
    """What a step returned, for each microbatch. total: their sum, added up as they came."""

    def __init__(self, outputs: List[tf.Tensor], total: tf.Tensor) -> None:
        self._outputs, self._total = outputs, total

    @property
    def outputs(self) -> List[tf.Tensor]:
        return self._outputs

    def reduce_mean(self) -> tf.Tensor:
        """The mean over microbatches."""
        return self.reduce_sum() / tf.cast(len(self._outputs), self._outputs[0].dtype)

    def reduce_sum(self) -> tf.Tensor:
        """The sum over microbatches."""
        return tf.add_n(self._outputs)

    def concat(self) -> tf.Tensor:
        """The microbatches one after the other, along the batch."""
        return tf.concat(self._outputs, 0)

    def merge(self) -> tf.Tensor:
        """The same as concat, by the name that TensorFlow's library has."""
        return self.concat()

    def stack(self) -> tf.Tensor:
        """The microbatches along a new first axis."""
        return tf.stack(self._outputs)

    def accumulate(self, method: str = "variable", var: Optional[tf.Variable] = None) -> tf.Tensor:
        """The mean over microbatches, each added as it comes. Raises RuleBroken for another method."""
        if method not in ("variable", "add_n", "accumulate_n"):
            raise RuleBroken(f"accumulate(method={method!r})", "variable, add_n or accumulate_n")
        with tf.device(self._total.device):  # a gradient stays on its partition
            count = tf.cast(len(self._outputs), self._total.dtype)
            mean = self.reduce_mean() if method == "add_n" else self._total / count
            return mean if var is None else var.assign(mean)


def step(
    function: Optional[Callable[..., Any]] = None,
    *,
    non_split_inputs: Sequence[str] = (),
    input_split_axes: Optional[Dict[str, int]] = None,
    **tf_function_args: Any,
) -> Any:
    """Decorates a function of tensors that calls a DistributedModel; its results become StepOutputs.

    Tensor arguments, in lists and dictionaries too, are split into parameters.microbatches along axis 0, or the axis
    that input_split_axes names; those in non_split_inputs go to every microbatch whole.
    """
    for name in ("jit_compile", "experimental_compile"):
        if tf_function_args.get(name):
            raise RuleBroken(f"smp.step takes no {name}", "tf.config.optimizer.set_jit(True) compiles clusters instead")

    def decorate(function: Callable[..., Any]) -> Step:
        return Step(function, non_split_inputs, input_split_axes or {}, tf_function_args)

    return decorate if function is None else decorate(function)


class Step:
    """A decorated function."""

    def __init__(
        self, function: Callable[..., Any], whole: Sequence[str], axes: Dict[str, int], tf_function_args: Dict[str, Any]
    ) -> None:
        self.function, self.whole, self.axes = function, set(whole), axes
        self.signature = inspect.signature(function)
        self._compiled = tf.function(self._run, **{"autograph": False, **tf_function_args})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Splits, runs, collects. Raises RuleBroken under a tape, and for a batch that microbatches do not divide."""
        state = process.current()  # or it says that init() comes first
        if not pywrap_tfe.TFE_Py_TapeSetIsEmpty():
            raise RuleBroken("an smp.step is called under a tf.GradientTape", GRADIENTS)
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        if not state.stepped:
            self._record(arguments)
        run = self._run if tf.inside_function() else self._compiled
        collected, totals = run(arguments)
        total = tf.nest.pack_sequence_as(collected[0], totals)
        return tf.nest.map_structure(lambda total, *outputs: StepOutput(list(outputs), total), total, *collected)

    def _microbatches(self, arguments: Dict[str, Any]) -> List[Dict[str, Any]]:
        count = process.current().parameters.microbatches
        split = {name: self._split(name, value, count) for name, value in arguments.items()}
        return [{name: parts[number] for name, parts in split.items()} for number in range(count)]

    def _run(self, arguments: Dict[str, Any]) -> Tuple[List[Any], List[tf.Tensor]]:
        """The microbatches' results, one traced after the other, and their sums."""
        order, collected = Order(process.current().parameters), []
        for microbatch in self._microbatches(arguments):
            with tf.control_dependencies(order.before_next()):
                inputs = tf.nest.map_structure(lambda one: tf.identity(one) if tf.is_tensor(one) else one, microbatch)
            with _stepping(order):
                collected.append(self.function(**inputs))
            order.done(collected[-1])
        order.close()
        return collected, order.totals[-1]

    def _record(self, arguments: Dict[str, Any]) -> None:
        """The first pass, in a graph that is thrown away: it tells which layers there are, and what they cost."""
        specs = tf.nest.map_structure(
            lambda one: tf.TensorSpec(one.shape, one.dtype) if tf.is_tensor(one) else one,
            self._microbatches(arguments)[0],
        )
        with tf.init_scope(), _stepping(Order(process.current().parameters)):
            tf.function(lambda inputs: self.function(**inputs), autograph=False).get_concrete_function(specs)
        finish_partitioning()

    def _split(self, name: str, value: Any, count: int) -> List[Any]:
        """A value for each microbatch."""
        if name in self.whole or count == 1:
            return [value] * count
        axis = self.axes.get(name, 0)

        def slices(one: Any) -> List[Any]:
            if hasattr(one, "smp_slice"):
                return [one.smp_slice(count, number, axis) for number in range(count)]
            if not (tf.is_tensor(one) or hasattr(one, "shape")):
                return [one] * count
            one = tf.convert_to_tensor(one)
            if one.shape.rank == 0:
                return [one] * count
            size = one.shape[axis]
            if size is not None and size % count:
                raise RuleBroken(
                    f"{count} microbatches do not divide {name}, whose axis {axis} has {size}",
                    f"A batch of {-(-size // count) * count}, or {name} in non_split_inputs",
                )
            return tf.split(one, count, axis)

        flat = [slices(one) for one in tf.nest.flatten(value)]
        return [tf.nest.pack_sequence_as(value, [parts[number] for parts in flat]) for number in range(count)]


GRADIENTS = (
    "Inside the step gradients come from optimizer.get_gradients(loss, variables); "
    "allreduce, clipping and apply_gradients come after it"
)


@contextlib.contextmanager
def _stepping(order: Order) -> Iterator[None]:
    """Marks that a step is being traced, in which a tape is refused."""
    enter = tf.GradientTape.__enter__

    def refuse(_: Any) -> Any:
        raise RuleBroken("a tf.GradientTape is used inside an smp.step", GRADIENTS)

    tf.GradientTape.__enter__ = refuse
    try:
        with inside_a_step(order):
            yield
    finally:
        tf.GradientTape.__enter__ = enter
