"""A scaling law through finished runs: their loss by parameters and tokens, and what it says of sizes not yet run."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

import numpy as np

LEAST_RUNS, LEAST_SIZES = 6, 3  # five numbers are fitted; both terms need a slope
EXPONENTS = tuple(0.05 * number for number in range(1, 25))


@dataclass(frozen=True)
class Law:
    """loss = floor + a / parameters^alpha + b / tokens^beta, in nats a token (Hoffmann et al. 2022, equation 2)."""

    floor: float
    a: float
    alpha: float
    b: float
    beta: float
    runs: int
    worst: float  # the largest relative error among the runs

    def loss(self, parameters: float, tokens: float) -> float:
        """What a run of that size is to end at."""
        return self.floor + self.a / parameters**self.alpha + self.b / tokens**self.beta

    def best_parameters(self, flops: float) -> float:
        """The parameters of the lowest loss for a budget of 6 x parameters x tokens FLOPs (their equation 4)."""
        g = (self.alpha * self.a / (self.beta * self.b)) ** (1 / (self.alpha + self.beta))
        return g * (flops / 6) ** (self.beta / (self.alpha + self.beta))

    def of_ten_times(self, flops: float) -> str:
        """In words: the best size for ten times a run's FLOPs, and the loss that it is to end at."""
        parameters = self.best_parameters(10 * flops)
        tokens = 10 * flops / 6 / parameters
        return (
            f"for ten times the largest run's 6 x parameters x tokens: {parameters:,.3g} parameters on {tokens:,.3g} "
            f"tokens, to end at {self.loss(parameters, tokens):.3f}"
        )

    def __str__(self) -> str:
        terms = f"{self.floor:.3g} + {self.a:.4g} / parameters^{self.alpha:.3g} + {self.b:.4g} / tokens^{self.beta:.3g}"
        return f"loss = {terms}, through {self.runs} runs, within {self.worst:.1%}"


def fit(runs: Sequence[Tuple[float, float, float]]) -> Optional[Law]:
    """The law through (parameters, tokens, loss) of finished runs; None where they are too few or too alike.

    Least squares of the relative errors. With both exponents given the rest is linear and not negative, so only those
    two are searched, from a grid on.
    """
    sizes = [{run[which] for run in runs} for which in (0, 1)]
    if len(runs) < LEAST_RUNS or min(map(len, sizes)) < LEAST_SIZES:
        return None
    from scipy.optimize import minimize, nnls

    parameters, tokens, losses = (np.array(column, dtype=float) for column in zip(*runs))
    ones = np.ones_like(losses)

    def linear(exponents: Sequence[float]) -> Tuple[np.ndarray, float]:
        """floor, a, b for two exponents, and the norm of the relative errors."""
        alpha, beta = exponents
        columns = np.stack([ones, parameters**-alpha, tokens**-beta], 1)
        scale = columns.max(0)  # so that nnls sees numbers near one
        found, misfit = nnls(columns / scale / losses[:, None], ones)
        return found / scale, float(misfit)

    grid = itertools.product(EXPONENTS, EXPONENTS)
    start = min(grid, key=lambda pair: linear(pair)[1])
    limits = [(EXPONENTS[0], EXPONENTS[-1])] * 2
    best = minimize(lambda pair: linear(pair)[1], start, method="Nelder-Mead", bounds=limits, options={"xatol": 1e-6}).x
    (floor, a, b), _ = linear(best)
    if not (a and b):
        return None
    law = Law(float(floor), float(a), float(best[0]), float(b), float(best[1]), len(runs), 0.0)
    worst = max(abs(law.loss(n, d) / loss - 1) for n, d, loss in runs)
    return dataclasses.replace(law, worst=worst)
