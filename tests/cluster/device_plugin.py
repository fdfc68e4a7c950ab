"""A device plugin for the kubelet, as those of RDMA are: it offers devices and mounts what the node has into pods.

Messages of the API (k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto) are a few strings, written by hand.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from tests.cluster.protobuf import field

__all__ = ["offering"]

_VERSION = b"v1beta1"
_ALIVE_S = 60


def _devices(names: Sequence[str]) -> bytes:
    """A ListAndWatchResponse."""
    return b"".join(field(1, field(1, name.encode()) + field(2, b"Healthy")) for name in names)


def _allocation(mounts: dict[str, str]) -> bytes:
    """An AllocateResponse for one container; ``mounts``: path in it -> path on the node, read-only."""
    listed = [
        field(1, inside.encode()) + field(2, outside.encode()) + bytes([3 << 3, 1])
        for inside, outside in mounts.items()
    ]
    return field(1, b"".join(field(2, mount) for mount in listed))


class _Plugin(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, devices: Sequence[str], mounts: dict[str, str]) -> None:
        self._devices, self._mounts = devices, mounts
        self.over = threading.Event()

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method.rpartition("/")[2]
        if method == "ListAndWatch":
            return grpc.unary_stream_rpc_method_handler(self._list)
        answers = {"GetDevicePluginOptions": b"", "Allocate": _allocation(self._mounts)}
        if method not in answers:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda request, context: answers[method])

    def _list(self, request: bytes, context: Any) -> Iterator[bytes]:
        yield _devices(self._devices)
        self.over.wait()


@contextmanager
def offering(folder: Path, resource: str, devices: Sequence[str], mounts: dict[str, str]) -> Iterator[None]:
    """Offer ``devices`` as ``resource`` to the kubelet whose device-plugins folder is ``folder``.

    Whoever gets one sees ``mounts``: path in the container -> path on the node.
    """
    endpoint = resource.replace("/", "-") + ".sock"
    plugin = _Plugin(devices, mounts)
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((plugin,))
    server.add_insecure_port(f"unix://{folder / endpoint}")
    server.start()
    try:
        with grpc.insecure_channel(f"unix://{folder / 'kubelet.sock'}") as channel:
            register = channel.unary_unary("/v1beta1.Registration/Register")
            words = (_VERSION, endpoint.encode(), resource.encode())
            register(b"".join(field(number, word) for number, word in enumerate(words, start=1)), timeout=_ALIVE_S)
        yield
    finally:
        plugin.over.set()
        server.stop(None).wait()
