"""Blocks in a Mooncake store: storage units own the segments, clients move bytes through the transfer engine."""
