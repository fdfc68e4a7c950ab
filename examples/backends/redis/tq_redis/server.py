"""What both sides know: settings, names of keys, the scripts that run in the server, and its errors as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import redis.asyncio as redis
from redis import exceptions

from transfer_queue.config.document import Document, validate_document
from transfer_queue.errors import CapacityError, ConnectionLostError

__all__ = ["FREE", "PUT", "Keys", "Settings", "connect", "named_errors", "parse_settings"]


class Settings(Document):
    """Settings of the backend, as the controller hands them to clients and storage units."""

    url: str
    """``redis://HOST:PORT/DB``."""
    prefix: str = "tq"
    """Start of all keys; queues that share a server need different ones."""


def parse_settings(values: dict[str, Any]) -> Settings:
    """Raises ConfigError that names the field."""
    known = {name: value for name, value in values.items() if name != "prefault"}  # the memory backend's own
    return validate_document(Settings, known, "backend redis")


class Keys:
    """Names of what one storage unit keeps in the server."""

    def __init__(self, settings: Settings, unit: str) -> None:
        self._start = f"{settings.prefix}:{unit}"
        self.life = f"{self._start}:life"
        """Identity of what the unit holds: gone when the server forgot everything."""
        self.sizes = f"{self._start}:sizes"
        """Hash: block -> bytes."""
        self.used = f"{self._start}:used"

    def block(self, number: int) -> str:
        return f"{self._start}:block:{number}"


PUT: Final = """
-- keys: life, sizes, used, block; arguments: life, number of the block, capacity, bytes
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'lost' end
if redis.call('HEXISTS', KEYS[2], ARGV[2]) == 1 then return 'kept' end
if tonumber(redis.call('GET', KEYS[3]) or '0') + #ARGV[4] > tonumber(ARGV[3]) then return 'full' end
redis.call('SET', KEYS[4], ARGV[4])
redis.call('HSET', KEYS[2], ARGV[2], #ARGV[4])
redis.call('INCRBY', KEYS[3], #ARGV[4])
return 'stored'
"""
"""A put is one step in the server: two clients cannot both take the last space."""

FREE: Final = """
-- keys: sizes, used, block...; arguments: number of each block
for i, number in ipairs(ARGV) do
  local nbytes = redis.call('HGET', KEYS[1], number)
  if nbytes then
    redis.call('UNLINK', KEYS[2 + i])
    redis.call('HDEL', KEYS[1], number)
    redis.call('DECRBY', KEYS[2], nbytes)
  end
end
return #ARGV
"""


def connect(settings: Settings) -> redis.Redis:
    return redis.Redis.from_url(settings.url, socket_connect_timeout=5, socket_timeout=60)


@contextmanager
def named_errors(settings: Settings) -> Iterator[None]:
    """Errors of the Redis client as those that the protocol of backends names."""
    try:
        yield
    except exceptions.OutOfMemoryError as error:
        raise CapacityError(f"no capacity left in the Redis server at {settings.url}: raise its maxmemory") from error
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
        raise ConnectionLostError(
            f"the Redis server at {settings.url} cannot be reached ({error}): start it, or check the setting url"
        ) from error
