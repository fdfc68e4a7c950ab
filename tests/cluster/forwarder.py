"""Carry connections from a listening socket of the machine's own namespace to the API server in the cluster's.

Run as a program: forwarder.py LISTENING_FD NAMESPACE_FILE ADDRESS PORT. A socket stays in the namespace it was
made in, so one process that has moved into the cluster's namespace can still answer on the machine's loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import sys

CLONE_NEWNET = 0x40000000
CHUNK_BYTES = 1 << 16


def enter_network(file: str) -> None:
    """Move this process into the network namespace kept by `file`."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(file, os.O_RDONLY)
    try:
        if libc.setns(handle, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), file)
    finally:
        os.close(handle)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until `reader` ends, then pass the end on."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def serve(listener: socket.socket, address: str, port: int) -> None:
    """Answer on `listener` until killed."""

    async def carry(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            server, to_server = await asyncio.open_connection(address, port)
            try:
                await asyncio.gather(pump(client, to_server), pump(server, to_client))
            finally:
                to_server.close()
        except OSError as error:
            print(f"cannot reach {address}:{port}: {error}", flush=True)
        finally:
            to_client.close()

    await (await asyncio.start_server(carry, sock=listener)).serve_forever()


if __name__ == "__main__":
    inherited = socket.socket(fileno=int(sys.argv[1]))
    enter_network(sys.argv[2])
    asyncio.run(serve(inherited, sys.argv[3], int(sys.argv[4])))
