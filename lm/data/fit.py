"""Whether a prepared set can feed a run, before the run begins."""

from __future__ import annotations

from pathlib import Path

from lm.data.mixture import Mixture, make_mixture
from lm.data.shards import Manifest
from lm.refusal import ConfigError, Problem
from lm.schema import Config


def check_fits(config: Config, folder: Path, manifest: Manifest) -> Mixture:
    """The mixture that a run is fed with. Raises ConfigError where the set is too small for one batch or evaluation."""
    name, context, batch = config.dataset.name, config.model.context, config.train.global_batch_sequences
    tokens, held_out = manifest.totals("train").tokens, manifest.totals("validation").tokens
    problems = []
    if held_out < 2:
        text = f"the dataset {name} has {held_out} validation tokens: none to predict"
        problems.append(Problem(("dataset.validation_fraction",), text, "a larger dataset.validation_fraction"))
    if manifest.vocabulary_size > config.dataset.vocabulary_size:
        size = manifest.vocabulary_size
        text = f"dataset.vocabulary_size={config.dataset.vocabulary_size}, and its tokenizer has {size}"
        problems.append(Problem(("dataset.vocabulary_size",), text, f"dataset.vocabulary_size={size}"))
    if not config.mixture.sets and tokens <= context:
        text = f"model.context={context} is longer than the dataset {name}: {tokens} training tokens"
        fix = f"model.context={max(2, tokens // 10)}, or more text"
        problems.append(Problem(("model.context", "dataset"), text, fix))
    if problems:
        raise ConfigError(problems)
    mixture = make_mixture(config, folder, manifest)
    sequences = sum(mixture.sequences().values())
    if sequences < batch:
        text = (
            f"{sequences} sequences < batch {batch}: the dataset {name} has {tokens} training tokens "
            f"at model.context={context}"
        )
        fix = f"train.global_batch_sequences={sequences}, a shorter model.context, or more text"
        raise ConfigError([Problem(("train.global_batch_sequences", "dataset"), text, fix)])
    return mixture
