"""Prometheus metrics, collected when scraped: serving requests pays nothing for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from transfer_queue.control.commands import Snapshot, Value

if TYPE_CHECKING:
    from transfer_queue.runtime.controller import Controller
    from transfer_queue.wire.messages import UnitStats

__all__ = ["controller_registry", "unit_registry"]


class _Scrape(Collector):
    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()


def controller_registry(controller: Controller) -> CollectorRegistry:
    """Clients, units and every number of the core's snapshot as ``tq_controller_<name>``."""

    def collect() -> Iterator[Metric]:
        connected = sum(session.connection is not None for session in controller.clients)
        yield GaugeMetricFamily("tq_clients_connected", "Clients with a connection", connected)
        yield GaugeMetricFamily("tq_units_connected", "Storage units with a connection", controller.units.connected)
        capacity = GaugeMetricFamily("tq_unit_capacity_bytes", "Capacity of a storage unit", labels=["unit"])
        used = GaugeMetricFamily("tq_unit_used_bytes", "Bytes held by a storage unit", labels=["unit"])
        for unit in controller.units:
            capacity.add_metric([unit.info.name], unit.info.capacity)
            used.add_metric([unit.info.name], unit.info.used)
        yield capacity
        yield used
        snapshot = controller.core.apply(Snapshot(""), 0.0)
        if isinstance(snapshot, Value) and isinstance(snapshot.value, dict):
            for name, value in snapshot.value.items():
                if isinstance(value, int | float):
                    yield GaugeMetricFamily(f"tq_controller_{name}", f"{name.replace('_', ' ')}", value)

    registry = CollectorRegistry()
    registry.register(_Scrape(collect))
    return registry


def unit_registry(name: str, stats: Callable[[], UnitStats]) -> CollectorRegistry:
    """Capacity, use and blocks of one storage unit."""

    def collect() -> Iterator[Metric]:
        now = stats()
        for key, text, value in (
            ("tq_unit_capacity_bytes", "Capacity of this storage unit", now.capacity),
            ("tq_unit_used_bytes", "Bytes held by blocks", now.used),
            ("tq_unit_blocks", "Blocks held", now.blocks),
        ):
            family = GaugeMetricFamily(key, text, labels=["unit"])
            family.add_metric([name], value)
            yield family

    registry = CollectorRegistry()
    registry.register(_Scrape(collect))
    return registry
