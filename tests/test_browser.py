"""What people look at, in Debian's Chromium: MLflow's compare page and ours, with two runs of one sweep in them.

UPDATE_SCREENSHOTS=1 keeps the pictures for the docs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Iterator, List

import pytest
from conftest import ROOT, free_port, train_py
from playwright.sync_api import Browser, expect, sync_playwright

pytestmark = [pytest.mark.processes, pytest.mark.tracked]
PICTURES = ROOT / "docs" / "images"


@pytest.fixture
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield chromium
        chromium.close()


def picture(page: Any, name: str) -> None:
    """Keeps what is seen where pictures are to be kept; taken in any case, since that renders the page."""
    taken = page.screenshot(full_page=True)
    assert len(taken) > 10_000
    if os.environ.get("UPDATE_SCREENSHOTS") == "1":
        PICTURES.mkdir(exist_ok=True)
        (PICTURES / name).write_bytes(taken)


def test_mlflows_page_and_ours_show_both_runs_of_a_sweep(small: List[str], server: Any, browser: Browser) -> None:
    port = free_port()
    server(port)
    uri = f"http://127.0.0.1:{port}"
    words = [*small, "optimizer.learning_rate=1e-3,3e-3", "train.eval_every_steps=4", f"tracking.uri={uri}"]
    done = train_py("-m", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted(Path("outputs/default").glob("tiny-*"))
    assert len(runs) == 2

    # --- ours --------------------------------------------------------------------------------------------
    page = browser.new_page(viewport={"width": 1000, "height": 1400})
    wrong: List[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    (ours,) = Path("outputs/default").glob("sweep-*/compare.html")
    page.goto(ours.resolve().as_uri())
    rows = page.locator("table").first.locator("tr")
    expect(rows).to_have_count(3)  # a heading and two runs
    for run in runs:
        expect(page.locator("table").first).to_contain_text(run.name)
    assert page.locator("svg").count() == 2  # loss curves, parallel coordinates
    for chart in page.locator("svg").all():
        assert chart.locator(".line").count() == 2
        box = chart.locator(".line").first.bounding_box()
        assert box is not None
        assert box["width"] > 100
    difference = page.locator("#difference tr")
    expect(difference).to_have_count(1)
    expect(difference).to_contain_text("optimizer.learning_rate")
    page.locator("#other").select_option("0")  # a run against itself
    page.locator("#one").select_option("0")
    expect(difference).to_have_count(0)
    page.locator("#other").select_option("1")
    picture(page, "compare.png")
    assert not wrong

    # --- MLflow's ----------------------------------------------------------------------------------------
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("default").experiment_id
    found = [run for run in client.search_runs([experiment]) if "mlflow.parentRunId" in run.data.tags]
    ids = ",".join(f'"{run.info.run_id}"' for run in found)
    page = browser.new_page(viewport={"width": 1800, "height": 1000})
    page.goto(f'{uri}/#/compare-runs?runs=[{ids}]&experiments=["{experiment}"]')
    for run in found:
        expect(page.get_by_text(run.info.run_name).first).to_be_visible(timeout=30_000)
    expect(page.get_by_text("optimizer.learning_rate").first).to_be_visible(timeout=30_000)
    expect(page.locator(".js-plotly-plot").first).to_be_visible(timeout=30_000)
    picture(page, "mlflow-compare.png")
    query = f'runs=[{ids}]&metric="val_loss"&experiments=["{experiment}"]&plot_metric_keys=["val_loss"]'
    page.goto(f"{uri}/#/metric?{query}")
    for run in found:
        expect(page.get_by_text(f"{run.info.run_name} (val_loss)").first).to_be_visible(timeout=60_000)
    assert page.locator(".scatterlayer .trace").count() >= 2
    picture(page, "mlflow-curves.png")
