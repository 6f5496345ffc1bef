"""A training step to be measured, by itself: in this process, or in one of its own that answers what it is asked.

    python -m lm.bench.stepping OVERRIDE...

Each line of standard input is a number of steps to take, answered with their seconds; `products`, answered with the
FLOP/s of the model's own matrix products; or `memory`, answered with the most bytes that a device's allocator had in
use.
"""

from __future__ import annotations

import sys
import time
from typing import Callable, List, Tuple

from lm.compose import compose
from lm.plan import Plan, make_plan
from lm.schema import Config
from lm.shapes import weight_shapes
from lm.start import import_tensorflow

PRODUCTS_ROUNDS = 5


def prepare(overrides: List[str]) -> Tuple[Config, Plan, Callable[[int], float]]:
    """A model and its optimizer on a batch of random text. The last of the three takes steps and says how long."""
    import tensorflow as tf

    from lm import strategies
    from lm.model import Decoder, named_variables
    from lm.optimizer import make_optimizer

    config = compose([*overrides, "schedule.warmup_steps=1"])
    plan = make_plan(config)
    strategy = strategies.load(config)
    vocabulary = config.dataset.vocabulary_size
    model = strategy.model(lambda: Decoder(config.model, vocabulary, 0, config.train.precision))
    step = strategy.train_step(model, make_optimizer(config, plan, named_variables(model)), plan)
    shape = [plan.global_batch_sequences // plan.replicas, plan.context_tokens + 1]
    tokens_BS = tf.random.uniform(shape, 0, vocabulary, tf.int32)

    def take(steps: int) -> float:
        began = time.perf_counter()
        for number in range(steps):
            step(tokens_BS, tf.constant([0, number], tf.int64)).loss.numpy()
        return time.perf_counter() - began

    return config, plan, take


def products_flops(config: Config, plan: Plan) -> float:
    """FLOP/s of one product with each matrix of the model, one after the other; the best.

    Of as many tokens as are computed at once: a microbatch's, in each partition.
    """
    import tensorflow as tf

    shapes = weight_shapes(config.model, config.dataset.vocabulary_size)
    matrices = [shape for part in ("blocks", "head") for shape in shapes[part] if len(shape) == 2]
    if config.model.tied_head:
        matrices.append((config.model.width, config.dataset.vocabulary_size))
    rows = plan.microbatch_sequences * plan.context_tokens * getattr(config.parallel, "partitions", 1)
    compute = tf.as_dtype(config.train.precision)
    pairs = {
        shape: [tf.cast(tf.random.normal(size), compute) for size in ((rows, shape[0]), shape)]
        for shape in set(matrices)
    }
    best = float("inf")
    for number in range(PRODUCTS_ROUNDS + 1):  # the first prepares the kernels
        began = time.perf_counter()
        products = [tf.matmul(*pairs[shape])[0, 0] for shape in matrices]
        tf.stack(products).numpy()  # a GPU computes on when the call has returned
        spent = time.perf_counter() - began
        best = min(best, spent) if number else best
    return sum(2.0 * rows * one * other for one, other in matrices) / best


def peak_bytes() -> int:
    """The most bytes that a device's allocator had in use so far; partitions on one processor share an allocator."""
    import tensorflow as tf

    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    names = [device.name.split("device:")[-1] for device in devices]
    return max(int(tf.config.experimental.get_memory_info(name)["peak"]) for name in names)


def main(overrides: List[str]) -> None:
    """Answers standard input to its end."""
    import_tensorflow()
    config, plan, take = prepare(overrides)
    for line in sys.stdin:
        if line.strip() == "products":
            answer: float = products_flops(config, plan)
        elif line.strip() == "memory":
            answer = peak_bytes()
        else:
            answer = take(int(line))
        print(answer, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
