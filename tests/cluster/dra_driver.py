"""Drivers of dynamic resource allocation, as those of GPUs and network cards are: devices that pods get by claims.

Messages between driver and kubelet (k8s.io/kubelet/pkg/apis, pluginregistration/v1 and dra/v1) are a few strings.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from tests.cluster.cluster import Cluster
from tests.cluster.node import Node
from tests.cluster.product import apply
from tests.cluster.protobuf import field, fields

__all__ = ["Device", "Driver", "device_class", "driving"]

_REGISTRATION = "/pluginregistration.Registration"
_PLUGIN = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
_KUBELET = "/var/lib/kubelet"  # the node's name for the folder
_API = "resource.k8s.io/v1"
_ROOT = "resource.kubernetes.io/pcieRoot"
_REGISTER_S = 30


@dataclass(frozen=True)
class Device:
    """A device below a PCIe root, such as pci0000:17."""

    name: str
    kind: str
    root: str


def device_class(name: str, driver: str, kind: str) -> dict[str, Any]:
    """A DeviceClass of the devices of a kind."""
    expression = f"device.driver == '{driver}' && device.attributes['{driver}'].kind == '{kind}'"
    spec = {"selectors": [{"cel": {"expression": expression}}]}
    return {"apiVersion": _API, "kind": "DeviceClass", "metadata": {"name": name}, "spec": spec}


class Driver(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The driver on one node. ``prepared``: names of the devices of each claim that the kubelet has in use, by uid."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.prepared: dict[str, list[str]] = {}
        self.answered, self.refusal = threading.Event(), ""
        self._cluster = cluster
        self._methods: dict[str, Callable[[bytes, Any], bytes]] = {
            f"{_REGISTRATION}/GetInfo": self._info,
            f"{_REGISTRATION}/NotifyRegistrationStatus": self._registered,
            f"{_PLUGIN}/NodePrepareResources": self._prepare,
            f"{_PLUGIN}/NodeUnprepareResources": self._unprepare,
        }

    @property
    def endpoint(self) -> str:
        """Its socket, in the kubelet's folder."""
        return f"plugins/{self.name}.sock"

    def service(self, handler_call_details: Any) -> Any:
        method = self._methods.get(handler_call_details.method)
        return method and grpc.unary_unary_rpc_method_handler(method)

    def _info(self, request: bytes, context: Any) -> bytes:
        words = ("DRAPlugin", self.name, f"{_KUBELET}/{self.endpoint}", "v1.DRAPlugin")
        return b"".join(field(number, word.encode()) for number, word in enumerate(words, start=1))

    def _registered(self, request: bytes, context: Any) -> bytes:
        self.refusal = dict(fields(request)).get(2, b"").decode()
        self.answered.set()
        return b""

    def _prepare(self, request: bytes, context: Any) -> bytes:
        answer = b""
        for namespace, uid, name in _claims(request):
            results = self._allocated(namespace, uid, name)
            self.prepared[uid] = [result["device"] for result in results]
            devices = b"".join(field(1, _device(result)) for result in results)
            answer += field(1, field(1, uid.encode()) + field(2, devices))
        return answer

    def _unprepare(self, request: bytes, context: Any) -> bytes:
        answer = b""
        for _, uid, _ in _claims(request):
            self.prepared.pop(uid, None)
            answer += field(1, field(1, uid.encode()) + field(2, b""))
        return answer

    def _allocated(self, namespace: str, uid: str, name: str) -> list[dict[str, Any]]:
        """What of a claim is this driver's; a claim may have devices of several."""
        claim = json.loads(self._cluster.kubectl("get", "resourceclaim", name, "-n", namespace, "-o", "json"))
        if claim["metadata"]["uid"] != uid:
            raise ValueError(f"ResourceClaim {namespace}/{name} is another one than {uid}")
        results = claim["status"]["allocation"]["devices"]["results"]
        return [result for result in results if result["driver"] == self.name]


def _claims(request: bytes) -> Iterator[tuple[str, str, str]]:
    """Namespace, uid and name of each claim that the kubelet asks for."""
    for _, claim in fields(request):
        words = dict(fields(claim))
        yield words[1].decode(), words[2].decode(), words[3].decode()


def _device(result: dict[str, Any]) -> bytes:
    """A device of an answer: nothing (CDI) has to be done in the container for it."""
    words = (result["request"], result["pool"], result["device"])
    return b"".join(field(number, word.encode()) for number, word in enumerate(words, start=1))


def _slice(driver: str, node: str, devices: Sequence[Device]) -> dict[str, Any]:
    listed = [
        {"name": each.name, "attributes": {"kind": {"string": each.kind}, _ROOT: {"string": each.root}}}
        for each in devices
    ]
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": driver, "nodeName": node, "pool": pool, "devices": listed}
    return {"apiVersion": _API, "kind": "ResourceSlice", "metadata": {"name": f"{node}-{driver}"}, "spec": spec}


@contextmanager
def driving(cluster: Cluster, node: Node, name: str, devices: Sequence[Device]) -> Iterator[Driver]:
    """Run driver ``name`` with ``devices`` on a node.

    Pods that have a claim on them must be gone at the end: without the driver the kubelet cannot let go of claims.
    """
    driver, kubelet = Driver(cluster, name), node.folder / "kubelet"
    sockets = (kubelet / driver.endpoint, kubelet / "plugins_registry" / f"{name}-reg.sock")
    published = _slice(name, node.name, devices)
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((driver,))
    try:
        for socket in sockets:  # the kubelet calls as soon as it sees the second
            server.add_insecure_port(f"unix://{socket}")
        server.start()
        assert driver.answered.wait(_REGISTER_S), f"the kubelet of {node.name} does not register {name}"
        assert not driver.refusal, f"the kubelet of {node.name} refuses {name}: {driver.refusal}"
        apply(cluster, published)
        yield driver
    finally:
        for socket in reversed(sockets):
            socket.unlink(missing_ok=True)
        server.stop(None).wait()
        cluster.kubectl("delete", "resourceslice", published["metadata"]["name"], "--ignore-not-found")
