"""What a run is fed: token streams in proportion, mixed and shuffled by a pure function of seed and position.

A mixture goes round in cycles. In a cycle each component gives a fixed number of sequences, its draws; without weights
that is each of its sequences once, so a cycle is an epoch. A cycle is cut into blocks that all have the same shares,
as nearly as whole sequences allow: block j of J takes the draws [d j / J, d (j + 1) / J) of a component with d draws.
The sequences of a block are then permuted. So the position of a run is one integer, the number of sequences consumed;
nothing else is remembered, whatever the number of replicas, the batch, or the number of components.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

import numpy as np

from lm.data.order import CHUNK_BYTES, Order, Run, generator
from lm.data.shards import TOKENIZER, Manifest, read_manifest
from lm.data.streams import TokenStream
from lm.refusal import ConfigError, Problem, did_you_mean
from lm.schema import Config
from lm.schema import Mixture as Settings

BLOCK_BYTES = 64 * CHUNK_BYTES  # shuffled together; held in memory twice, one block being read while one is consumed
JOINED_TOKENS = 2**20  # sources smaller than this are one component, so that no remainder of a sequence is lost in each
WEIGHTED_DRAWS = 2**40  # of a cycle with weights: the shares are exact to about one in 10^12


@dataclass(frozen=True)
class Component:
    """A stream of a mixture, as sequences of context + 1 tokens that overlap by one.

    group: the name that settings and logs use for it. draws: sequences that it gives in a cycle.
    """

    group: str
    stream: TokenStream
    order: Order
    draws: int


class Block(NamedTuple):
    """A block's sequences: runs of neighbours by component, and the permutation of them all."""

    runs: List[Tuple[int, Run]]  # component's number, and sequences of it
    permutation: np.ndarray[Any, Any]


class Mixture:
    """Components in proportion.

    seed: the run's. block_sequences: about how many are shuffled together.
    """

    def __init__(self, components: List[Component], seed: int, block_sequences: int) -> None:
        self.components, self.seed = components, seed
        self.cycle = sum(component.draws for component in components)
        self.blocks_per_cycle = max(1, -(-self.cycle // block_sequences))

    def _given(self, component: Component, block: int) -> int:
        """The draws of a component before a block, blocks counted through all cycles."""
        cycles, within = divmod(block, self.blocks_per_cycle)
        return cycles * component.draws + component.draws * within // self.blocks_per_cycle

    def start(self, block: int) -> int:
        """The position of a block's first sequence."""
        return sum(self._given(component, block) for component in self.components)

    def locate(self, position: int) -> Tuple[int, int]:
        """The block that holds the position-th sequence of the run, and how many of the block come before it."""
        low, high = 0, (position // self.cycle + 1) * self.blocks_per_cycle
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.start(middle) <= position else (low, middle)
        return low, position - self.start(low)

    def block(self, block: int) -> Block:
        """The sequences of a block and the order in which they are consumed."""
        runs = [
            (number, run)
            for number, component in enumerate(self.components)
            for run in component.order.runs(self._given(component, block), self._given(component, block + 1))
        ]
        count = sum(run.length for _, run in runs)
        return Block(runs, generator(self.seed, block, block >> 32).permutation(count))

    def realised(self, position: int) -> Dict[str, int]:
        """The sequences of each group among the first `position` that a run consumes."""
        block, offset = self.locate(position)
        counts = [self._given(component, block) for component in self.components]
        if offset:
            runs, permutation = self.block(block)
            owners = np.repeat([number for number, _ in runs], [run.length for _, run in runs])
            consumed = np.bincount(owners[permutation[:offset]], minlength=len(counts))
            counts = [count + int(more) for count, more in zip(counts, consumed)]
        return self._by_group(counts)

    def sequences(self) -> Dict[str, int]:
        """The sequences that each group has."""
        return self._by_group([component.order.sequences for component in self.components])

    def rows(self, sequences: int) -> List[Tuple[str, str]]:
        """What a run of so many sequences takes of each group, as people read it."""
        available = self.sequences()
        draws = self._by_group([component.draws for component in self.components])
        return [
            (group, f"{draws[group] / self.cycle:.2%}: {sequences * draws[group] / self.cycle / count:.3g} epochs of "
             f"{count:,} sequences")
            for group, count in available.items()
        ]

    def _by_group(self, counts: List[int]) -> Dict[str, int]:
        sums: Dict[str, int] = {}
        for component, count in zip(self.components, counts):
            sums[component.group] = sums.get(component.group, 0) + count
        return sums


def make_mixture(config: Config, folder: Path, manifest: Manifest) -> Mixture:
    """The mixture of a configuration. folder, manifest: of the prepared set that `dataset` names.

    Raises ConfigError with every name that no set or source has, and DatasetError for a set that is damaged.
    """
    context, seed = config.model.context, config.run.seed
    ingredients = _ingredients(config, folder, manifest)
    counts = [max(0, (one.stream.tokens - 1) // context) for one in ingredients]
    sequence_bytes = context * np.dtype(manifest.dtype).itemsize
    chunk_sequences = -(-CHUNK_BYTES // sequence_bytes)
    components = [
        Component(
            one.group, one.stream, Order(count, seed, zlib.crc32(one.name.encode()), chunk_sequences), drawn
        )
        for one, count, drawn in zip(ingredients, counts, _draws(config.mixture, ingredients, counts, context))
        if drawn
    ]
    return Mixture(components, seed, max(1, BLOCK_BYTES // sequence_bytes))


def mixture_identity(settings: Settings) -> Dict[str, Any]:
    """What a run that resumes must have in common: the sets by content, weights and epochs by name. {} without them."""
    return {
        **{f"mixture.sets.{name}": read_manifest(Path(path)).fingerprint() for name, path in settings.sets.items()},
        **{f"mixture.weights.{name}": weight for name, weight in settings.weights.items()},
        **{f"mixture.epochs.{name}": epochs for name, epochs in settings.epochs.items()},
    }


class _Ingredient(NamedTuple):
    """A stream before it is cut into sequences. name: the same in every mixture, so that its order is too."""

    name: str
    group: str
    stream: TokenStream


class _Share(NamedTuple):
    """Some sources of one prepared set. prefix: "" for the main set, "NAME/" for another."""

    prefix: str
    folder: Path
    manifest: Manifest
    sources: List[str]


def _ingredients(config: Config, folder: Path, manifest: Manifest) -> List[_Ingredient]:
    """The streams that the settings name; without names all there are."""
    settings = config.mixture
    main = list(manifest.source_tokens("train"))
    whole = {config.dataset.name: _Share("", folder, manifest, main)}
    for name, path in sorted(settings.sets.items()):
        other = _another_set(name, Path(path), manifest)
        if name in main:
            text = f"mixture.sets.{name} has the name of a source of the dataset"
            raise ConfigError([Problem((f"mixture.sets.{name}",), text, f"another name for the set {path}")])
        whole[name] = _Share(f"{name}/", Path(path), other, list(other.source_tokens("train")))
    names = sorted(settings.weights or settings.epochs)  # typed in another order it is the same mixture
    if not names:
        return [one for share in whole.values() for one in _streams("", share)]
    known = {source: whole[config.dataset.name]._replace(sources=[source]) for source in main}
    for name, share in whole.items():  # a source that is called as the dataset is DATASET/SOURCE
        known.update({f"{name}/{source}": share._replace(sources=[source]) for source in share.sources})
    known.update(whole)
    _check_names(settings, names, known)
    return [one for name in names if name in known for one in _streams(name, known[name])]


def _streams(group: str, share: _Share) -> List[_Ingredient]:
    """A stream for each large source; the small ones are joined. group: "" for the sources' own names."""
    tokens = share.manifest.source_tokens("train")
    joined = [[source] for source in share.sources if tokens[source] >= JOINED_TOKENS]
    small = [source for source in share.sources if tokens[source] < JOINED_TOKENS]
    joined += [small] if small else []
    ingredients = []
    for sources in joined:
        stream = TokenStream.of(share.folder, share.manifest, "train", sources)
        name = share.prefix + "+".join(sources)
        shown = name if len(sources) == 1 else f"{share.prefix}{len(sources)} small sources"
        ingredients.append(_Ingredient(name, group or shown, stream))
    return ingredients


def _check_names(settings: Settings, names: List[str], known: Dict[str, _Share]) -> None:
    kind = "mixture.weights" if settings.weights else "mixture.epochs"
    problems = []
    taken: Dict[str, str] = {}
    for name in names:
        if name not in known:
            if settings.on_absent == "error":
                text = f"{kind} names {name}, which no prepared set has"
                problems.append(Problem((kind,), text, did_you_mean(name, known)))
            continue
        for source in known[name].sources:
            full = known[name].prefix + source
            if full in taken:
                text = f"{kind} has {full} twice: as {taken[full]} and as {name}"
                problems.append(Problem((kind,), text, "name it once"))
            taken[full] = name
    if not problems and not taken:
        problems.append(Problem((kind,), f"{kind} names no source that there is", f"there are: {', '.join(known)}"))
    if problems:
        raise ConfigError(problems)


def _another_set(name: str, folder: Path, main: Manifest) -> Manifest:
    """A further prepared set, whose ids must mean the same as the main one's."""
    key = (f"mixture.sets.{name}",)
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        text = f"mixture.sets.{name}={folder} is no prepared dataset"
        raise ConfigError([Problem(key, text, f"lm prepare ... dataset.output={folder}")]) from None
    if manifest.tokenizer_sha256 != main.tokenizer_sha256:
        text = (
            f"mixture.sets.{name}={folder} has another tokenizer ({manifest.tokenizer_sha256[:8]}) "
            f"than the dataset ({main.tokenizer_sha256[:8]})"
        )
        fix = f"prepare the dataset with dataset.tokenizer={folder / TOKENIZER}"
        raise ConfigError([Problem(key, text, fix)])
    return manifest


def _draws(settings: Settings, ingredients: List[_Ingredient], counts: List[int], context: int) -> List[int]:
    """How often each ingredient is drawn in a cycle: its sequences, times its epochs, or its share of the weights."""
    of_group: Dict[str, int] = {}
    for one, count in zip(ingredients, counts):
        of_group[one.group] = of_group.get(one.group, 0) + count
    weights, epochs = settings.weights, settings.epochs
    empty = [group for group, count in of_group.items() if not count]
    if empty and (weights or epochs or len(empty) == len(of_group)):
        text = f"less than one sequence of model.context={context} tokens: {', '.join(empty)}"
        raise ConfigError([Problem(("model.context", "mixture"), text, "a shorter model.context, or more text")])
    never = [group for group, share in epochs.items() if group in of_group and not round(share * of_group[group])]
    if never:
        text = f"mixture.epochs of {', '.join(never)} is less than one sequence"
        raise ConfigError([Problem(("mixture.epochs",), text, "a larger number, or leave the name out")])
    if weights:
        total = sum(weights[group] for group in of_group)
        return [
            round(weights[one.group] / total * count / of_group[one.group] * WEIGHTED_DRAWS)
            for one, count in zip(ingredients, counts)
        ]
    return [max(round(epochs.get(one.group, 1.0) * count), min(count, 1)) for one, count in zip(ingredients, counts)]
