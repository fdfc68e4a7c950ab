"""What the operator counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["OperatorMetrics"]

_FAST = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0)


class OperatorMetrics:
    """One registry for each process. Times in seconds."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile = Histogram(
            "tq_operator_reconcile_seconds",
            "One look at one queue, by whether all could be written.",
            ["settled"],
            buckets=_SLOW,
            registry=self.registry,
        )
        self.admission = Histogram(
            "tq_operator_admission_seconds",
            "One admission review, by webhook and answer.",
            ["webhook", "allowed"],
            buckets=_FAST,
            registry=self.registry,
        )
        self.writes = Counter(
            "tq_operator_writes", "Children and statuses written, by kind.", ["kind"], registry=self.registry
        )
        self.events = Counter(
            "tq_operator_events", "Kubernetes events, by whether they were sent.", ["sent"], registry=self.registry
        )
        self.queues = Gauge(
            "tq_operator_queues", "Queues that the operator knows, by state.", ["state"], registry=self.registry
        )
        self.missed = Gauge(
            "tq_operator_missed_pods", "Pods that ask for a queue and did not get it.", registry=self.registry
        )
        self.certificate_ends = Gauge(
            "tq_operator_certificate_end_timestamp_seconds", "When the certificate ends.", registry=self.registry
        )
        self._leader = Gauge("tq_operator_leader", "1 in the replica that writes.", registry=self.registry)

    def show_leader(self, leading: Callable[[], bool]) -> None:
        self._leader.set_function(lambda: float(leading()))
