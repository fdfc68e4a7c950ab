"""The protocol between processes, without I/O: frames, messages, handshake."""
