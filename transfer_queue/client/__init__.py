"""Clients: one I/O thread a process, an async client, and the sync facade derived from it."""
