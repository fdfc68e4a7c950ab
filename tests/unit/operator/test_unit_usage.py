"""How much is stored, from the metrics of a controller."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tq_operator.runtime.usage import Usage, storage_usage

DRAINED = 'tq_unit_drained{unit="a"} 0\ntq_unit_drained{unit="b"} 1\n'
UNITS = 'tq_unit_used_bytes{unit="a"} 5\ntq_unit_used_bytes{unit="b"} 7\n'


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        (f"{UNITS}tq_units_connected 2\n", 12),
        (f"{UNITS}{DRAINED}tq_units_connected 2\n", 12),
        # Started again from its journal: of a unit that is not back it knows the use at its registration.
        (f"{UNITS}tq_units_connected 1\n", None),
        (f"{UNITS}tq_units_connected 0\n", None),
        ("tq_units_connected 0\n", None),
        ("{", None),
    ],
)
def test_what_is_stored_is_known_once_every_unit_is_back(text: str, stored: int | None) -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        found = storage_usage(f"http://127.0.0.1:{server.server_port}/metrics")
        assert found == Usage(stored, frozenset({"b"} if "tq_unit_drained" in text else ()))
        thread.join()
