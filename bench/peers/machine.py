"""No store: the process in which the limits of the machine are measured."""

from __future__ import annotations

from bench.peers.base import Peer

PEER = Peer
