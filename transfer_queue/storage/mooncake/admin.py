"""The master's HTTP API of its metrics port. Blocking; answers are small except for the list of keys."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request

import msgspec

from transfer_queue.errors import ConnectionLostError

__all__ = ["Admin"]

# A proxy from the environment is never meant for the master.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class _Segment(msgspec.Struct):
    segment_name: str
    te_endpoint: str
    size_bytes: int
    allocator_used_bytes: int


class _Segments(msgspec.Struct):
    segments: list[_Segment]


class Admin:
    """Requests to ``address``: host:port, or several with ``;`` between, of masters of which one leads.

    Methods raise ConnectionLostError.
    """

    def __init__(self, address: str, timeout_s: float = 3.0) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._masters = address.split(";")

    def ready(self) -> bool:
        """Return whether a master serves: up and leader. A standby's /health is 200 as well."""
        return any(self._serves(master) for master in self._masters)

    def segment_usage(self, segment: str) -> tuple[int, int] | None:
        """(bytes used, capacity) of the segment called ``segment``; None if it is not mounted."""
        text = self._get("get_segments_detail")
        if text is None:
            return self._old_segment_usage(segment)
        try:
            found = msgspec.json.decode(text, type=_Segments).segments
        except msgspec.MsgspecError as error:
            raise ConnectionLostError(f"{self.address} does not answer like a Mooncake master: {error}") from None
        for item in found:
            if segment in (item.segment_name, item.te_endpoint):
                return item.allocator_used_bytes, item.size_bytes
        return None

    def _old_segment_usage(self, segment: str) -> tuple[int, int] | None:
        # Before 0.3.13: "<segment>\nUsed(bytes): N\nCapacity(bytes) : N"
        text = self._get(f"query_segment?segment={segment}") or ""
        numbers = [int(word) for word in text.split() if word.isdigit()]
        return (numbers[0], numbers[1]) if len(numbers) == 2 else None

    def keys(self, prefix: str) -> list[str]:
        """All complete keys that start with ``prefix``."""
        return [key for key in (self._get("get_all_keys") or "").split() if key.startswith(prefix)]

    def _serves(self, master: str) -> bool:
        try:
            text = self._ask(master, "health")
        except ConnectionLostError:
            return False
        # Old masters answer plain text.
        return text is not None and ('"service_ready":true' in text or "service_ready" not in text)

    def _leader(self) -> str:
        """Asked each time: what a master that lost the lead knows is old."""
        if len(self._masters) == 1:
            return self.address
        for master in self._masters:
            if self._serves(master):
                self._masters.remove(master)
                self._masters.insert(0, master)
                return master
        raise ConnectionLostError(f"none of the Mooncake masters {self.address} leads; check that their etcd answers")

    def _get(self, path: str) -> str | None:
        return self._ask(self._leader(), path)

    def _ask(self, master: str, path: str) -> str | None:
        """The answer; None for a refusal (older masters lack some paths)."""
        try:
            with _opener.open(f"http://{master}/{path}", timeout=self._timeout_s) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            error.close()
            return None
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionLostError(
                f"the Mooncake master's HTTP port {master} does not answer ({error}); check adminAddress"
            ) from None
