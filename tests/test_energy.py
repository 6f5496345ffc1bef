"""What a run uses, emits and costs: measured by codecarbon here, priced by the catalog's rows."""

from __future__ import annotations

import sys
from typing import List

import pytest
from conftest import only_run, run_here

from lm.account import costs
from lm.compose import compose
from lm.energy import kg_a_kwh
from lm.refusal import ConfigError

pytestmark = pytest.mark.tracked
MEASURED = ["profiling=system", "profiling.country=DEU"]


def test_a_runs_energy_is_in_its_summary_in_mlflow_and_in_the_closing_table(
    small: List[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Some watts for some seconds, and Germany's mix, which lies between 0.2 and 0.6 kg a kWh in any year's table."""
    summary = run_here([*small, *MEASURED, "train.steps=100"])
    watts = summary["energy_kwh"] * 3.6e6 / summary["goodput_seconds"]["total"]
    assert 0 < watts < 1000
    assert 0.2 < summary["co2e_kg"] / summary["energy_kwh"] < 0.6
    shown = capsys.readouterr().out
    assert "kg of CO2e" in shown
    from mlflow.tracking import MlflowClient

    from lm.tracking.names import absolute

    client = MlflowClient(absolute("sqlite:///outputs/mlflow.db"))
    (run,) = client.search_runs([client.get_experiment_by_name("default").experiment_id])
    assert run.data.metrics["energy_kwh"] == summary["energy_kwh"]
    assert run.data.metrics["co2e_kg"] == summary["co2e_kg"]


def test_a_run_that_goes_on_has_the_energy_of_both_attempts(small: List[str]) -> None:
    constant = [*small, "profiling=system", "schedule=constant", "tracking.uri=null"]
    before = run_here([*constant, "train.steps=60"])
    after = run_here([*constant, "train.steps=70", f"run.directory={only_run()}"])
    assert after["energy_kwh"] > before["energy_kwh"]
    assert "co2e_kg" not in after


def test_without_codecarbon_a_run_goes_on_and_says_so(small: List[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "codecarbon", None)
    summary = run_here([*small, "profiling=system"])
    assert summary["status"] == "finished"
    assert "energy_kwh" not in summary
    assert "energy is not measured: ModuleNotFoundError" in (only_run() / "log.txt").read_text()


def test_a_regions_grid_and_buildings_and_price_count() -> None:
    config = compose(["cluster=p3x10", "parallel=horovod", "cluster.region=us-east-1"])
    kg = kg_a_kwh(config, None)
    assert kg == pytest.approx(0.418 * 1.15)
    found = costs(config, tokens=10**9, seconds=7200.0, kwh=50.0, kg_a_kwh=kg)
    assert found["usd"] == pytest.approx(28.152 * 10 * 2)
    assert found["tokens_per_usd"] == pytest.approx(10**9 / found["usd"])
    assert found["co2e_kg"] == pytest.approx(50 * 0.418 * 1.15)
    unknown = compose(["cluster=p3x10", "parallel=horovod", "cluster.region=sa-east-1"])
    assert costs(unknown, 10**9, 7200.0, 0.0, kg_a_kwh(unknown, None)) == {}


def test_spot_costs_its_usual_share() -> None:
    config = compose(["cluster=p3x1", "parallel=horovod", "cluster.region=us-east-1", "cluster.spot=true"])
    assert costs(config, 10**9, 3600.0, 0.0, None)["usd"] == pytest.approx(0.33 * 28.152)


def test_a_country_is_one_that_there_is(small: List[str]) -> None:
    with pytest.raises(ConfigError, match=r"profiling\.country=de must be like DEU"):
        compose(["profiling.country=de"])
    summary = run_here([*small, "profiling=system", "profiling.country=XXX", "train.steps=100"])
    assert summary["energy_kwh"] > 0
    assert "co2e_kg" not in summary
    assert "codecarbon knows no such country" in (only_run() / "log.txt").read_text()
