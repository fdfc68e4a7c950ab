"""No queue: a Ray driver passes the data of every stage on. Only the PPO step runs it."""

from __future__ import annotations

from bench.peers.ray_store import RayStore

PEER = RayStore
