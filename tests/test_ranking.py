"""`lm plan --sweep`: every candidate is a command that works and is what it says, in the order of its dollars."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Dict, List

import pytest

from lm.charts import Point, scatter
from lm.cli import main
from lm.compose import compose
from lm.plan import make_plan
from lm.ranking import rank

RUNS = [
    ["model=1b", "parallel=smp", "cluster=p3x10"],
    ["model=125m", "parallel=horovod", "cluster=g5x1"],
    [
        "model=1b",
        "parallel=smp",
        "parallel.partitions=8",
        "parallel.pipeline=simple",
        "parallel.lr_scaling=sqrt",
        "cluster=p3x10",
        "cluster.fallback_instance_types=[ml.p4d.24xlarge]",
        "train.global_batch_sequences=640",
    ],
    ["model=1b", "parallel=sdp", "cluster=p3x10", "train.global_batch_sequences=320", "train.microbatch_sequences=4"],
]


@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_what_is_ranked_can_be_typed(run: List[str]) -> None:
    found = rank(compose(run, workable=False))
    assert len(found) > 10
    for one in found:
        config = compose(one.command(run))
        assert make_plan(config) == one.plan
        assert config.parallel == one.parallel


@pytest.mark.parametrize("run", RUNS, ids=" ".join)
def test_the_cheapest_is_first_and_nothing_is_twice(run: List[str]) -> None:
    found = rank(compose(run, workable=False))
    costs = [one.estimate.usd for one in found if one.estimate.usd is not None]
    assert costs == sorted(costs)
    assert len({one.typed for one in found}) == len(found)


class Circles(HTMLParser):
    """The circles of a page, and that every tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: List[str] = []
        self.circles: List[Dict[str, Any]] = []

    def handle_starttag(self, tag: str, attrs: List[Any]) -> None:
        self.circles += [dict(attrs)] if tag == "circle" else []
        if tag not in ("meta", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag == "path" or self.open.pop() == tag


def test_the_chart_has_a_point_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "ranking.html"
    assert main(["plan", *RUNS[0], "--sweep", "--json", "--html", str(page)]) == 0
    ranked = json.loads(capsys.readouterr().out)
    circles = Circles()
    circles.feed(page.read_text())
    assert circles.open == []
    assert len(circles.circles) == sum(one["usd"] is not None for one in ranked)
    assert all(70 <= float(one["cx"]) <= 830 and 70 <= float(one["cy"]) <= 450 for one in circles.circles)


def test_a_point_is_further_right_and_up_the_more_it_is() -> None:
    circles = Circles()
    circles.feed(scatter("x < 1", "y", [Point(1, 10, "one", "<&>"), Point(100, 20, "two", "")]))
    low, high = circles.circles
    assert float(low["cx"]) < float(high["cx"])
    assert float(low["cy"]) > float(high["cy"])
    assert low["fill"] != high["fill"]


def test_an_axis_between_two_round_numbers_has_its_ends() -> None:
    page = scatter("x", "y", [Point(2.5, 3.0, "one", "")])
    assert ">2.228<" in page
    assert ">2.805<" in page


def test_a_chart_without_a_price_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path("ranking.html")
    assert main(["plan", *RUNS[0], "cluster.region=sa-east-1", "--sweep", "--html", str(page)]) == 2
    assert "cluster.region=us-east-1" in capsys.readouterr().err
    assert not page.exists()


def test_a_run_elsewhere_is_not_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=tiny", "--sweep"]) == 2
    assert "cluster=p3x10" in capsys.readouterr().err
