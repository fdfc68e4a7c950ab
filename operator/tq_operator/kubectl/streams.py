"""Connections into pods over the apiserver's WebSockets: a command in a container, ports of a pod on this machine."""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import stream
from websocket import ABNF, WebSocketException

from tq_operator.kubectl.access import Access
from tq_operator.runtime.cluster import ClusterError
from transfer_queue.config.attach import join_address
from transfer_queue.errors import ConfigError, ConnectionLostError, TransferQueueError

__all__ = ["Forwarder", "execute"]

_CHUNK = 1 << 16
_DATA, _ERROR = 0, 1
"""Channels of a forwarded port; the first frame of each only names the port."""


def execute(access: Access, pod: str, container: str, command: Sequence[str], heard: Callable[[str], None]) -> int:
    """Run ``command`` in a container of ``pod``; each line of its output goes to ``heard``.

    Returns its exit code. Raises ConnectionLostError if the connection ends before it.
    """
    core = client.CoreV1Api(access.api())
    options = {
        "container": container,
        "command": list(command),
        "stdin": False,
        "stdout": True,
        "stderr": True,
        "tty": False,
    }
    try:
        session = stream(core.connect_get_namespaced_pod_exec, pod, access.namespace, **options, _preload_content=False)
    except ApiException as error:
        raise TransferQueueError(f"cannot run a command in pod {pod}: {_words(error)}") from None
    pending = ""
    try:
        going = True
        while going:
            going = session.is_open()  # what comes with the end is read in a last round
            session.update(timeout=1.0)
            *lines, pending = (pending + session.read_channel(1) + session.read_channel(2)).split("\n")
            for line in lines:
                heard(line)
        if pending:
            heard(pending)
        return int(session.returncode)
    except (WebSocketException, OSError, TypeError, LookupError) as error:  # the last two: no exit code came
        raise ConnectionLostError(f"the connection to pod {pod} was lost ({error}); what it ran may go on") from None
    finally:
        _close(session)


class Forwarder:
    """A port of this machine whose connections reach a port of a pod, as long as the block lasts.

    ``find_pod`` names the pod of each connection, so that the port outlives the pod. ``failure`` says why the
    last connection could not be made; empty if it could. ``failed`` is told each of these.
    """

    def __init__(
        self,
        access: Access,
        find_pod: Callable[[], str],
        port: int,
        *,
        host: str = "127.0.0.1",
        local: int = 0,
        failed: Callable[[str], None] = lambda why: None,
    ) -> None:
        """``local`` 0: any free port. Raises ConfigError if it is taken."""
        self._access = access
        self._find_pod = find_pod
        self._port = port
        self._failed = failed
        self.failure = ""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, local), family=family)
        except OSError as error:
            raise ConfigError(
                f"port {local} of {host}: {error.strerror}; choose another, or any with :{port}"
            ) from None
        self.host, self.local = self._listener.getsockname()[:2]

    @property
    def address(self) -> str:
        return join_address(self.host, self.local)

    def __enter__(self) -> Forwarder:
        threading.Thread(target=self._accept, name=f"forward {self.local}", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # what wakes the accepting thread
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                pod = self._find_pod()
                core = client.CoreV1Api(self._access.api())
                # Only its WebSocket is used: it carries frames of a port, not of a command's streams.
                session = stream(
                    core.connect_get_namespaced_pod_portforward,
                    pod,
                    self._access.namespace,
                    ports=str(self._port),
                    _preload_content=False,
                    binary=True,
                )
                self.failure = ""
                try:
                    self._pump(connection, session.sock)
                finally:
                    _close(session)
            except ApiException as error:
                self.failure = _words(error)
            except (TransferQueueError, ClusterError, WebSocketException, OSError) as error:
                self.failure = str(error)
            if self.failure:
                self._failed(self.failure)

    def _pump(self, connection: socket.socket, remote: Any) -> None:
        """Carry bytes both ways until either end closes. Raises OSError, WebSocketException, ConnectionLostError."""
        opened = {_DATA: False, _ERROR: False}
        while True:
            buffered = isinstance(remote.sock, ssl.SSLSocket) and remote.sock.pending()
            ready = [remote.sock] if buffered else select.select([connection, remote.sock], [], [])[0]
            if remote.sock in ready:
                code, frame = remote.recv_data_frame(True)
                if code == ABNF.OPCODE_CLOSE:
                    return
                if code != ABNF.OPCODE_BINARY or not frame.data:
                    continue
                channel, data = frame.data[0], frame.data[1:]
                if not opened.get(channel, True):
                    opened[channel] = True
                elif channel == _DATA:
                    connection.sendall(data)
                elif channel == _ERROR and data:
                    raise ConnectionLostError(data.decode(errors="replace").strip())
            if connection in ready:
                data = connection.recv(_CHUNK)
                if not data:
                    return
                remote.send_binary(bytes([_DATA]) + data)


def _close(session: Any) -> None:
    """The socket as well, which the client leaves open where the other side closed first."""
    session.close()
    session.sock.shutdown()


def _words(error: ApiException) -> str:
    """The message of the apiserver in a refused handshake, whose text holds it between others."""
    text = str(error.reason or error)
    for found in re.findall(r"\{.*\}", text.replace("\\n", " "), re.S):
        start = found.rfind('{"kind":"Status"')
        if start >= 0:
            with contextlib.suppress(ValueError, KeyError):
                return str(json.loads(found[start:])["message"])
    return text
