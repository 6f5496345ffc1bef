"""What a job's log lines say of training: for SageMaker's own metrics, and for MLflow while a job is followed."""

from __future__ import annotations

import re
from typing import Any, Dict, Optional

from lm.plan import Plan

NUMBER = r"([-+.0-9eE]+|nan|inf)"
# Names as in metrics.jsonl, and where `lm.report` prints each.
TRAINING = {
    "loss": rf"step +\d+/\d+  loss {NUMBER}",
    "learning_rate": rf"step +\d+/\d+  .*  lr {NUMBER}",
    "grad_norm": rf"step +\d+/\d+  .*  norm {NUMBER}",
}
EVALUATION = {
    "val_loss": rf"step \d+  validation loss {NUMBER}",
    "val_bits_per_byte": rf"step \d+  validation loss .*  {NUMBER} bits a byte",
}
# For CreateTrainingJob, AlgorithmSpecification.MetricDefinitions.
DEFINITIONS = [{"Name": name, "Regex": regex} for name, regex in {**TRAINING, **EVALUATION}.items()]
STEP = re.compile(r"step +(\d+)")
RATE = re.compile(r"  ([\d,]+) tokens/s  mfu (\d+)%  wait ([\d.]+)%")


def read_line(line: str, plan: Plan, seconds: float) -> Optional[Dict[str, Any]]:
    """A line of the log as one of metrics.jsonl, its numbers as rounded as they were printed; None for any other.

    seconds: when it was written, since 1970.
    """
    for patterns in (TRAINING, EVALUATION):
        found = {name: re.search(pattern, line) for name, pattern in patterns.items()}
        if all(found.values()):
            values: Dict[str, Any] = {name: float(match[1]) for name, match in found.items() if match}
            rate = RATE.search(line)
            if rate:
                speed, mfu, wait = float(rate[1].replace(",", "")), float(rate[2]) / 100, float(rate[3]) / 100
                values.update(tokens_per_second=speed, mfu=mfu, data_wait_fraction=wait)
            step = STEP.search(line)
            assert step is not None  # every pattern begins with it
            return {"step": int(step[1]), "time": seconds, "tokens": int(step[1]) * plan.tokens_per_step, **values}
    return None
