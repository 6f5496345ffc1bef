"""Mixtures: shares by name, over sources and sets; resumed exactly; refused where a name stands for nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

import pytest
from conftest import ROOT, SMALL, dataset_overrides, make_texts, run_here, train_lines
from inputs import record
from omegaconf import OmegaConf

from lm.compose import compose
from lm.data import mixture as module
from lm.data.mixture import Mixture, make_mixture
from lm.data.prepare import prepare
from lm.data.shards import read_manifest
from lm.refusal import ConfigError
from lm.report import make_console

COUNTS = {"Github": 60, "ArXiv": 30, "Pile-CC": 110}


@pytest.fixture(scope="module")
def pile(tmp_path_factory: pytest.TempPathFactory) -> List[str]:
    """The overrides of a prepared set of three sources."""
    folder = tmp_path_factory.mktemp("pile")
    texts = iter(make_texts(sum(COUNTS.values()), seed=4))
    lines = [record(next(texts), source) for source, count in COUNTS.items() for _ in range(count)]
    (folder / "pile.jsonl").write_bytes(b"".join(lines))
    overrides = dataset_overrides(folder / "pile.jsonl", folder / "set")
    config = compose(overrides)
    prepare(config.dataset, config.prepare, make_console())
    return overrides


@pytest.fixture
def sources_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources count as large from 1,000 tokens on, so that small sets show what large ones do."""
    monkeypatch.setattr(module, "JOINED_TOKENS", 1000)


def mixture_of(overrides: List[str], *more: str) -> Mixture:
    config = compose(["model.context=32", *overrides, *more])
    folder = Path(str(config.dataset.output))
    return make_mixture(config, folder, read_manifest(folder))


def shares(mixture: Mixture) -> Dict[str, float]:
    position = mixture.start(3)  # within a block the order is random, and the shares are exact at its end
    return {name: count / position for name, count in mixture.realised(position).items()}


def test_without_weights_every_source_is_gone_through_once(pile: List[str], sources_apart: None) -> None:
    mixture = mixture_of(pile)
    sequences = mixture.sequences()
    assert sorted(sequences) == sorted(COUNTS)
    assert mixture.cycle == sum(sequences.values())
    assert mixture.realised(mixture.cycle) == sequences


def test_small_sources_are_joined_so_that_little_is_lost(pile: List[str]) -> None:
    mixture = mixture_of(pile)
    assert list(mixture.sequences()) == ["3 small sources"]
    manifest = read_manifest(Path(str(compose(pile).dataset.output)))
    assert sum(mixture.sequences().values()) == (manifest.totals("train").tokens - 1) // 32


def test_weights_are_the_shares_of_what_is_fed(pile: List[str], sources_apart: None) -> None:
    found = shares(mixture_of(pile, "mixture.weights={Github: 3, Pile-CC: 1}"))
    assert found == pytest.approx({"Github": 0.75, "Pile-CC": 0.25}, abs=1e-4)
    found = shares(mixture_of(pile, "mixture.weights={text: 1}"))  # the dataset by its own name
    assert found == {"text": 1.0}


def test_epochs_multiply_a_sources_own_size(pile: List[str], sources_apart: None) -> None:
    sequences = mixture_of(pile).sequences()
    mixture = mixture_of(pile, "mixture.epochs={ArXiv: 2, Github: 1}")
    assert mixture.cycle == 2 * sequences["ArXiv"] + sequences["Github"]
    assert mixture.realised(mixture.cycle) == {"ArXiv": 2 * sequences["ArXiv"], "Github": sequences["Github"]}


def another_set(tmp_path: Path, pile: List[str], *more: str) -> List[str]:
    (tmp_path / "mine.jsonl").write_bytes(b"".join(map(record, make_texts(50, seed=9))))
    tokenizer = Path(str(compose(pile).dataset.output)) / "tokenizer.json"
    overrides = [*dataset_overrides(tmp_path / "mine.jsonl", tmp_path / "mine"), f"dataset.tokenizer={tokenizer}"]
    config = compose([*overrides, *more])
    prepare(config.dataset, config.prepare, make_console())
    return [f"mixture.sets={{mine: {tmp_path / 'mine'}}}"]


def test_several_sets_by_name(tmp_path: Path, pile: List[str], sources_apart: None) -> None:
    sets = another_set(tmp_path, pile)
    assert sorted(mixture_of(pile, *sets).sequences()) == sorted([*COUNTS, "mine/Words"])
    found = shares(mixture_of(pile, *sets, "mixture.weights={mine: 1, Github: 1, ArXiv: 0.5}"))
    assert found == pytest.approx({"mine": 0.4, "Github": 0.4, "ArXiv": 0.2}, abs=1e-4)
    found = shares(mixture_of(pile, *sets, "mixture.weights={mine/Words: 1, text: 1}"))
    assert found == pytest.approx({"mine/Words": 0.5, "text": 0.5}, abs=1e-4)


def test_the_order_in_which_weights_are_typed_changes_nothing(pile: List[str], sources_apart: None) -> None:
    one = mixture_of(pile, "mixture.weights={Github: 3, ArXiv: 1}")
    other = mixture_of(pile, "mixture.weights={ArXiv: 1, Github: 3}")
    assert [component.group for component in one.components] == [component.group for component in other.components]


def test_a_source_that_is_called_as_the_dataset(pile: List[str], sources_apart: None, tmp_path: Path) -> None:
    texts = make_texts(60, seed=2)
    lines = [record(text) for text in texts[:20]] + [json.dumps({"text": text}).encode() + b"\n" for text in texts[20:]]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    overrides = dataset_overrides(tmp_path / "a.jsonl", tmp_path / "set")
    config = compose(overrides)
    prepare(config.dataset, config.prepare, make_console())
    whole = mixture_of(overrides, "mixture.weights={text: 1}").sequences()
    part = mixture_of(overrides, "mixture.weights={text/text: 1}").sequences()
    assert 0 < part["text/text"] < whole["text"]


def test_a_set_with_another_tokenizer_is_refused(tmp_path: Path, pile: List[str]) -> None:
    sets = another_set(tmp_path, pile, "dataset.tokenizer=null")
    with pytest.raises(ConfigError, match=r"mixture.sets.mine=.* has another tokenizer"):
        mixture_of(pile, *sets)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mixture.weights={GitHub: 1}"], "mixture.weights names GitHub, which no prepared set has"),
        (["mixture.weights={GitHub: 1}"], "did you mean Github?"),
        (["mixture.weights={text: 1, Github: 1}"], "mixture.weights has Github twice: as Github and as text"),
        (["mixture.epochs={Books3: 1}", "mixture.on_absent=skip"], "mixture.epochs names no source that there is"),
        (["mixture.epochs={Github: 1e-9, ArXiv: 1}"], "mixture.epochs of Github is less than one sequence"),
        (["mixture.sets={mine: nowhere}"], "mixture.sets.mine=nowhere is no prepared dataset"),
        (["mixture.weights={Github: 0}"], "mixture.weights has 0.0 for Github, and a share is above 0"),
        (["mixture.weights={Github: 1}", "mixture.epochs={ArXiv: 1}"], "are both given"),
        (["mixture.weights={Github: 1}", "mixture.sets={mine: x}"], "mixture.sets.mine has no share"),
        (["mixture.weights={Github: lots}"], "mixture.weights={'Github': 'lots'} is not"),
        (["model.context=4000", "mixture.weights={ArXiv: 1, Github: 1}"], ""),
        (["model.context=40000", "mixture.weights={ArXiv: 1}"], "less than one sequence of model.context=40000"),
    ],
)
def test_what_cannot_be_mixed_is_refused(pile: List[str], sources_apart: None, overrides: List[str], said: str) -> None:
    if not said:
        mixture_of(pile, *overrides)
        return
    with pytest.raises(ConfigError) as error:
        mixture_of(pile, *overrides)
    assert said in str(error.value)


def test_the_piles_preset_has_the_papers_table() -> None:
    settings: Any = OmegaConf.load(ROOT / "conf" / "mixture" / "pile.yaml")
    assert len(settings.weights) == 22
    assert sum(settings.weights.values()) == pytest.approx(1, abs=5e-4)  # the paper rounds to 0.01%
    config = compose(["mixture=pile"])
    assert config.mixture.weights["Pile-CC"] == 0.1811


def test_a_preset_takes_the_sources_that_there_are(pile: List[str], sources_apart: None) -> None:
    found = shares(mixture_of(pile, "mixture=pile"))
    paper = {"Pile-CC": 18.11, "ArXiv": 8.96, "Github": 7.59}
    assert found == pytest.approx({name: share / sum(paper.values()) for name, share in paper.items()}, abs=1e-4)


def test_a_run_tells_its_shares_and_resumes_exactly(
    pile: List[str], sources_apart: None, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*SMALL, *pile, "mixture.weights={Github: 1, ArXiv: 2}"]
    summary = run_here([*overrides, "run.directory=outputs/straight"])
    shown = capsys.readouterr().out
    assert "ArXiv" in shown
    assert "66.67%" in shown
    consumed = summary["sequences_by_source"]
    assert sum(consumed.values()) == 20 * 8
    lines = [json.loads(line) for line in Path("outputs/straight/metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "val_loss" in line][-1]
    assert last["share/ArXiv"] == consumed["ArXiv"] / 160
    overrides += ["schedule=constant", "schedule.warmup_steps=5"]
    run_here([*overrides, "run.directory=outputs/halves", "train.steps=10"])
    run_here([*overrides, "run.directory=outputs/whole"])
    run_here([*overrides, "run.directory=outputs/halves"])
    halves, whole = (train_lines(Path("outputs") / name) for name in ("halves", "whole"))
    assert [line["loss"] for line in halves] == [line["loss"] for line in whole]
    with pytest.raises(ConfigError, match=r"mixture.weights.ArXiv is 1.0, and .* was written with 2.0"):
        run_here([*overrides, "mixture.weights={ArXiv: 1}", "run.directory=outputs/halves", "train.steps=30"])


def test_weights_change_the_runs_name_and_not_the_dataset(pile: List[str]) -> None:
    plain, weighted = (compose([*pile, *more]) for more in ([], ["mixture.weights={Github: 1}"]))
    assert plain.hash() != weighted.hash()
    assert plain.dataset == weighted.dataset
