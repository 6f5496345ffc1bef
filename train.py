"""Train a language model: compose, plan, print the plan, then launch or train."""

from __future__ import annotations

import sys

import hydra
from omegaconf import DictConfig

from lm.config import ConfigError, load
from lm.compose import check_command_line, register
from lm.plan import make_plan

register()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def train(composed: DictConfig) -> None:
    """One process. More than one start through a launcher, which never comes here."""
    from lm import job

    config = load(composed)
    plan = make_plan(config)
    job.announce(config, plan)
    job.prepare(config)
    sys.exit(job.train_here(config, plan))


if __name__ == "__main__":
    try:
        check_command_line(sys.argv[1:])
        train()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
