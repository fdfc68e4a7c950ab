"""Arrow Flight over TCP on loopback: one record batch, held by a server process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pyarrow as pa
import pyarrow.flight

from bench.data import Batch, Ragged
from bench.peers.base import Peer


class Server(pa.flight.FlightServerBase):  # type: ignore[misc]
    """Keeps the last batch of each name."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.tables: dict[bytes, Any] = {}

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        self.tables[descriptor.command] = reader.read_all()

    def do_get(self, context: Any, ticket: Any) -> Any:
        return pa.flight.RecordBatchStream(self.tables[ticket.ticket])


class Flight(Peer):
    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes]
        self._client: Any

    def start(self, attach: dict[str, Any] | None) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "bench.peers.flight"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._server.stdout is not None
        self._client = pa.flight.connect(f"grpc://127.0.0.1:{int(self._server.stdout.readline())}")

    def stop(self) -> None:
        self._client.close()
        self._server.terminate()
        self._server.wait(10)

    def prepare(self, batch: Batch) -> Any:
        columns: dict[str, Any] = {}
        for name, column in batch.items():
            if isinstance(column, Ragged):
                columns[name] = pa.LargeListArray.from_arrays(column.offsets, column.values)
            elif isinstance(column, list) or column.ndim == 1:
                columns[name] = pa.array(column)
            else:
                columns[name] = pa.FixedSizeListArray.from_arrays(column.reshape(-1), column.shape[1])
        return pa.table(columns)

    def put(self, prepared: Any) -> None:
        writer, _ = self._client.do_put(pa.flight.FlightDescriptor.for_command(b"batch"), prepared.schema)
        writer.write_table(prepared)
        writer.close()

    def get(self) -> Any:
        return self._client.do_get(pa.flight.Ticket(b"batch")).read_all()

    def column(self, got: Any, name: str) -> Any:
        column = got[name].combine_chunks()
        return column.flatten().to_numpy().reshape(len(column), -1)


PEER = Flight

if __name__ == "__main__":
    server = Server()
    print(server.port, flush=True)
    server.serve()
