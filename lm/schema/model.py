"""What is trained: the decoder's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from lm.setting import setting


@dataclass
class Model:
    """A decoder-only transformer. The defaults are GPT-2's block (Radford et al. 2019)."""

    name: str = setting()
    layers: int = setting(minimum=1)
    width: int = setting(minimum=1)
    heads: int = setting(minimum=1)
    context: int = setting(minimum=2)  # tokens that one position can see, itself included
    head_width: Optional[int] = setting(None, minimum=1)  # null: width / heads
    feedforward_width: Optional[int] = setting(None, minimum=1)  # null: 4 x width
    positions: str = setting("learned", choices=("learned", "rotary"))
    norm: str = setting("layernorm", choices=("layernorm", "rmsnorm"))
    norm_placement: str = setting("pre", choices=("pre", "post"))
    norm_epsilon: float = setting(1e-5, above=0)
    activation: str = setting("gelu", choices=("gelu", "relu", "swiglu"))
    bias: bool = setting(True)  # of every matrix; an untied head included
    tied_head: bool = setting(True)
    dropout: float = setting(0.0, minimum=0, below=1)  # of each residual branch
    attention_dropout: float = setting(0.0, minimum=0, below=1)  # of the attention weights
    embedding_dropout: float = setting(0.0, minimum=0, below=1)
    recompute: str = setting("none", choices=("none", "block"))  # activations that the backward pass computes again
