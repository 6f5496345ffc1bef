"""What a host uses while it trains, in kWh, by codecarbon without any network; and what that emits where it runs."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any, Callable, Optional

from lm.catalog import grids
from lm.schema import Config, SageMaker

INTERVAL_SECONDS = 15
BEGIN_SECONDS = 30.0  # that a save waits at most for the first measurement
ANY_COUNTRY = "USA"  # codecarbon wants one, whether or not anybody asks what was emitted
log = logging.getLogger("lm")


class Meter:
    """The processors, memory and GPUs of this host from `start` on, whoever uses them. It cannot stop training.

    Where codecarbon cannot read a sensor it takes the processor's rated power times its load.
    country: of the host, by its three letters (ISO 3166); None where it is not known.
    """

    def __init__(self, country: Optional[str]) -> None:
        self.country = country
        self.kwh = 0.0
        self.country_kg_a_kwh: Optional[float] = None  # of CO2e; None without a country
        self._tracker: Any = None
        self._thread = threading.Thread(target=self._begin, name="energy", daemon=True)

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def start(self) -> None:
        """Begins in a thread: codecarbon takes two seconds to import and to find out what it can read."""
        self._thread.start()

    def read(self) -> None:
        """Brings the numbers up to date."""
        if self.started:
            self._thread.join(BEGIN_SECONDS)
        self._ask(lambda tracker: tracker.flush())

    def stop(self) -> None:
        """After `read`, ends it."""
        self._ask(lambda tracker: tracker.stop())
        self._tracker = None

    def _ask(self, what: Callable[[Any], Any]) -> None:
        if self._tracker is not None:
            try:
                what(self._tracker)
            except Exception as error:  # whatever sensors or their libraries do, training goes on
                log.warning("energy is no longer measured: %s: %s", type(error).__name__, error)
                self._tracker = None

    def _begin(self) -> None:
        try:
            from codecarbon import OfflineEmissionsTracker
            from codecarbon.input import DataSource

            logging.getLogger("codecarbon").setLevel(logging.CRITICAL)  # it warns before it reads log_level
            if self.country is not None and self.country not in DataSource().get_global_energy_mix_data():
                log.warning("profiling.country=%s: codecarbon knows no such country, so no emissions", self.country)
                self.country = None
            tracker = OfflineEmissionsTracker(
                country_iso_code=self.country or ANY_COUNTRY,
                measure_power_secs=INTERVAL_SECONDS,
                save_to_file=False,
                save_to_logger=True,
                logging_logger=self,
                log_level="critical",
            )
            tracker.start()
            self._tracker = tracker
        except Exception as error:  # whatever sensors or their libraries do, training goes on
            log.warning("energy is not measured: %s: %s", type(error).__name__, error)

    # What codecarbon asks of a logger of its own.

    def out(self, total: Any, *_: Any) -> None:
        """Takes a measurement: codecarbon's EmissionsData since the start."""
        self.kwh = float(total.energy_consumed)
        if self.country is not None and self.kwh:
            self.country_kg_a_kwh = float(total.emissions) / self.kwh

    live_out = out

    def exit(self) -> None:
        """Nothing is open."""


def make_meter(config: Config, local_rank: int) -> Optional[Meter]:
    """The meter of this host where the configuration asks for one and this is the host's first process."""
    return Meter(config.profiling.country) if config.profiling.energy and local_rank == 0 else None


def kg_a_kwh(config: Config, meter: Optional[Meter]) -> Optional[float]:
    """CO2e of a kWh: by the grid and the buildings of SageMaker's region, else by the country's mix; None: unknown."""
    if isinstance(config.cluster, SageMaker):
        grid = grids().get(config.cluster.region or os.environ.get("AWS_REGION", ""))
        return grid.pue * grid.grams_a_kwh / 1000 if grid is not None else None
    return meter.country_kg_a_kwh if meter is not None else None
