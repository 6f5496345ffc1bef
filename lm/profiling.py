"""What the host does while it trains, every 500 ms, in the files that SageMaker Debugger's agent writes.

profiler-output/system/incremental/YYYYMMDDHH/MINUTE.algo-N.json: a JSON object a line (Type, Name, Dimension, Value,
NodeId, Timestamp), a file a minute, named by the second that it begins at. smdebug's readers and charts read it.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

import psutil

INTERVAL_SECONDS = 0.5  # as in AWS's article
MINUTE = 60
log = logging.getLogger("lm")


class SystemSampler:
    """A thread of one process a host. It cannot stop training: what goes wrong is said once, and it ends.

    folder: profiler-output. host: its number, from 1.
    """

    def __init__(self, folder: Path, host: int) -> None:
        self.folder, self.node = folder / "system" / "incremental", f"algo-{host}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="profiling", daemon=True)
        self._before: Dict[str, float] = {}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when nothing more will be written."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            psutil.cpu_times_percent(percpu=True)  # from here on
            self._rates(time.time())
            due = time.monotonic() + INTERVAL_SECONDS
            while not self._ended.wait(max(0.0, due - time.monotonic())):
                self._write(time.time())
                due = max(due + INTERVAL_SECONDS, time.monotonic())
        except (OSError, psutil.Error) as error:
            log.warning("profiling=system ends: %s; training goes on", error)

    def _write(self, now: float) -> None:
        """One sample, in one write."""
        begins = int(now) // MINUTE * MINUTE
        hour = self.folder / time.strftime("%Y%m%d%H", time.gmtime(begins))
        hour.mkdir(parents=True, exist_ok=True)
        rows = [{**row, "NodeId": self.node, "Timestamp": now} for row in self._sample(now)]
        with open(hour / f"{begins}.{self.node}.json", "a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))

    def _sample(self, now: float) -> List[Dict[str, Any]]:
        rows = []
        for core, times in enumerate(psutil.cpu_times_percent(percpu=True)):
            waited = getattr(times, "iowait", 0.0)
            rows.append(_row("cpu", f"cpu{core}", "CPUUtilization", 100.0 - times.idle - waited))
            rows.append(_row("cpu", f"cpu{core}", "I/OWaitPercentage", waited))
        rows.append(_row("memory", "MemoryUsedPercent", "Algorithm", psutil.virtual_memory().percent))
        rates = self._rates(now)
        for kind, names in RATES.items():
            rows += [_row(kind, name, "Algorithm", rates[name]) for name in names if name in rates]
        return rows

    def _rates(self, now: float) -> Dict[str, float]:
        """A second's disk and network traffic since the last call; those that this system counts."""
        disk, network = psutil.disk_io_counters(), psutil.net_io_counters()
        totals: Dict[str, float] = {"at": now}
        if disk is not None:
            totals["IOPS"] = disk.read_count + disk.write_count
            totals["ReadThroughputInBytesPerSecond"] = disk.read_bytes
            totals["WriteThroughputInBytesPerSecond"] = disk.write_bytes
        if network is not None:
            totals["ReceiveBytesPerSecond"] = network.bytes_recv
            totals["TransmitBytesPerSecond"] = network.bytes_sent
        before, self._before = self._before, totals
        seconds = max(now - before.get("at", now), 1e-3)
        return {name: (value - before[name]) / seconds for name, value in totals.items() if name in before}


RATES = {
    "i/o": ("IOPS", "ReadThroughputInBytesPerSecond", "WriteThroughputInBytesPerSecond"),
    "network": ("ReceiveBytesPerSecond", "TransmitBytesPerSecond"),
}


def _row(kind: str, name: str, dimension: str, value: float) -> Dict[str, Any]:
    return {"Type": kind, "Name": name, "Dimension": dimension, "Value": round(value, 3)}


def start_sampler(choice: str, folder: Path, rank: int, local_rank: int, local_size: int) -> Optional[SystemSampler]:
    """The sampler of this host where the configuration asks for one and this is the host's first process."""
    if choice != "system" or local_rank != 0:
        return None
    sampler = SystemSampler(folder, rank // local_size + 1)
    sampler.start()
    return sampler
