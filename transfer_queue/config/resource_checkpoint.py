"""``spec.checkpoint`` of a TransferQueue: when the whole queue is saved, and where to."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from transfer_queue.config import defaults
from transfer_queue.config.resource_pods import Part
from transfer_queue.config.resource_security import SecretName
from transfer_queue.config.rules import Between, Matches, Rule
from transfer_queue.config.schedule import SCHEDULE

__all__ = ["Checkpoint", "Place"]

Place = Annotated[
    str,
    Matches(r"^([a-zA-Z][a-zA-Z0-9+.-]*://[^ ]+|/[^ ]*)$", "a URL such as s3://bucket/run7, or an absolute path", 1024),
]
Times = Annotated[
    str,
    Matches(SCHEDULE, "an interval such as 90s, 5m, 1h or 1d, or a cron expression such as */10 * * * *, in UTC", 100),
]


class Checkpoint(Part):
    """Saves of the whole queue by a process of their own, on a cluster in a pod of its own."""

    schedule: Times | None = Field(
        default=None,
        description="When to save: an interval, such as 90s, 5m, 1h or 1d, or a cron expression of five fields in UTC.",
    )
    destination: Place | None = Field(
        default=None,
        description="Where the checkpoints go, each into a folder named by its time: a URL that fsspec knows, such as "
        "s3://bucket/run7, or an absolute path.",
    )
    keep: Annotated[int, Between(1, 1000)] = Field(
        default=defaults.KEPT_CHECKPOINTS, description="How many of the newest checkpoints stay."
    )
    credentials_from: SecretName | None = Field(
        default=None,
        description="Secret whose keys are environment variables of that process, such as AWS_ACCESS_KEY_ID; for saves "
        "and for restoreFrom. tq up uses its own environment.",
    )
    metrics_port: Annotated[int, Between(1, 65535)] = Field(
        default=defaults.CHECKPOINT_METRICS_PORT, description="HTTP port: /status, /healthz, /readyz; on a cluster."
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda self: (self.schedule is None) == (self.destination is None),
            "has(self.schedule) == has(self.destination)",
            "schedule and destination go together; without them only restoreFrom uses credentialsFrom",
        ),
    )
