"""Addresses of servers in the form of 0.1.x: ``controller.zmq_info`` of the settings, and answers of actors."""

from __future__ import annotations

from enum import Enum
from typing import Any

from transfer_queue.config.attach import AttachConfig, AttachSecurity, ControllerAddresses, join_address, parse_address
from transfer_queue.errors import InvalidInputError, InvalidTypeError

__all__ = [
    "CONTROLLER_PORT_NAME",
    "JOIN_PORT_NAME",
    "UNIT_PORT_NAME",
    "ExplicitEnum",
    "Role",
    "ZMQServerInfo",
    "attach_config",
    "controller_address",
    "server_info",
]

CONTROLLER_PORT_NAME = "request_handle_socket"
UNIT_PORT_NAME = "put_get_socket"
JOIN_PORT_NAME = "join_socket"
"""Port of a server that waits for settings: a storage unit for its controller, a controller for its store."""


class ExplicitEnum(str, Enum):
    """An enumeration of strings that names the allowed values when it is given another one."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise InvalidInputError(f"{value!r} is not a {cls.__name__}; allowed: {', '.join(item.value for item in cls)}")

    def __str__(self) -> str:
        return str(self.value)


class Role(ExplicitEnum):
    """Role of a process of a queue."""

    CONTROLLER = "TransferQueueController"
    STORAGE = "TransferQueueStorage"
    CLIENT = "TransferQueueClient"


class ZMQServerInfo:
    """The address of a server: ``ip`` (or host name) and ``ports`` by name. Compared by value, picklable.

    The name is that of 0.1.x; nothing here speaks ZeroMQ.
    """

    secret: str | None = None
    """See ``PeerSecurity``. It is pickled with the object, but its repr does not show it."""

    def __init__(self, role: Role | str, id: str, ip: str, ports: dict[str, int]) -> None:  # noqa: A002 - as in 0.1.x
        self.role = role
        self.id = id
        self.ip = ip
        self.ports = ports

    def to_addr(self, port_name: str) -> str:
        """``tcp://host:port`` of a port. Raises InvalidInputError for an unknown name."""
        return f"tcp://{self.address(port_name)}"

    def address(self, port_name: str) -> str:
        """``host:port`` of a port. Raises InvalidInputError for an unknown name."""
        if port_name not in self.ports:
            raise InvalidInputError(
                f"port_name {port_name!r} is not a port of {self.id}, which has {sorted(self.ports)}"
            )
        return join_address(self.ip, self.ports[port_name])

    def to_dict(self) -> dict[str, Any]:
        """The four attributes by name."""
        return {"role": self.role, "id": self.id, "ip": self.ip, "ports": dict(self.ports)}

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, ZMQServerInfo) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.role, self.id, self.ip, tuple(sorted(self.ports.items()))))

    def __repr__(self) -> str:
        return f"ZMQServerInfo(role={self.role!s}, id={self.id!r}, ip={self.ip!r}, ports={self.ports})"


def server_info(role: Role, name: str, address: str, secret: str | None = None) -> ZMQServerInfo:
    """The info of a server of this release at ``address`` (host:port). Raises ConfigError."""
    host, port = parse_address(address)
    info = ZMQServerInfo(role, name, host, {CONTROLLER_PORT_NAME if role is Role.CONTROLLER else UNIT_PORT_NAME: port})
    if secret is not None:
        info.secret = secret
    return info


def controller_address(info: object) -> str:
    """``host:port`` that clients of a controller connect to. Raises InvalidTypeError, InvalidInputError."""
    if not isinstance(info, ZMQServerInfo):
        raise InvalidTypeError(f"controller.zmq_info must be a ZMQServerInfo, not {type(info).__name__}")
    return info.address(CONTROLLER_PORT_NAME)


def attach_config(info: ZMQServerInfo) -> AttachConfig:
    """The settings of a client of the controller at ``info``. Raises InvalidInputError."""
    security = AttachSecurity() if info.secret is None else AttachSecurity(secret=info.secret)
    addresses = ControllerAddresses(addresses=[controller_address(info)])
    return AttachConfig(controller=addresses, missing_fields="drop", security=security)
