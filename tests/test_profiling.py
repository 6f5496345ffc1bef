"""What the host did: written while training, read by smdebug, and never in training's way."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from conftest import only_run, run_here

from lm.profiling import SystemSampler


def test_smdebug_reads_what_a_run_leaves(small: list[str]) -> None:
    """Every kind of measurement, every half second of the run, in the hour's folder and the minute's file."""
    run_here([*small, "profiling=system", "train.steps=200"])
    folder = only_run() / "profiler-output"
    from smdebug.profiler.system_metrics_reader import LocalSystemMetricsReader
    from smdebug.profiler.utils import TimeUnits

    reader = LocalSystemMetricsReader(str(folder))
    reader.refresh_event_file_list()
    events = reader.get_events(0, time.time() + 60, unit=TimeUnits.SECONDS)
    assert {event.node_id for event in events} == {"algo-1"}
    cores = [event for event in events if event.dimension == "CPUUtilization"]
    assert {"cpu0", "cpu1"} <= {event.name for event in cores}
    assert all(0 <= event.value <= 100 for event in cores)
    assert max(event.value for event in cores) > 20  # it trained
    assert {"I/OWaitPercentage", "Algorithm"} <= {event.dimension for event in events}
    assert {"memory", "network"} <= {event.type for event in events}
    times = sorted({event.timestamp for event in events})
    assert len(times) > 2
    for path in folder.glob("system/incremental/*/*.json"):
        begins = int(path.name.split(".")[0])
        hour = time.strftime("%Y%m%d%H", time.gmtime(begins))
        assert path.parent.name == hour
        for line in path.read_text().splitlines():
            assert begins <= json.loads(line)["Timestamp"] < begins + 60


def test_profiling_can_be_left_out(small: list[str]) -> None:
    run_here([*small, "profiling=none"])
    assert not (only_run() / "profiler-output").exists()


def test_a_disk_that_takes_nothing_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger("lm"), "propagate", True)
    (tmp_path / "profiler-output").write_text("no folder")
    sampler = SystemSampler(tmp_path / "profiler-output", 1)
    sampler.start()
    time.sleep(1.2)
    sampler.stop()
    assert "profiling=system ends: [Errno 20] Not a directory" in caplog.text
