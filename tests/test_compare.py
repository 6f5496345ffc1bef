"""`lm compare` and `lm reproduce`: what runs have in common and what not, and the command that repeats one."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, List

import pytest
from conftest import only_run, run_here

from lm.cli import main
from lm.compare import differing, ordered, read_runs
from lm.comparison import comparison_page
from lm.compose import compose
from lm.config import load_file
from lm.reproduce import OF_THE_PLACE, command
from lm.run import RunFolder


def leave(name: str, overrides: List[str], **summary: Any) -> Path:
    """A run's folder with a configuration and, where there is something to say, a summary."""
    folder = RunFolder(Path("outputs/trial") / name)
    folder.path.mkdir(parents=True)
    folder.write_config(compose([*overrides, "run.experiment=trial"]))
    if summary:
        folder.write_summary(summary)
    return folder.path


# --- side by side --------------------------------------------------------------------------------------


def test_two_runs_are_told_apart_by_the_setting_that_they_differ_in(
    small: List[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for rate in ("1e-3", "3e-3"):
        run_here([*small, "run.experiment=trial", f"optimizer.learning_rate={rate}"])
    capsys.readouterr()
    assert main(["compare", "outputs/trial", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["optimizer.learning_rate"] for row in rows} == {0.001, 0.003}
    assert [row["val_loss"] for row in rows] == sorted(row["val_loss"] for row in rows)
    assert [name for row in rows for name in row if "." in name] == ["optimizer.learning_rate"] * 2
    assert main(["compare", "outputs/trial", "--csv", "--sort", "tokens_per_second"]) == 0
    by_speed = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    speeds = [float(row["tokens_per_second"]) for row in by_speed]
    assert speeds == sorted(speeds, reverse=True)
    assert main(["compare", "outputs/trial"]) == 0
    assert "2 runs by val_loss" in capsys.readouterr().out


def test_runs_without_the_number_are_last_and_those_that_cannot_be_read_are_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.compare.log.propagate", True)
    leave("failed", [], status="failed", val_loss=None)
    leave("going", ["model.width=96"])
    leave("good", ["model.width=384"], status="finished", val_loss=2.0)
    leave("bad", [], status="finished", val_loss=3.0)
    (leave("damaged", []) / "config.yaml").write_text("a: [")
    runs = read_runs([Path("outputs/trial")])
    assert [run.folder.name for run in ordered(runs, "val_loss")] == ["good", "bad", "failed", "going"]
    assert [run.status for run in runs if run.folder.name == "going"] == ["not ended"]
    assert differing(runs) == ["model.width"]
    assert "outputs/trial/damaged is left out" in caplog.text


def test_numbers_that_are_not_finite_are_empty(capsys: pytest.CaptureFixture[str]) -> None:
    leave("one", [], status="failed", loss=math.nan, tokens=100)
    assert main(["compare", "outputs/trial", "--csv", "--sort", "tokens"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert "loss" not in row
    assert row["tokens"] == "100"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["outputs/none"], "outputs/none is no folder"),
        (["outputs"], "there is no run in outputs"),
        (["outputs/trial", "--sort", "accuracy"], "no run here has accuracy"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: List[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    leave("one", [], status="finished", val_loss=2.0)
    assert main(["compare", *words]) == 2
    assert said in capsys.readouterr().err


# --- the page --------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page has: its headings, the titles within paths, and the names of its paths' classes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.at = ""
        self.headings: List[str] = []
        self.lines: List[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: List[Any]) -> None:
        self.at = tag
        if tag == "path" and dict(attrs)["class"] == "line":
            self.lines.append(dict(attrs)["d"])

    def handle_data(self, data: str) -> None:
        if self.at == "h2":
            self.headings.append(data)
            self.at = ""


def test_the_page_has_a_curve_a_run_and_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    for name, rate, end in (("a", "1e-3", 3.0), ("b", "3e-3", 2.0)):
        job = ["cluster=p3x1", "parallel=horovod", f"optimizer.learning_rate={rate}"]
        folder = leave(name, job, status="finished", val_loss=end, tokens=200, tokens_per_usd=100.0)
        for tokens, loss in ((100, 5.0), (200, end)):
            RunFolder(folder).append_metrics({"step": 1, "time": 0.0, "tokens": tokens, "val_loss": loss})
    assert main(["compare", "outputs/trial", "--html", "page.html"]) == 0
    text = Path("page.html").read_text()
    found = Page(text)
    assert found.headings == [
        "Runs",
        "Validation loss against tokens",
        "Validation loss against dollars",
        "Settings and results",
        "Settings of two runs",
    ]
    assert len(found.lines) == 6  # two runs in three charts
    starts = {line.split(" L")[0] for line in found.lines[:2]}
    assert len(starts) == 1  # both begin at 5 nats
    assert found.lines[0] != found.lines[1]
    assert "http" not in text


def test_enough_runs_have_a_scaling_law(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(9):
        n, d = 10 ** (6 + number % 3), 10 ** (8 + number // 3)
        loss = 1.7 + 400 / n**0.34 + 410 / d**0.28
        leave(f"run{number}", [], status="finished", parameters=n, tokens=d, val_loss=loss)
    assert main(["compare", "outputs/trial", "--html", "page.html"]) == 0
    assert "loss = 1.7 + " in capsys.readouterr().out
    assert "Scaling law" in Page(Path("page.html").read_text()).headings


def test_a_page_of_one_run_that_was_never_evaluated_and_of_odd_names() -> None:
    leave("one", ["run.name=x", "dataset=text", "dataset.source='</script><b>'"], status="failed", tokens=5)
    (run,) = read_runs([Path("outputs/trial")])
    assert Page(comparison_page("<t>", [run])).headings == ["Runs"]
    assert "</script><b>" not in comparison_page("<t>", [run, run])


# --- the command that repeats a run ----------------------------------------------------------------------

TYPED = [
    [],
    ["model=125m", "dataset=pile", "optimizer=sgd", "schedule=wsd", "parallel=smp", "parallel.partitions=4"],
    ["model=10m", "parallel=horovod", "cluster=local2", "train.microbatch_sequences=2", "model.dropout=0.1"],
    ["experiment=gpt2_124m"],
    ["parallel=smp", "cluster=p3x10", "cluster.environment=['A=b, c','D=']", "cluster.region=eu-west-1"],
    ["dataset=text", "dataset.source='/some where/it\\'s, {here}/*.jsonl'", "run.name=a-b_c.d", "run.seed=7"],
    ["mixture=pile", "dataset=pile"],
    ["dataset=pile", r"mixture.weights={Wikipedia\ \(en\):0.25,Github:0.75}"],
    ["optimizer.clip_norm=null", "optimizer.learning_rate=1e-05", "model.bias=false", "tracking.uri=null"],
]


@pytest.mark.parametrize("overrides", TYPED, ids=" ".join)
def test_the_command_composes_to_the_same_run(overrides: List[str]) -> None:
    folder = leave("run", overrides)
    words = shlex.split(command(folder))
    assert words[:2] == ["python", "train.py"]
    again, config = compose(words[2:], workable=False).as_dict(), load_file(folder / "config.yaml").as_dict()
    for name in OF_THE_PLACE:
        section, _, key = name.partition(".")
        del again[section][key], config[section][key]
    assert again == config


def test_a_real_runs_command_is_short_and_has_its_hash(small: List[str], capsys: pytest.CaptureFixture[str]) -> None:
    run_here(small)
    capsys.readouterr()
    assert main(["reproduce", str(only_run())]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert only_run().name.endswith(compose(words[2:]).hash())
    assert not any(word.startswith(("optimizer", "schedule=", "profiling.country")) for word in words)
    assert main(["reproduce", "outputs"]) == 2
