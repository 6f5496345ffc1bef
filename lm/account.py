"""The numbers of a run, as its lines and its summary have them."""

from __future__ import annotations

import math
import subprocess
import time
from typing import Any, Dict, Optional

import psutil

from lm.catalog import price, spot
from lm.checkpoint import Progress
from lm.data.mixture import Mixture
from lm.data.shards import Manifest
from lm.history import hardware
from lm.plan import Plan
from lm.schema import Config, SageMaker


def first_summary(
    config: Config, plan: Plan, manifest: Manifest, world: int, peak_flops: float, peak_from: str
) -> Dict[str, Any]:
    held_out = manifest.totals("validation")
    return {
        "status": "failed",  # until the run has ended otherwise
        "steps": plan.steps,
        "parameters": plan.parameters,
        "world": world,
        "hardware": hardware(config),
        "dataset": manifest.fingerprint(),
        "commit": _commit(),
        "gzip_bits_per_byte": 8 * held_out.gzip_bytes / held_out.text_bytes,
        "peak_flops_per_second": peak_flops,
        "peak_from": peak_from,
    }


def _commit() -> Optional[str]:
    """The git commit of the working folder; None where it has none, as in a SageMaker job."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def position(progress: Progress, plan: Plan) -> Dict[str, Any]:
    return {"step": progress.step, "time": time.time(), "tokens": progress.sequences * plan.context_tokens}


def consumed_shares(mixture: Mixture, progress: Progress) -> Dict[str, float]:
    """What the run has consumed of each source so far, where there are several."""
    if len(mixture.sequences()) == 1:
        return {}
    realised = mixture.realised(progress.sequences)
    return {f"share/{group}": count / max(progress.sequences, 1) for group, count in realised.items()}


def rates(seconds: Dict[str, float], plan: Plan, peak_flops: float) -> Dict[str, float]:
    """Rates from seconds and spans by kind. The step that compiles counts for none of them."""
    waited = seconds.get("data_wait", 0.0)
    busy = seconds.get("step", 0.0) + waited
    rate = seconds.get("step_spans", 0.0) * plan.tokens_per_step / busy if busy else 0.0
    return {
        "tokens_per_second": rate,
        "mfu": rate * plan.flops_per_token / peak_flops,
        "data_wait_fraction": waited / busy if busy else 0.0,
    }


def bits_per_byte(loss: float, manifest: Manifest) -> float:
    """Bits a byte of held-out text: loss / ln 2 x tokens / bytes (Gao et al. 2020, The Pile, section 3.1)."""
    split = manifest.totals("validation")
    return loss / math.log(2) * split.tokens / split.text_bytes


def host_usage() -> Dict[str, float]:
    """This host's processors and memory, by the names of MLflow's own system metrics; percent since the last call."""
    memory = psutil.virtual_memory()
    return {
        "system/cpu_utilization_percentage": psutil.cpu_percent(),
        "system/system_memory_usage_percentage": memory.percent,
        "system/system_memory_usage_megabytes": memory.used / 1e6,
    }


def costs(config: Config, tokens: int, seconds: float, kwh: float, kg_a_kwh: Optional[float]) -> Dict[str, float]:
    """What a run took of money and energy, as far as it is known: dollars by the tables of SageMaker's prices.

    seconds: of all attempts. kwh: 0 where it was not measured.
    """
    found: Dict[str, float] = {}
    if isinstance(config.cluster, SageMaker) and config.cluster.instance_type is not None:
        known = price(config.cluster.instance_type, config.cluster.region or "")
        if known is not None:
            share = spot().share_of_on_demand if config.cluster.spot else 1.0
            found["usd"] = share * known.cost_usd(config.cluster.instance_count, seconds)
            found["tokens_per_usd"] = tokens / found["usd"]
    if kwh:
        found["energy_kwh"] = kwh
        if kg_a_kwh is not None:
            found["co2e_kg"] = kwh * kg_a_kwh
    return found
