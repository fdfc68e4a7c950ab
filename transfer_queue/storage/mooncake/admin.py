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
    """Requests to ``address`` (host:port). Methods raise ConnectionLostError."""

    def __init__(self, address: str, timeout_s: float = 3.0) -> None:
        self.address = address
        self._timeout_s = timeout_s

    def ready(self) -> bool:
        """Whether the master serves: up and leader. A standby's /health is 200 as well."""
        try:
            text = self._get("health")
        except ConnectionLostError:
            return False
        if text is None:
            return False
        return '"service_ready":true' in text or "service_ready" not in text  # old masters answer plain text

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

    def _get(self, path: str) -> str | None:
        """The answer; None for a refusal (older masters lack some paths)."""
        try:
            with _opener.open(f"http://{self.address}/{path}", timeout=self._timeout_s) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            error.close()
            return None
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionLostError(
                f"the Mooncake master's HTTP port {self.address} does not answer ({error}); check adminAddress"
            ) from None
