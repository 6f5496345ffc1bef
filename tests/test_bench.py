"""`lm bench`'s own parts: a contender that answers, a ratio that fell, and a question that was left out."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from lm.bench import baseline
from lm.bench.checkpoint import bench_checkpoint
from lm.bench.contender import Contender
from lm.bench.step import bench_step
from lm.cli import main


def test_a_contender_answers_each_line() -> None:
    doubles = "import sys\nfor line in sys.stdin: print(float(line) * 2, flush=True)"
    contender = Contender([sys.executable, "-c", doubles])
    assert [contender.ask(3), contender.ask(4)] == [6.0, 8.0]
    contender.process.kill()
    with pytest.raises(ChildProcessError, match="ended with status"):
        contender.ask(5)


def test_a_ratio_below_its_noise_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = tmp_path / "baseline.yaml"
    stored.write_text(yaml.safe_dump({"step": {name: {"ratio": 2.0, "noise": 0.25} for name in ("kept", "fell")}}))
    monkeypatch.setattr(baseline, "BASELINE", stored)
    shown = Console(file=io.StringIO(), width=100)
    bad = baseline.fallen("step", {"kept": 1.5, "fell": 1.49, "new": 0.1}, shown)
    assert bad == ["fell: 1.49, was 2.00 within 25%"]
    assert baseline.fallen("other", {"fell": 0.1}, shown) == []


def test_the_stored_baseline_is_of_ratios_and_their_noise() -> None:
    stored = yaml.safe_load(baseline.BASELINE.read_text())
    rows = [row for of_bench in stored.values() for row in of_bench.values()]
    assert all(set(row) == {"ratio", "noise"} and row["ratio"] > 0 and 0 < row["noise"] < 1 for row in rows)


def test_checkpoints_are_measured_against_the_disk(tmp_path: Path) -> None:
    shown = Console(file=io.StringIO())
    found = bench_checkpoint(8, 1, tmp_path / "bench", shown)
    rates = found["gigabytes_per_second"]
    assert set(rates) == {"disk, written", "checkpoint saved", "disk, read", "checkpoint restored"}
    assert found["ratios"]["saving, of the disk's own"] == rates["checkpoint saved"] / rates["disk, written"]
    assert list((tmp_path / "bench").iterdir()) == []


@pytest.mark.processes
def test_a_step_is_measured_against_its_products() -> None:
    shown = Console(file=io.StringIO())
    overrides = ["model.layers=1", "model.width=32", "model.heads=2", "model.context=32"]
    found = bench_step(["tiny"], ["float32"], overrides, None, 1, shown)
    row = json.loads(json.dumps(found))["tiny float32"]
    assert row["share_of_products"] == pytest.approx(row["gflops"] / row["products_gflops"])
    assert row["peers"] is None


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "lm bench --quick" in capsys.readouterr().err
    assert main(["bench", "step", "--peers", sys.executable]) == 2
    assert "is no Python with torch" in capsys.readouterr().err
    assert main(["bench", "step", "model.norm=rmsnorm", "--peers", "/no/such", "--precisions", "float16"]) == 2
    refused = capsys.readouterr().err
    assert "/no/such is no Python with torch" in refused
    assert "the peer is GPT-2, and model.norm=rmsnorm" in refused
    assert "the peer computes in float32 and bfloat16" in refused
