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
    """A job of one process, or one that Slurm has started here. Others, and sweeps, go to the cluster's launcher."""

    def work() -> int:
        config = load(composed)
        if config.cluster.processes > 1:
            from hydra_plugins.lm_launchers._local import run_job

            return run_job(config)
        plan = make_plan(config)
        _, done = job.begin(config, plan)
        return 0 if done else job.train_here(config, plan)

    status = job.status_of(work)
    if status:
        sys.exit(status)


def main() -> int:
    """Refuses what cannot work with every reason at once, then leaves the rest to Hydra."""
    sys.argv[1:] = ["cluster.detach=true" if word == "--detach" else word for word in sys.argv[1:]]
    register()
    check_command_line(sys.argv[1:])
    train()
    from hydra_plugins.lm_launchers._sweep import close

    return close()


if __name__ == "__main__":
    sys.exit(job.status_of(main))
