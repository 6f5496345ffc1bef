"""What earlier runs say of a next one: those of the same kind on the same hardware, of the nearest width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, List, Optional

import pytest
from conftest import only_run, run_here

from lm import history
from lm.cli import main
from lm.compose import compose
from lm.history import hardware, reached
from lm.plan import make_plan
from lm.run import RunFolder

BASE = ["model=tiny"]


def leave(name: str, overrides: List[str], rate: float, **summary: Any) -> None:
    """A finished run's folder, as lm.loop leaves it."""
    config = compose([*BASE, *overrides])
    run = RunFolder(Path("outputs") / "default" / name)
    run.path.mkdir(parents=True)
    run.write_config(config)
    run.plan.write_text(json.dumps(make_plan(config).as_dict()))
    run.write_summary(dict(status="finished", hardware=hardware(config), tokens_per_second=rate) | summary)


def flops(overrides: List[str]) -> int:
    return make_plan(compose([*BASE, *overrides])).flops_per_token


def test_the_median_of_the_nearest_width_counts() -> None:
    assert reached(compose(BASE)) is None
    for number, rate in enumerate((900.0, 1000.0, 5000.0)):
        leave(f"wide{number}", ["model.width=384"], rate)
    leave("narrow", ["model.width=48"], 9000.0)
    found = reached(compose(BASE))
    assert found is not None
    assert found.because == "what 3 finished runs of width 384 reached on this hardware"
    assert found.flops_per_second == 1000 * flops(["model.width=384"])
    plan = make_plan(compose(BASE))
    flops_a_step = plan.flops_per_token * plan.tokens_per_step
    assert found.step_seconds(plan) == pytest.approx(flops_a_step / found.flops_per_second)


@pytest.mark.parametrize(
    ("overrides", "summary"),
    [
        (["train.precision=bfloat16"], {}),
        (["model.recompute=block"], {}),
        (["parallel=smp"], {}),
        (["parallel=smp", "cluster=tf_hosts", "cluster.hosts=['10.0.0.4:4100','10.0.0.5:4100']"], {}),
        (["parallel=horovod", "cluster=local2"], {}),
        ([], {"hardware": "64 x something else"}),
        ([], {"status": "failed"}),
        ([], {"tokens_per_second": 0.0}),
    ],
    ids=str,
)
def test_other_kinds_say_nothing(overrides: List[str], summary: Any) -> None:
    leave("other", overrides, 1000.0, **summary)
    assert reached(compose(BASE)) is None


def test_a_pipeline_of_other_microbatches_says_nothing() -> None:
    leave("four", ["parallel=smp", "parallel.microbatches=4"], 1000.0)
    assert reached(compose([*BASE, "parallel=smp", "parallel.microbatches=4"])) is not None
    assert reached(compose([*BASE, "parallel=smp", "parallel.microbatches=8"])) is None
    assert reached(compose([*BASE, "parallel=smp", "parallel.microbatches=4", "parallel.pipeline=simple"])) is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary.json", "{"),
        ("summary.json", "[]"),
        ("plan.json", "{}"),
        ("config.yaml", "a: ["),
        ("config.yaml", "model: {width: 64}"),
        ("config.yaml", ""),
        ("config.yaml", None),
    ],
)
def test_a_run_that_cannot_be_read_is_named_and_the_others_count(
    file: str, content: Optional[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history.log, "propagate", True)  # a run before this one may have its own console
    leave("whole", [], 1000.0)
    leave("damaged", [], 9000.0)
    path = Path("outputs/default/damaged", file)
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    found = reached(compose(BASE))
    assert found is not None
    assert found.flops_per_second == 1000 * flops([])
    (said,) = {record.getMessage() for record in caplog.records}
    assert said.startswith("outputs/default/damaged says nothing of speed: ")


def test_a_run_is_what_the_next_ones_plan_expects(small: List[str], capsys: pytest.CaptureFixture[str]) -> None:
    summary = run_here(small)
    capsys.readouterr()
    assert main(["plan", *small, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["expected_step_seconds"] == pytest.approx(plan["tokens_per_step"] / summary["tokens_per_second"])
    assert main(["plan", *small]) == 0
    assert "what 1 finished run of width 32 reached on this hardware" in capsys.readouterr().out
    assert json.loads((only_run() / "summary.json").read_text())["hardware"] == hardware(compose(small))


def test_gpus_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = hardware(compose(BASE))
    (tmp_path / "0000:00:1e.0").mkdir()
    (tmp_path / "0000:00:1e.0" / "information").write_text("Model: \t\t Tesla V100-SXM2-16GB\nIRQ:   10\n")
    monkeypatch.setattr(history, "DRIVER", tmp_path)
    assert hardware(compose(BASE)) == f"{without} + Tesla V100-SXM2-16GB"
    assert hardware(compose(["cluster=p3x1", "parallel=horovod"])) == "ml.p3.16xlarge"
