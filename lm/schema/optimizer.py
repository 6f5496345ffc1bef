"""How the weights move: optimizers and learning-rate schedules.

Each option has a schema of its own, so that a setting of one is a typo under another; its YAML lists every value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from lm.setting import setting


@dataclass
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2)."""

    name: str = setting()
    learning_rate: float = setting(above=0)
    beta1: float = setting(minimum=0, below=1)
    beta2: float = setting(minimum=0, below=1)
    epsilon: float = setting(above=0)
    weight_decay: float = setting(minimum=0)
    no_decay: List[str] = setting([], choices=("norm", "bias", "embedding"))
    clip_norm: Optional[float] = setting(above=0)  # of the global gradient; null: no clipping
    moments_dtype: str = setting(choices=("float32", "bfloat16"))


@dataclass
class Adafactor:
    """Adafactor (Shazeer and Stern 2018, algorithm 4), its step size set by the schedule."""

    name: str = setting()
    learning_rate: float = setting(above=0)  # relative to each parameter's own root mean square
    decay_exponent: float = setting(below=0)  # the second moment's decay is 1 - step^exponent
    epsilon: float = setting(above=0)  # added to squared gradients
    minimum_rms: float = setting(above=0)  # the least root mean square a parameter is taken to have
    clip_threshold: float = setting(above=0)  # of an update's root mean square
    weight_decay: float = setting(minimum=0)
    no_decay: List[str] = setting([], choices=("norm", "bias", "embedding"))
    clip_norm: Optional[float] = setting(above=0)
    moments_dtype: str = setting(choices=("float32", "bfloat16"))


@dataclass
class SGD:
    """Stochastic gradient descent with heavy-ball momentum."""

    name: str = setting()
    learning_rate: float = setting(above=0)
    momentum: float = setting(minimum=0, below=1)
    weight_decay: float = setting(minimum=0)
    no_decay: List[str] = setting([], choices=("norm", "bias", "embedding"))
    clip_norm: Optional[float] = setting(above=0)
    moments_dtype: str = setting(choices=("float32", "bfloat16"))


@dataclass
class Constant:
    """Linear warm-up, then the peak."""

    name: str = setting()
    warmup_steps: int = setting(minimum=0)


@dataclass
class Cosine:
    """Linear warm-up, then half a cosine down to final_fraction of the peak at the last step."""

    name: str = setting()
    warmup_steps: int = setting(minimum=0)
    final_fraction: float = setting(minimum=0, maximum=1)


@dataclass
class WarmupStableDecay:
    """Linear warm-up, the peak, then a line down to final_fraction over the last decay_steps."""

    name: str = setting()
    warmup_steps: int = setting(minimum=0)
    decay_steps: int = setting(minimum=0)
    final_fraction: float = setting(minimum=0, maximum=1)
