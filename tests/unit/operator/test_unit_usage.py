"""How much is stored, from the metrics of a controller."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tq_operator.runtime.usage import Usage, storage_usage, together

DRAINED = 'tq_unit_drained{unit="a"} 0\ntq_unit_drained{unit="b"} 1\n'
UNITS = 'tq_unit_used_bytes{unit="a"} 5\ntq_unit_used_bytes{unit="b"} 7\n'


@pytest.mark.parametrize(
    ("text", "stored", "code"),
    [
        (f"{UNITS}tq_units_connected 2\n", 12, 200),
        (f"{UNITS}tq_units_connected 2\n", None, 503),
        (f"{UNITS}{DRAINED}tq_units_connected 2\n", 12, 200),
        # Started again from its journal: of a unit that is not back it knows the use at its registration.
        (f"{UNITS}tq_units_connected 1\n", None, 200),
        (f"{UNITS}tq_units_connected 0\n", None, 200),
        ("tq_units_connected 0\n", None, 200),
        (f'{UNITS}tq_unit_used_bytes{{unit="c"}} NaN\ntq_units_connected 3\n', None, 200),
        (f'{UNITS}tq_unit_used_bytes{{unit="c"}} +Inf\ntq_units_connected 3\n', None, 200),
        ("{", None, 200),
    ],
)
def test_what_is_stored_is_known_once_every_unit_is_back(text: str, stored: int | None, code: int) -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
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


def test_of_several_controllers_nothing_is_known_that_one_does_not_know() -> None:
    first, second = Usage(5, frozenset("ab")), Usage(7, frozenset("bc"))
    assert together([first]) == first
    assert together([first, second]) == Usage(7, frozenset("b"))
    assert together([first, Usage()]) == Usage()
