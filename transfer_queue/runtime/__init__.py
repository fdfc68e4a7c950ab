"""Processes: connections, and the asyncio shells around the pure cores. Imports no torch."""
