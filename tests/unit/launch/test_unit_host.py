"""Whoever reaches the port of a unit that waits for its controller."""

from __future__ import annotations

import json
import socket
import struct

from transfer_queue.compat.server_info import JOIN_PORT_NAME
from transfer_queue.compat.unit_host import UnitHost


def test_a_line_that_cannot_be_read_or_lacks_the_proof_changes_nothing() -> None:
    host = UnitHost("u", "127.0.0.1")
    try:
        guess = {"controller": "127.0.0.1:1", "secret": None, "nonce": "00" * 16, "proof": "00" * 32}
        unknown = json.dumps(guess).encode()
        for line in (b"[" * 4000, b"{}", unknown):
            with socket.create_connection(("127.0.0.1", host.get_zmq_server_info().ports[JOIN_PORT_NAME])) as peer:
                peer.settimeout(10.0)
                peer.sendall(line + b"\n")
                assert "error" in json.loads(peer.makefile().readline())
    finally:
        host.shutdown()


def test_peers_that_reset_or_stay_silent_stop_nobody_from_asking() -> None:
    host = UnitHost("u", "127.0.0.1")
    port = host.get_zmq_server_info().ports[JOIN_PORT_NAME]
    silent = socket.create_connection(("127.0.0.1", port))
    try:
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.sendall(b"{}\n")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it is a reset
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.settimeout(10.0)
            peer.sendall(b"{}\n")
            assert "error" in json.loads(peer.makefile().readline())
    finally:
        silent.close()
        host.shutdown()
