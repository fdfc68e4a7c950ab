"""Prometheus metrics, collected when scraped: serving requests pays for plain integers and nothing else.

``CATALOG`` is the list of all of them; the page docs/metrics.md is made from it, and a server can only give what is in
it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from transfer_queue.control.queries import count_rows, subscriptions_of
from transfer_queue.runtime.counters import RequestCounters
from transfer_queue.storage.base import DEVICE

if TYPE_CHECKING:
    from transfer_queue.runtime.block_server import BlockServer
    from transfer_queue.runtime.controller import Controller
    from transfer_queue.runtime.server import Server
    from transfer_queue.wire.messages import UnitStats

__all__ = ["CATALOG", "MOST_PARTITIONS", "MOST_TASKS", "MetricInfo", "Metrics", "controller_metrics", "unit_metrics"]

MOST_PARTITIONS = 50
"""Partitions, the newest ones, that have series of their own; jobs make a partition a step."""
MOST_TASKS = 100
"""Tasks of such a partition, the newest ones, that have series of their own."""
_SAMPLES = 100
"""Rendered at a time."""


@dataclass(frozen=True)
class MetricInfo:
    """``name`` without the endings that counters (_total) and histograms (_bucket, _sum, _count) get."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    servers: tuple[str, ...] = ("controller",)

    def family(self) -> GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily:
        if self.kind == "counter":
            return CounterMetricFamily(self.name, self.text, labels=self.labels)
        if self.kind == "histogram":
            return HistogramMetricFamily(self.name, self.text, labels=self.labels)
        return GaugeMetricFamily(self.name, self.text, labels=self.labels)


_UNIT = ("storage unit",)
_BOTH = ("controller", "storage unit")

CATALOG: dict[str, MetricInfo] = {
    info.name: info
    for info in (
        MetricInfo("tq_controller_info", "gauge", "1; the labels tell what runs", ("queue", "backend", "run")),
        MetricInfo("tq_controller_rows", "gauge", "Rows that exist, over all partitions"),
        MetricInfo("tq_controller_sample_capacity", "gauge", "Most rows that may exist; absent without a limit"),
        MetricInfo("tq_controller_blocks", "gauge", "Blocks that rows refer to"),
        MetricInfo("tq_controller_waiting", "gauge", "Requests that wait: fetches for rows, puts for sample capacity"),
        MetricInfo("tq_controller_oldest_wait_seconds", "gauge", "How long the oldest waiting request has waited"),
        MetricInfo("tq_controller_lost_rows", "gauge", "Rows that lost a field with a storage unit"),
        MetricInfo("tq_controller_partitions", "gauge", "Partitions that exist"),
        MetricInfo("tq_controller_tasks", "gauge", "Tasks of all partitions"),
        MetricInfo(
            "tq_controller_subscriptions",
            "gauge",
            "Subscriptions of all partitions: pairs of a task and the fields it asks for; at most 256 per partition",
        ),
        MetricInfo("tq_clients_connected", "gauge", "Clients with a connection"),
        MetricInfo("tq_units_connected", "gauge", "Storage units with a connection"),
        MetricInfo("tq_units_expected", "gauge", "Storage units that the queue should have"),
        MetricInfo("tq_unit_capacity_bytes", "gauge", "Bytes that a storage unit can hold", ("unit",), _BOTH),
        MetricInfo("tq_unit_used_bytes", "gauge", "Bytes that a storage unit holds", ("unit",), _BOTH),
        MetricInfo("tq_unit_blocks", "gauge", "Blocks that a storage unit holds", ("unit",), _BOTH),
        MetricInfo("tq_device_capacity_bytes", "gauge", "Bytes that a client can leave on its GPU", ("unit",)),
        MetricInfo("tq_device_used_bytes", "gauge", "Bytes that a client left on its GPU", ("unit",)),
        MetricInfo("tq_unit_drained", "gauge", "1 if a storage unit takes no new blocks and has no rows", ("unit",)),
        MetricInfo("tq_partition_rows", "gauge", "Rows of a partition", ("partition",)),
        MetricInfo("tq_partition_bytes", "gauge", "Bytes of a partition's rows", ("partition",)),
        MetricInfo("tq_partition_task_bytes", "gauge", "Memory of the rows that tasks took", ("partition",)),
        MetricInfo("tq_field_ready_rows", "gauge", "Rows that have a field", ("partition", "field")),
        MetricInfo("tq_task_consumed_rows", "gauge", "Rows that a task took", ("partition", "task")),
        MetricInfo("tq_task_ready_rows", "gauge", "Rows that a task can take now", ("partition", "task", "fields")),
        MetricInfo("tq_task_waiting", "gauge", "Fetches of a task that wait", ("partition", "task", "fields")),
        MetricInfo("tq_rows_put", "counter", "Rows that were put; a row counts again with each put of further fields"),
        MetricInfo("tq_bytes_put", "counter", "Bytes of the blocks that were committed"),
        MetricInfo("tq_rows_fetched", "counter", "Rows that tasks took"),
        MetricInfo("tq_controller_requests", "counter", "Requests answered, refused ones too", ("request",)),
        MetricInfo("tq_controller_request_errors", "counter", "Requests refused", ("request",)),
        MetricInfo("tq_controller_request_seconds", "histogram", "Time spent on a request", ("request",)),
        MetricInfo("tq_controller_wait_seconds", "histogram", "How long requests waited that could not be answered"),
        MetricInfo(
            "tq_connections_refused",
            "counter",
            "Refused connections. credentials: token, certificate or policy; tls: failed handshake; malformed: not the "
            "protocol; late: no complete Hello in time; crowd: too many connections without a Hello",
            ("reason",),
            _BOTH,
        ),
        MetricInfo("tq_connections_pending", "gauge", "Connections that are not authenticated yet", (), _BOTH),
        MetricInfo("tq_unit_registered", "gauge", "1 while the unit is registered with the controller", (), _UNIT),
        MetricInfo("tq_unit_connections", "gauge", "Clients connected to the unit", (), _UNIT),
        MetricInfo("tq_unit_requests", "counter", "Requests answered, refused ones too", ("request",), _UNIT),
        MetricInfo("tq_unit_request_errors", "counter", "Requests refused", ("request",), _UNIT),
        MetricInfo(
            "tq_unit_request_seconds",
            "histogram",
            "Time until a request was answered, with the wait for space",
            ("request",),
            _UNIT,
        ),
        MetricInfo("tq_unit_stored_bytes", "counter", "Bytes of blocks that the unit took", (), _UNIT),
        MetricInfo("tq_unit_received_bytes", "counter", "Bytes of blocks that came over the network", (), _UNIT),
        MetricInfo("tq_unit_sent_bytes", "counter", "Bytes of blocks that went out over the network", (), _UNIT),
        MetricInfo(
            "tq_unit_shared_read_bytes", "counter", "Bytes of blocks that clients read in shared memory", (), _UNIT
        ),
    )
}


class Metrics:
    """All metrics of a server. ``fill`` adds them to a scrape, and yields where others may have their turn."""

    def __init__(self, fill: Callable[[_Scrape], Iterator[None]]) -> None:
        self._fill = fill
        self._process = ProcessCollector(registry=None) if sys.platform == "linux" else None

    def text(self) -> Iterator[bytes]:
        """The answer to a scrape in parts, each made in about a millisecond. Some are empty."""
        scrape = _Scrape()
        for _ in self._fill(scrape):
            yield b""
        for family in [*scrape.families(), *(self._process.collect() if self._process else ())]:
            yield from _rendered(family)


class _Some(Collector):
    """Some samples of a family."""

    def __init__(self, family: Metric, samples: list[Sample]) -> None:
        self._part = Metric(family.name, family.documentation, family.type, family.unit)
        self._part.samples = samples

    def collect(self) -> list[Metric]:
        return [self._part]


def _rendered(family: Metric) -> Iterator[bytes]:
    """The text of a family; parts after the first one without its two lines of comment."""
    for start in range(0, len(family.samples), _SAMPLES):
        part = CollectorRegistry(auto_describe=False)
        part.register(_Some(family, family.samples[start : start + _SAMPLES]))
        text = generate_latest(part)
        yield text if start == 0 else text.split(b"\n", 2)[2]


class _Scrape:
    """Collects families by their names in the catalog."""

    def __init__(self) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily] = {}

    def add(self, name: str, value: float, *labels: str) -> None:
        family = self._family(name)
        assert not isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, value)

    def add_requests(self, prefix: str, counters: RequestCounters) -> None:
        times_of = self._family(f"{prefix}_request_seconds")
        assert isinstance(times_of, HistogramMetricFamily)
        for request, times, failed in counters:
            self.add(f"{prefix}_requests", sum(times.counts), request)
            self.add(f"{prefix}_request_errors", failed, request)
            times_of.add_metric([request], times.buckets(), times.seconds)

    def add_waits(self, buckets: list[tuple[str, float]], seconds: float) -> None:
        family = self._family("tq_controller_wait_seconds")
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric([], buckets, seconds)

    def add_door(self, server: Server) -> None:
        self.add("tq_connections_pending", server.pending)
        for reason, count in server.refusals.counts.items():
            self.add("tq_connections_refused", count, reason)

    def families(self) -> list[Metric]:
        return list(self._families.values())

    def _family(self, name: str) -> GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily:
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = CATALOG[name].family()
        return family


def controller_metrics(controller: Controller) -> Metrics:
    """Metrics of a controller: the queue as a whole, its units, its newest partitions, its requests."""

    def fill(scrape: _Scrape) -> Iterator[None]:
        core, counters, config = controller.core, controller.counters, controller.config
        scrape.add("tq_controller_info", 1, config.name, config.backend.kind, controller.run)
        scrape.add("tq_controller_rows", core.state.rows)
        if core.sample_capacity is not None:
            scrape.add("tq_controller_sample_capacity", core.sample_capacity)
        scrape.add("tq_controller_blocks", core.state.blocks.count)
        scrape.add("tq_controller_waiting", len(core.wait_queue))
        now = controller.now()
        scrape.add(
            "tq_controller_oldest_wait_seconds", max((now - waiter.since for waiter in core.wait_queue), default=0)
        )
        scrape.add("tq_controller_partitions", len(core.state.partitions))
        scrape.add("tq_controller_tasks", sum(len(item.tasks) for item in core.state.partitions.values()))
        scrape.add(
            "tq_controller_subscriptions", sum(len(item.subscriptions) for item in core.state.partitions.values())
        )
        scrape.add("tq_clients_connected", controller.clients_connected)
        scrape.add("tq_units_connected", controller.units.connected)
        scrape.add("tq_units_expected", controller.expected_units)
        for unit in controller.units:
            if DEVICE in unit.info.attributes:
                scrape.add("tq_device_capacity_bytes", unit.info.capacity, unit.info.name)
                scrape.add("tq_device_used_bytes", unit.info.used, unit.info.name)
                continue
            scrape.add("tq_unit_capacity_bytes", unit.info.capacity, unit.info.name)
            scrape.add("tq_unit_used_bytes", unit.info.used, unit.info.name)
            scrape.add("tq_unit_blocks", unit.blocks, unit.info.name)
            scrape.add("tq_unit_drained", int(controller.units.is_drained(unit)), unit.info.name)
        scrape.add("tq_controller_lost_rows", controller.long_answers.lost_rows)
        yield from _add_partitions(scrape, controller)
        scrape.add("tq_rows_put", counters.rows_put)
        scrape.add("tq_bytes_put", counters.bytes_put)
        scrape.add("tq_rows_fetched", counters.rows_fetched)
        scrape.add_requests("tq_controller", counters.requests)
        scrape.add_door(controller)
        scrape.add_waits(counters.waits.buckets(), counters.waits.seconds)

    return Metrics(fill)


def _add_partitions(scrape: _Scrape, controller: Controller) -> Iterator[None]:
    core = controller.core
    for name in list(islice(reversed(core.state.partitions), MOST_PARTITIONS))[::-1]:
        yield
        partition = core.state.partitions.get(name)
        if partition is None:  # cleared meanwhile
            continue
        counts = count_rows(partition, 0, MOST_TASKS)
        scrape.add("tq_partition_rows", counts["rows"], name)
        scrape.add("tq_partition_bytes", counts["bytes"], name)
        scrape.add("tq_partition_task_bytes", sum(task.nbytes for task in partition.tasks.values()), name)
        for field, ready in counts["fields"].items():
            scrape.add("tq_field_ready_rows", ready, name, field)
        for task, state in counts["tasks"].items():
            scrape.add("tq_task_consumed_rows", state["consumed"], name, task)
        for item in subscriptions_of(partition):
            labels = (name, item["task"], ",".join(item["fields"]))
            scrape.add("tq_task_ready_rows", item["ready"], *labels)
            scrape.add("tq_task_waiting", item["waiting"], *labels)


def unit_metrics(
    name: str, stats: Callable[[], UnitStats], registered: Callable[[], bool], server: BlockServer | None
) -> Metrics:
    """Metrics of a storage unit; ``server`` None: clients never talk to it."""

    def fill(scrape: _Scrape) -> Iterator[None]:
        yield
        now = stats()
        scrape.add("tq_unit_capacity_bytes", now.capacity, name)
        scrape.add("tq_unit_used_bytes", now.used, name)
        scrape.add("tq_unit_blocks", now.blocks, name)
        scrape.add("tq_unit_registered", int(registered()))
        if server is not None:
            counters = server.counters
            scrape.add("tq_unit_connections", len(server.connections))
            scrape.add("tq_unit_stored_bytes", counters.bytes_stored)
            scrape.add("tq_unit_received_bytes", counters.bytes_received)
            scrape.add("tq_unit_sent_bytes", counters.bytes_sent)
            scrape.add("tq_unit_shared_read_bytes", counters.bytes_shared_read)
            scrape.add_requests("tq_unit", counters.requests)
            scrape.add_door(server)

    return Metrics(fill)
