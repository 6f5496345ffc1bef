"""Optimizers and learning-rate schedules as plain TensorFlow, the same in Keras 2.6 and Keras 3.

An optimizer's state is float32 or bfloat16 variables by name, so that a checkpoint is one flat table. All of it
runs inside the compiled step: a step whose gradients are not finite changes nothing but the loss scale.
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import tensorflow as tf

from lm import fused
from lm.plan import Plan
from lm.schema import Config

# Weights of this size move one after the other on a device. TensorFlow would begin all at once, and hold several copies
# of the model while it is at it.
LARGE_BYTES = 2**20
LOSS_SCALE_GROWTH_STEPS = 2000  # double the loss scale after this many finite steps (Micikevicius et al. 2018)


# a weight's new value and its new moments
Moved = Tuple[tf.Tensor, List[tf.Tensor]]


class Update(NamedTuple):
    """What an optimizer step did. grad_norm: of the unscaled global gradient, before clipping."""

    grad_norm: tf.Tensor
    learning_rate: tf.Tensor
    loss_scale: tf.Tensor
    skipped: tf.Tensor  # gradients were not finite, so the weights stayed


def learning_rate(schedule: Any, peak: float, steps: int, step: tf.Tensor) -> tf.Tensor:
    """The learning rate of a step, counted from zero: finite at each, warm-up 0 included.

    schedule: a constant, cosine or wsd section. steps: train.steps.
    """
    step = tf.cast(step, tf.float32)
    warmup = tf.minimum((step + 1.0) / max(schedule.warmup_steps, 1), 1.0)
    if schedule.name == "cosine":
        span = max(steps - 1 - schedule.warmup_steps, 1)
        progress = tf.clip_by_value((step - schedule.warmup_steps) / span, 0.0, 1.0)
        shape = 0.5 * (1.0 + tf.cos(math.pi * progress))
    elif schedule.name == "wsd":
        into_decay = step - (steps - 1 - schedule.decay_steps)
        shape = 1.0 - tf.clip_by_value(into_decay / max(schedule.decay_steps, 1), 0.0, 1.0)
        shape = shape if schedule.decay_steps else tf.ones_like(shape)
    else:
        return peak * warmup
    return peak * warmup * (schedule.final_fraction + (1.0 - schedule.final_fraction) * shape)


class Optimizer:
    """State and clipping that every optimizer shares; a subclass says how one weight moves.

    variables: the model's weights by name.
    """

    moments: Sequence[str] = ()  # of a weight, by name, in the weight's shape

    def __init__(self, config: Config, plan: Plan, variables: Dict[str, tf.Variable]) -> None:
        self.settings, self.schedule, self.plan = config.optimizer, config.schedule, plan
        self.variables = variables
        self.moments_dtype = tf.as_dtype(self.settings.moments_dtype)
        self.scales_loss = config.train.precision == "float16"
        scale = config.train.initial_loss_scale if self.scales_loss else 1.0
        self.step = tf.Variable(0, dtype=tf.int64, trainable=False, name="optimizer.step")
        self.loss_scale = tf.Variable(scale, dtype=tf.float32, trainable=False, name="optimizer.loss_scale")
        self.finite_steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="optimizer.finite_steps")
        self.state: Dict[str, tf.Variable] = {
            "optimizer.step": self.step,
            "optimizer.loss_scale": self.loss_scale,
            "optimizer.finite_steps": self.finite_steps,
        }
        for name, variable in variables.items():
            for moment, shape in self.moment_shapes(variable).items():
                full = f"{moment}.{name}"
                with tf.device(variable.device):  # a partition's weights and their moments lie together
                    zeros = tf.zeros(shape, self.moments_dtype)
                    self.state[full] = tf.Variable(zeros, trainable=False, name=full)
        self.move = fused.compiled(self._move)

    def moment_shapes(self, variable: tf.Variable) -> Dict[str, Sequence[int]]:
        """The moments that one weight needs, by name."""
        return {moment: variable.shape.as_list() for moment in self.moments}

    def rule(
        self, weight: tf.Tensor, gradient: tf.Tensor, moments: List[tf.Tensor], rate: tf.Tensor, step: tf.Tensor
    ) -> Moved:
        """The new value of one weight and its new moments, from those of before; weight decay is no part of it.

        step: counted from one, float32 as everything.
        """
        raise AssertionError("a subclass moves the weights")

    def _move(
        self,
        weight: tf.Tensor,
        gradient: tf.Tensor,
        moments: List[tf.Tensor],
        factor: tf.Tensor,
        rate: tf.Tensor,
        step: tf.Tensor,
        decay: float,
    ) -> Moved:
        """One weight's step. factor: what its gradient is multiplied by, so that the whole gradient is clipped."""
        read = [tf.cast(moment, tf.float32) for moment in moments]
        value, new = self.rule(weight, gradient * factor, read, rate, tf.cast(step, tf.float32))
        value = value - rate * decay * weight if decay else value
        return value, [tf.cast(moment, self.moments_dtype) for moment in new]

    def decays(self, name: str) -> bool:
        """Whether weight decay pulls on this weight: not if its name has a part that no_decay lists."""
        return not any(kind in part for part in name.split(".") for kind in self.settings.no_decay)

    def apply(self, gradients: List[tf.Tensor]) -> Update:
        """One step with gradients of loss_scale x loss, in the order of the variables: unscale, then clip."""
        unscaled = []
        for variable, gradient in zip(self.variables.values(), gradients):
            with tf.device(variable.device):
                gradient = tf.cast(gradient, tf.float32)
                unscaled.append(gradient / self.loss_scale if self.scales_loss else gradient)
        norm = tf.linalg.global_norm(unscaled)
        finite = tf.math.is_finite(norm)
        loss_scale = tf.identity(self.loss_scale)
        rate = learning_rate(self.schedule, self.plan.peak_learning_rate, self.plan.steps, self.step)
        factor = tf.constant(1.0)
        if self.settings.clip_norm is not None:
            factor = tf.minimum(1.0, self.settings.clip_norm / tf.maximum(norm, 1e-12))

        def move_all() -> tf.Tensor:
            step = self.step.assign_add(1)
            last_large: Dict[str, List[tf.Operation]] = {}  # by device
            for (name, variable), gradient in zip(self.variables.items(), unscaled):
                decay = self.settings.weight_decay if self.decays(name) else 0.0
                large = variable.shape.num_elements() * 4 >= LARGE_BYTES
                before = last_large.get(variable.device, []) if large else []
                moments = [self.state[f"{moment}.{name}"] for moment in self.moment_shapes(variable)]
                with tf.device(variable.device), tf.control_dependencies(before):
                    read = [tf.convert_to_tensor(moment) for moment in moments]
                    weight = tf.convert_to_tensor(variable)
                    value, new = self.move(weight, gradient, read, factor, rate, tf.identity(step), decay)
                    for moment, of_moment in zip(moments, new):
                        moment.assign(of_moment, read_value=False)
                    assigned = variable.assign(value, read_value=False)
                if large:
                    last_large[variable.device] = [assigned]
            if self.scales_loss:
                self.finite_steps.assign_add(1)
                grow = tf.equal(self.finite_steps % LOSS_SCALE_GROWTH_STEPS, 0)
                self.loss_scale.assign(tf.where(grow, self.loss_scale * 2.0, self.loss_scale))
            return tf.constant(False)

        def skip() -> tf.Tensor:
            if self.scales_loss:
                self.finite_steps.assign(0)
                self.loss_scale.assign(tf.maximum(self.loss_scale / 2.0, 1.0))
            return tf.constant(True)

        return Update(norm, rate, loss_scale, tf.cond(finite, move_all, skip))


class AdamW(Optimizer):
    """Loshchilov and Hutter 2019, algorithm 2, with the bias corrections of Kingma and Ba 2015."""

    moments = ("first_moment", "second_moment")

    def rule(
        self, weight: tf.Tensor, gradient: tf.Tensor, moments: List[tf.Tensor], rate: tf.Tensor, step: tf.Tensor
    ) -> Moved:
        settings, (first, second) = self.settings, moments
        first = settings.beta1 * first + (1.0 - settings.beta1) * gradient
        second = settings.beta2 * second + (1.0 - settings.beta2) * tf.square(gradient)
        first_corrected = first / (1.0 - tf.pow(settings.beta1, step))
        second_corrected = second / (1.0 - tf.pow(settings.beta2, step))
        return weight - rate * first_corrected / (tf.sqrt(second_corrected) + settings.epsilon), [first, second]


class Adafactor(Optimizer):
    """Shazeer and Stern 2018, algorithms 4 and 5: a matrix's second moment kept as its rows' and columns' means."""

    def moment_shapes(self, variable: tf.Variable) -> Dict[str, Sequence[int]]:
        if len(variable.shape) == 2:
            return {"row_moment": [variable.shape[0]], "column_moment": [variable.shape[1]]}
        return {"second_moment": variable.shape.as_list()}

    def rule(
        self, weight: tf.Tensor, gradient: tf.Tensor, moments: List[tf.Tensor], rate: tf.Tensor, step: tf.Tensor
    ) -> Moved:
        settings = self.settings
        decay = 1.0 - tf.pow(step, settings.decay_exponent)
        squared = tf.square(gradient) + settings.epsilon
        fresh = [tf.reduce_mean(squared, 1), tf.reduce_mean(squared, 0)] if len(moments) == 2 else [squared]
        moments = [decay * moment + (1.0 - decay) * value for moment, value in zip(moments, fresh)]
        second = moments[0]
        if len(moments) == 2:
            row, column = moments
            second = row[:, None] * column[None, :] / tf.reduce_mean(row)
        update = gradient * tf.math.rsqrt(second)
        update /= tf.maximum(1.0, root_mean_square(update) / settings.clip_threshold)
        return weight - rate * tf.maximum(settings.minimum_rms, root_mean_square(weight)) * update, moments


class SGD(Optimizer):
    """Heavy-ball momentum (Polyak 1964): the velocity sums gradients, the rate scales it."""

    moments = ("velocity",)

    def rule(
        self, weight: tf.Tensor, gradient: tf.Tensor, moments: List[tf.Tensor], rate: tf.Tensor, step: tf.Tensor
    ) -> Moved:
        velocity = self.settings.momentum * moments[0] + gradient
        return weight - rate * velocity, [velocity]


def root_mean_square(x: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tf.reduce_mean(tf.square(x)))


OPTIMIZERS = {"adamw": AdamW, "adafactor": Adafactor, "sgd": SGD}


def make_optimizer(config: Config, plan: Plan, variables: Dict[str, tf.Variable]) -> Optimizer:
    """The configured optimizer over a model's named weights, its state at zero."""
    return OPTIMIZERS[config.optimizer.name](config, plan, variables)
