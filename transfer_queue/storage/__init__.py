"""Backends that keep blocks of bytes, and the processes that hold them."""
