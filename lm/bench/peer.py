"""The step's peer: the same decoder as an ordinary PyTorch model. Run by a Python that has torch, never imported here.

    python lm/bench/peer.py '{"layers": 6, ..., "mode": "compiled"}'

Fused causal attention, fused AdamW, clipping, automatic mixed precision: what nanoGPT's train.py does
(github.com/karpathy/nanoGPT). It answers every line of standard input, the number of steps to take, with their seconds.
"""

import contextlib
import json
import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, time_, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, time_, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, time_, width))
        return x + self.narrow(functional.gelu(self.widen(self.norm_2(x)), approximate="tanh"))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Any, labels: Any) -> Any:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    shape = {name: settings[name] for name in ("layers", "width", "heads", "context", "vocabulary")}
    model = Decoder(**shape)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True)
    run = torch.compile(model) if settings["mode"] == "compiled" else model
    cast: Any = contextlib.nullcontext()
    if settings["precision"] == "bfloat16":
        cast = torch.autocast("cpu", torch.bfloat16)
    text = torch.randint(0, settings["vocabulary"], (settings["batch"], settings["context"] + 1))

    def step() -> float:
        with cast:
            loss = run(text[:, :-1], text[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            step()
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
