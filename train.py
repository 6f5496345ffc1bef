"""Train a language model: compose, plan, print the plan, then launch or train. `python train.py --help` tells more."""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from lm import job
from lm.compose import check_command_line, register
from lm.config import load
from lm.plan import make_plan


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def train(composed: DictConfig) -> None:
    """A job of one process. Jobs of more, and sweeps, go to the launcher that the cluster names."""

    def work() -> int:
        config = load(composed)
        plan = make_plan(config)
        _, done = job.begin(config, plan)
        return 0 if done else job.train_here(config, plan)

    sys.exit(job.status_of(work))


def main() -> int:
    """Refuses what cannot work with every reason at once, then leaves the rest to Hydra."""
    sys.argv[1:] = ["cluster.detach=true" if word == "--detach" else word for word in sys.argv[1:]]
    register()
    check_command_line(sys.argv[1:])
    train()
    return 0


if __name__ == "__main__":
    sys.exit(job.status_of(main))
