"""What the class of a request states about it: who may send it, what it is about, whether it changes state."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, ClassVar, TypeVar, Union

import msgspec

__all__ = [
    "ADMINS",
    "CONSUMERS",
    "PRODUCERS",
    "STORAGE",
    "USERS",
    "HandlerTable",
    "Request",
    "Roles",
    "Scope",
    "union_of",
]

Roles = frozenset[str]
"""Any one of these roles of a policy is enough."""

ADMINS: Roles = frozenset({"admin"})
PRODUCERS: Roles = ADMINS | {"producer"}
CONSUMERS: Roles = ADMINS | {"consumer"}
USERS: Roles = PRODUCERS | CONSUMERS
STORAGE: Roles = frozenset({"storage"})

F = TypeVar("F", bound=Callable[..., Any])


class Scope(Enum):
    """The subject of a request. It decides who may send the request and how many shards are asked."""

    PARTITION = auto()
    """The partition that it names: takes one of the request's roles there. One shard is asked."""
    LISTING = auto()
    """Every partition that the sender may see; the reply is cut to them. Every shard is asked."""
    QUEUE = auto()
    """The whole queue: takes an admin of all partitions. Every shard is asked."""
    UNIT = auto()
    """A storage unit: takes the principal that the unit joined as, or an admin of all partitions."""
    SENDER = auto()
    """The sender itself, which was checked when it connected."""


class Request(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of the requests and notices that a controller takes; the class name is the tag."""

    roles: ClassVar[Roles] = ADMINS
    """Who may send it, where its scope is a partition."""
    scope: ClassVar[Scope] = Scope.QUEUE
    mutates: ClassVar[bool] = False
    """It changes the state of rows: the reply is kept, so that a retry gets the same reply and changes nothing."""

    def covers(self) -> Scope:
        """Return the scope of this request, which may depend on its fields."""
        return self.scope


class HandlerTable(dict[Any, Callable[..., Any]]):
    """The methods of a class by the message that they handle.

    Example:
        >>> class Server:
        ...     handlers = HandlerTable()
        ...     @handlers.on(Commit)
        ...     def _commit(self, command: Commit) -> Committed: ...
    """

    def on(self, *keys: Any) -> Callable[[F], F]:
        """Return a decorator that enters a method under each of ``keys``: a message class, or a tuple with one."""

        def enter(method: F) -> F:
            self.update(dict.fromkeys(keys, method))
            return method

        return enter


def union_of(*kinds: type[Any]) -> Any:
    """Return the union of these message classes, each base class replaced by its subclasses, for a decoder."""
    return Union[tuple(leaf for kind in kinds for leaf in _leaves(kind))]  # noqa: UP007


def _leaves(kind: type[Any]) -> list[type[Any]]:
    return [leaf for subclass in kind.__subclasses__() for leaf in _leaves(subclass)] or [kind]
