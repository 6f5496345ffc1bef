"""The training step against the matrix products in it, and against the same decoder in PyTorch, in one run."""

from __future__ import annotations

import dataclasses
import json
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Optional

from rich.console import Console
from rich.table import Table

from lm.bench.contender import our_command, started
from lm.compose import compose
from lm.plan import make_plan
from lm.refusal import ConfigError, Problem
from lm.schema import Model

STEPS = 3  # at a time, each contender in turn
PREPARING_STEPS = 3
MODES = ("eager", "compiled")
PEERS_OWN = ("name", "layers", "width", "heads", "context")  # that lm/bench/peer.py is told; else it is GPT-2
PEER = Path(__file__).with_name("peer.py")


def bench_step(
    sizes: List[str], precisions: List[str], overrides: List[str], peers: Optional[Path], rounds: int, console: Console
) -> Dict[str, Any]:
    """Measures, prints and returns a row for each size and precision: tokens/s, and ratios of them.

    peers: the Python of an environment that has torch; None leaves PyTorch out. Raises ConfigError where it has not.
    """
    if peers is not None:
        _refuse_peers(peers, sizes, precisions, overrides)
    table = Table(title=f"a training step, medians of {rounds} rounds of {STEPS}")
    headings = ("model", "precision", "tokens/s", "GFLOP/s", "of the products' own", "PyTorch's best", "against it")
    for heading in headings:
        table.add_column(heading)
    rows: Dict[str, Any] = {}
    for size in sizes:
        for precision in precisions:
            console.print(f"measuring {size} in {precision}")
            typed = [f"model={size}", f"train.precision={precision}", *overrides]
            row = rows[f"{size} {precision}"] = _measure(typed, peers, rounds)
            best = max((row["peers"] or {}).items(), key=lambda item: item[1], default=None)
            table.add_row(
                size,
                precision,
                f"{row['tokens_per_second']:,.0f}",
                f"{row['gflops']:,.0f}",
                f"{row['share_of_products']:.0%} of {row['products_gflops']:,.0f}",
                f"{best[1]:,.0f} {best[0]}" if best else "",
                f"{row['against_peers']:.2f} x" if best else "",
            )
    console.print(table)
    return rows


def _refuse_peers(peers: Path, sizes: List[str], precisions: List[str], overrides: List[str]) -> None:
    """Raises ConfigError where PyTorch is not there, or lm/bench/peer.py is another model than is measured here."""
    problems = []
    executable = shutil.which(str(peers))
    if executable is None or subprocess.run([executable, "-c", "import torch"], capture_output=True).returncode:
        problems.append(Problem(("peers",), f"{peers} is no Python with torch", "pip install torch there"))
    gpt2 = {f.name: f.default for f in dataclasses.fields(Model) if f.name not in PEERS_OWN}
    for size in sizes:
        model = compose([f"model={size}", *overrides]).model
        for name, usual in gpt2.items():
            if (value := getattr(model, name)) != usual:
                text = f"the peer is GPT-2, and model.{name}={value}"
                problems.append(Problem((f"model.{name}",), text, "no --peers"))
    if "float16" in precisions:
        problems.append(Problem(("precisions",), "the peer computes in float32 and bfloat16", "no --peers"))
    if problems:
        raise ConfigError(problems)


def _measure(overrides: List[str], peers: Optional[Path], rounds: int) -> Dict[str, Any]:
    config = compose(overrides)
    plan = make_plan(config)
    commands = {"ours": our_command(overrides)}
    if peers is not None:
        settings = {
            "layers": config.model.layers,
            "width": config.model.width,
            "heads": config.model.heads,
            "context": config.model.context,
            "vocabulary": config.dataset.vocabulary_size,
            "batch": plan.global_batch_sequences,
            "precision": config.train.precision,
        }
        for mode in MODES:
            commands[mode] = [str(peers), str(PEER), json.dumps({**settings, "mode": mode})]
    seconds: Dict[str, List[float]] = {name: [] for name in commands}
    products: List[float] = []
    with started(commands) as contenders:
        for contender in contenders.values():
            contender.ask(PREPARING_STEPS)
        for _ in range(rounds):
            products.append(contenders["ours"].ask("products"))
            for name, contender in contenders.items():
                seconds[name].append(contender.ask(STEPS))
    rates = {name: STEPS * plan.tokens_per_step / statistics.median(spent) for name, spent in seconds.items()}
    ours, own = rates.pop("ours"), statistics.median(products)
    return {
        "tokens_per_second": ours,
        "gflops": ours * plan.flops_per_token / 1e9,
        "products_gflops": own / 1e9,
        "share_of_products": ours * plan.flops_per_token / own,
        "peers": rates or None,
        "against_peers": ours / max(rates.values()) if rates else None,
    }
