"""Blocks in a Redis server: an example of a storage backend for TransferQueue.

The entry point of the package names this module; it loads nothing until one of the sides is asked for.
"""

CLIENT = "tq_redis.client"
UNIT = "tq_redis.unit"
TESTING = "tq_redis.testing"
