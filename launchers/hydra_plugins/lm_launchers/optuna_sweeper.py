"""hydra/sweeper=optuna: a search over settings by Optuna, kept in a file, that ends bad trials early."""

from __future__ import annotations

from typing import Any, List, Optional

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

ConfigStore.instance().store(
    group="hydra/sweeper",
    name="optuna",
    node={
        "_target_": "hydra_plugins.lm_launchers.optuna_sweeper.OptunaSweeper",
        "_recursive_": False,
        "trials": 20,  # of the study, those of earlier commands included
        "storage": None,  # a URL of SQLAlchemy's; null: study.db in the sweep's folder
        "study": None,  # its name in the storage; null: the sweep's folder
        "sampler": {"_target_": "optuna.samplers.TPESampler", "seed": 0, "n_startup_trials": 6},
        "pruner": {"_target_": "optuna.pruners.MedianPruner", "n_startup_trials": 3, "n_warmup_steps": 0},
        "params": {},  # setting -> interval(a, b), tag(log, interval(a, b)), range(a, b), choice(a, b)
    },
    provider="lm",
)


class OptunaSweeper(Sweeper):
    """Asks Optuna for as many points as run at once, has the launcher run them, and tells it what they reached."""

    def __init__(
        self, trials: int, storage: Optional[str], study: Optional[str], sampler: Any, pruner: Any, params: Any
    ) -> None:
        self.trials, self.storage, self.study = trials, storage, study
        self.sampler, self.pruner, self.params = sampler, pruner, params

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from hydra.core.plugins import Plugins

        self.config = config
        self.launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: List[str]) -> Any:
        from hydra_plugins.lm_launchers import _optuna, _points

        return _points.or_exit(lambda: _optuna.search(self, arguments))
