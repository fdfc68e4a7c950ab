"""``TransferQueueBinding``: pods of a namespace that use a queue, chosen by labels of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError

from tq_operator.api.status import Condition
from transfer_queue.config.resource import Metadata
from transfer_queue.config.rules import Matches, Model, Rule
from transfer_queue.errors import ConfigError

__all__ = ["BINDING_KIND", "BINDING_PLURAL", "Binding", "BindingSpec", "BindingStatus", "binding_from"]

BINDING_KIND = "TransferQueueBinding"
BINDING_PLURAL = "transferqueuebindings"
_NAME = r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"


class QueueReference(Model):
    """A TransferQueue."""

    name: Annotated[str, Matches(_NAME, "the name of a TransferQueue", 253)] = Field(description="Its name.")
    namespace: Annotated[str, Matches(_NAME, "the name of a namespace", 63)] = Field(
        description="Its namespace; another one than the binding's must admit it in spec.access.namespaces."
    )


class Selector(Model):
    """Which pods."""

    match_labels: dict[str, str] = Field(description="Labels that a pod must carry, all of them.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda self: len(self.match_labels) > 0,
            "size(self.matchLabels) > 0",
            "matchLabels must name at least one label",
        ),
    )


class BindingSpec(Model):
    """Pods and the queue that they get."""

    queue: QueueReference = Field(description="The queue.")
    selector: Selector = Field(description="The pods of the binding's namespace.")


class BindingStatus(Model):
    """The observed state."""

    conditions: list[Condition] = Field(default=[], description="Bound.")


class Binding(Model):
    """Pods of this namespace that use a TransferQueue."""

    api_version: str
    kind: str
    metadata: Metadata
    spec: BindingSpec = Field(description="Pods and their queue.")
    status: dict[str, Any] | None = None

    @property
    def queue(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.spec.queue.namespace, self.spec.queue.name

    def chooses(self, labels: Mapping[str, Any]) -> bool:
        return all(labels.get(name) == value for name, value in self.spec.selector.match_labels.items())


def binding_from(document: Mapping[str, Any]) -> Binding:
    """Raises ConfigError."""
    try:
        return Binding.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"not a {BINDING_KIND}: {error}") from None
