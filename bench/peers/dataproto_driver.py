"""No queue: a Ray driver passes the data on in the form of verl's DataProto. Only the PPO step runs it."""

from __future__ import annotations

from bench.peers.ray_store import RayStore

PEER = RayStore
