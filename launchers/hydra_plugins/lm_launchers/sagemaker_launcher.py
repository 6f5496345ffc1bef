"""hydra/launcher=sagemaker: each job of a run or a sweep as a SageMaker training job."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

ConfigStore.instance().store(
    group="hydra/launcher",
    name="sagemaker",
    node={"_target_": "hydra_plugins.lm_launchers.sagemaker_launcher.SageMakerLauncher"},
    provider="lm",
)


class SageMakerLauncher(Launcher):
    """Submits and follows at most cluster.max_parallel_jobs jobs at once."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context: Optional[HydraContext] = hydra_context
        self.task_function = task_function
        self.config = config
        self.judge: Optional[Any] = None  # of a sweeper that ends jobs early
        self.jobs: List[Any] = []  # the last batch's, as the ledger has them

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> List[JobReturn]:
        from hydra_plugins.lm_launchers import _points, _sagemaker

        return _points.or_exit(lambda: _sagemaker.launch(self, job_overrides, initial_job_idx))
