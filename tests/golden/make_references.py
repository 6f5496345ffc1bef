"""Makes the golden values that tests compare with: GPT-2 by transformers, optimizers by torch, tokens by Megatron-LM.

They live in an environment of their own, because both are large and nothing here depends on them:

    python -m venv peers && peers/bin/pip install torch==2.13.0 transformers safetensors
    peers/bin/pip install --no-deps megatron-core
    peers/bin/python tests/golden/make_references.py

Writes gpt2.safetensors (weights under this project's names, tokens, logits, loss, gradients) and
optimizers.safetensors (a matrix and a vector, their gradients, and their values after each of five steps), and
megatron-{uint16,int32}.{bin,idx} (three documents, the second of two sequences; end-of-text is 0).
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

HERE = Path(__file__).parent
LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 2, 32, 4, 16, 61


def our_names() -> dict[str, str]:
    """This project's name of each of GPT-2's parameters."""
    names = {"transformer.wte.weight": "embedding.tokens", "transformer.wpe.weight": "embedding.positions"}
    parts = {"ln_1": "norm_1", "ln_2": "norm_2"}
    matrices = {
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.output",
        "mlp.c_fc": "feedforward.input",
        "mlp.c_proj": "feedforward.output",
    }
    for layer in range(LAYERS):
        theirs, ours = f"transformer.h.{layer}", f"blocks.{layer}"
        for their, our in parts.items():
            names[f"{theirs}.{their}.weight"] = f"{ours}.{our}.scale"
            names[f"{theirs}.{their}.bias"] = f"{ours}.{our}.bias"
        for their, our in matrices.items():
            names[f"{theirs}.{their}.weight"] = f"{ours}.{our}.kernel"
            names[f"{theirs}.{their}.bias"] = f"{ours}.{our}.bias"
    names["transformer.ln_f.weight"] = "final_norm.scale"
    names["transformer.ln_f.bias"] = "final_norm.bias"
    return names


def gpt2() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():  # small, and none at its initial zero or one
            parameter.add_(0.1 * torch.randn_like(parameter))
    tokens = torch.randint(VOCABULARY, (3, CONTEXT + 1))
    logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    values = {"tokens": tokens.to(torch.int32), "logits": logits.detach(), "loss": loss.detach()[None]}
    parameters = dict(model.named_parameters())
    for theirs, ours in our_names().items():
        parameter = parameters[theirs]
        values[f"weight.{ours}"] = parameter.detach()
        values[f"gradient.{ours}"] = parameter.grad
    save_file({name: value.contiguous().clone() for name, value in values.items()}, HERE / "gpt2.safetensors")


def optimizers() -> None:
    torch.manual_seed(1)
    start = {"matrix": 0.1 * torch.randn(6, 4), "vector": 0.1 * torch.randn(5)}
    gradients = [{name: torch.randn_like(value) for name, value in start.items()} for _ in range(5)]
    makers = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
        "adafactor": lambda p: torch.optim.Adafactor(
            p, lr=1e-2, beta2_decay=-0.8, eps=(None, 1e-3), d=1.0, weight_decay=0.1
        ),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    }
    values = {f"start.{name}": value for name, value in start.items()}
    for step, gradient in enumerate(gradients):
        values.update({f"gradient.{step}.{name}": value for name, value in gradient.items()})
    for kind, make in makers.items():
        parameters = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
        optimizer = make(parameters.values())
        for step, gradient in enumerate(gradients):
            for name, parameter in parameters.items():
                parameter.grad = gradient[name].clone()
            optimizer.step()
            for name, parameter in parameters.items():
                values[f"{kind}.{step}.{name}"] = parameter.detach().clone()
    save_file(values, HERE / "optimizers.safetensors")


def megatron() -> None:
    """What Megatron-LM's preprocessing writes, by its own builder."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    documents = [([5, 6, 7, 0], [4]), ([8, 9, 10, 11, 12, 0], [2, 4]), ([40, 41, 0], [3])]
    for dtype in (np.uint16, np.int32):
        path = HERE / f"megatron-{np.dtype(dtype).name}"
        builder = IndexedDatasetBuilder(f"{path}.bin", dtype=dtype)
        for ids, lengths in documents:
            builder.add_document(torch.tensor(ids), lengths)
        builder.finalize(f"{path}.idx")


if __name__ == "__main__":
    gpt2()
    optimizers()
    megatron()
