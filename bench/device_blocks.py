"""Rows that stay on a GPU (``placement="device"``), two processes on one GPU: ``python -m bench.device_blocks``.

Prints one JSON object: GB/s of put and get, beside rows in the host's shared memory, and, for each order in which
writer and reader are killed, what readers saw and the memory of the GPU before and after. Ends with status 1 if wrong
bytes were read, an error was not the expected one, or memory did not come back. Needs a CUDA build of torch and a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

ROWS = int(os.environ.get("ROWS", 256))
"""Of each batch: their keys take a good part of the time."""
_CALL_S = 120.0
_SLACK_MIB = 64
"""Memory that the driver may keep back."""


# ----------------------------------------------------------------------------------------------- a process of its own


class Worker:
    """What a writer or a reader does when it is told to."""

    def __init__(self, address: str) -> None:
        import torch

        import transfer_queue as tq

        self.torch, self.tq = torch, tq
        torch.cuda.init()
        tq.init({"controller": {"addresses": [address]}})

    def batch(self, value: int, megabytes: int) -> Any:
        from tensordict import TensorDict

        width = (megabytes << 20) // ROWS // 4
        x = self.torch.full((ROWS, width), float(value), device="cuda")
        x[:, 0] = self.torch.arange(ROWS, device="cuda")
        return TensorDict({"x": x}, batch_size=[ROWS])

    def put(self, partition: str, value: int, megabytes: int, placement: Any, rounds: int = 1) -> list[float]:
        """Seconds of each put of the same rows."""
        batch = self.batch(value, megabytes)
        found = []
        for _ in range(rounds):
            self.torch.cuda.synchronize()
            start = time.perf_counter()
            self.tq.kv_batch_put(_keys(), partition, batch, placement=placement)
            found.append(time.perf_counter() - start)
        return found

    def get(self, partition: str, value: int, device: str = "cuda", rounds: int = 1, into: bool = False) -> list[float]:
        """Seconds of each get; the values are checked."""
        found = []
        out: dict[str, Any] = {}
        for _ in range(rounds + into):
            self.torch.cuda.synchronize()
            start = time.perf_counter()
            if out:
                self.tq.kv_batch_get(_keys(), partition, out=out)
                x = out["x"]
            else:
                x = self.tq.kv_batch_get(_keys(), partition, device=device)["x"]
                x = x.values().view(ROWS, -1) if x.is_nested else x
            self.torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
            self.check(x, value)
            out = {"x": x} if into else {}
        return found[1:] if into else found

    def check(self, x: Any, value: int) -> None:
        rows = self.torch.arange(ROWS, device=x.device, dtype=x.dtype)
        assert bool((x[:, 0] == rows).all()), "rows of another batch"
        assert bool((x[:, 1:] == float(value)).all()), "wrong bytes"

    def get_some(self, partition: str, value: int) -> list[int]:
        """Rows in another order, some twice."""
        keys = [_keys()[row] for row in (7, 3, 3, ROWS - 1)]
        x = self.tq.kv_batch_get(keys, partition, device="cuda")["x"]
        x = x.values().view(4, -1) if x.is_nested else x
        assert bool((x[:, 1:] == float(value)).all()), "wrong bytes"
        return [int(row) for row in x[:, 0].tolist()]

    def get_until_error(self, partition: str, megabytes: int) -> str:
        """Read until that fails: each read is of one put alone. Returns the error."""
        end = time.monotonic() + _CALL_S
        while time.monotonic() < end:
            try:
                x = self.tq.kv_batch_get(_keys(), partition, device="cuda")["x"]
            except self.tq.TransferQueueError as error:
                return f"{type(error).__name__}: {error}"
            x = x.values().view(ROWS, -1) if x.is_nested else x
            value = int(x[0, 1])
            self.check(x, value)
        return ""

    def put_for_ever(self, partition: str, megabytes: int) -> None:
        for value in range(1 << 20):
            self.tq.kv_batch_put(_keys(), partition, self.batch(value, megabytes), placement="device")

    def error_of_get(self, partition: str) -> str:
        try:
            self.tq.kv_batch_get(_keys(), partition, device="cuda")
        except self.tq.TransferQueueError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def clear(self, partition: str) -> None:
        self.tq.get_client().clear_partition(partition)

    def units(self) -> list[list[Any]]:
        """[name, bytes used] of each storage unit."""
        return [[unit["name"], unit["used"]] for unit in self.tq.status().units]

    def end(self) -> None:
        self.tq.close()


def _keys() -> list[str]:
    return [f"row-{number}" for number in range(ROWS)]


def serve(address: str) -> None:
    worker = Worker(address)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            answer = {"value": getattr(worker, call.pop("do"))(**call)}
        except Exception as error:  # noqa: BLE001 - told to the parent, which decides
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


class Process:
    """A worker as its parent sees it."""

    def __init__(self, address: str, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "bench.device_blocks", "--serve", address]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self._answer()

    def tell(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return self._answer()

    def answer(self) -> Any:
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer = json.loads(line)
                if "error" in answer:
                    raise AssertionError(answer["error"])
                return answer.get("value")
        raise AssertionError(f"the process ended with status {self._process.wait()}")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def finish(self) -> None:
        self.ask("end")
        self._process.communicate(timeout=_CALL_S)


# ----------------------------------------------------------------------------------------------------------- the parent


def gpu_mib() -> int:
    """MiB of the GPU in use by anybody."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        return int(subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0])
    program = "import torch; free, total = torch.cuda.mem_get_info(); print((total - free) >> 20)"
    return int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


class Bench:
    def __init__(self, address: str, megabytes: int, rounds: int) -> None:
        self.address, self.megabytes, self.rounds = address, megabytes, rounds
        self.environment = {"TQ_DEVICE_MEMORY": f"{3 * megabytes}Mi", "TQ_PUT_WAIT": "60"}
        self.environment["TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT"] = "15"  # a get tries that long to reach a dead process
        self.problems: list[str] = []

    def process(self) -> Process:
        return Process(self.address, self.environment)

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.problems.append(what)

    def speed(self) -> dict[str, Any]:
        writer, reader = self.process(), self.process()
        result: dict[str, Any] = {}
        for placement in ("host", "device"):
            put = writer.ask(
                "put", partition=placement, value=7, megabytes=self.megabytes, placement=placement, rounds=self.rounds
            )
            result[f"put {placement}"] = self._rate(put[2:])
            get = reader.ask("get", partition=placement, value=7, rounds=self.rounds)
            result[f"get {placement}"] = self._rate(get[2:])
            result[f"first get {placement}"] = self._rate(get[:1])
            result[f"get into a tensor {placement}"] = self._rate(
                reader.ask("get", partition=placement, value=7, rounds=self.rounds, into=True)[1:]
            )
            result[f"get to the host {placement}"] = self._rate(
                reader.ask("get", partition=placement, value=7, device="cpu", rounds=3)[1:]
            )
            self.expect(
                reader.ask("get_some", partition=placement, value=7) == [7, 3, 3, ROWS - 1], f"rows of {placement}"
            )
        result["get by the writer device"] = self._rate(writer.ask("get", partition="device", value=7, rounds=3)[1:])
        result["device / host"] = {
            verb: round(result[f"{verb} device"] / result[f"{verb} host"], 1)
            for verb in ("put", "get", "get into a tensor")
        }
        self.expect(
            wait_until(lambda: any(used for name, used in writer.ask("units") if name.startswith("device-"))),
            "the unit of the GPU reports its bytes",
        )
        result["units"] = writer.ask("units")
        for number in range(4):  # more than the budget: the rest goes to the host
            writer.ask("put", partition=f"more-{number}", value=number, megabytes=self.megabytes, placement="device")
        for number in range(4):
            reader.ask("get", partition=f"more-{number}", value=number)
        for partition in ("host", "device", *(f"more-{number}" for number in range(4))):
            writer.ask("clear", partition=partition)
        again = writer.ask("put", partition="again", value=1, megabytes=self.megabytes, placement="device", rounds=6)
        reader.ask("get", partition="again", value=1)
        result["put device after clear"] = self._rate(again[2:])
        writer.ask("clear", partition="again")
        reader.finish()
        writer.finish()
        return result

    def _rate(self, seconds: list[float]) -> float:
        """GB/s, median."""
        return round((self.megabytes << 20) / statistics.median(seconds) / 1e9, 2)

    def killed(self, order: str) -> dict[str, Any]:
        """``order``: who is killed, ``writer``, ``reader``, or both in that order."""
        before = gpu_mib()
        writer, reader = self.process(), self.process()
        size, name = self.megabytes // 4, f"kill {order}"
        writer.ask("put", partition=name, value=3, megabytes=size, placement="device")
        reader.ask("get", partition=name, value=3)
        found: dict[str, Any] = {"MiB before": before, "MiB with both": gpu_mib()}
        for victim in order.split(", "):
            {"writer": writer, "reader": reader}[victim].kill()
        if order == "reader":
            other = self.process()
            other.ask("get", partition=name, value=3)
            writer.ask("put", partition=name, value=4, megabytes=size, placement="device", rounds=12)
            other.ask("get", partition=name, value=4)
            other.finish()
            writer.finish()
        elif order == "writer":
            found["error"] = reader.ask("error_of_get", partition=name)
            self.expect("Error" in found["error"], f"{order}: a row of a dead process was read")
            reader.ask("clear", partition=name)
            reader.finish()
        found["MiB after"] = self._returned(before, order)
        return found

    def busy(self) -> dict[str, Any]:
        """The writer is killed while it writes and another reads: nobody sees other bytes."""
        before = gpu_mib()
        errors = []
        for number in range(4):
            writer, reader = self.process(), self.process()
            name = f"busy {number}"
            writer.ask("put", partition=name, value=0, megabytes=self.megabytes // 4, placement="device")
            writer.tell("put_for_ever", partition=name, megabytes=self.megabytes // 4)
            reader.tell("get_until_error", partition=name, megabytes=self.megabytes // 4)
            time.sleep(1.0 + number / 3)
            writer.kill()
            errors.append(reader.answer())
            self.expect("Error" in errors[-1], "busy: a read of a dead writer's row succeeded for two minutes")
            reader.ask("clear", partition=name)
            reader.finish()
        return {"errors": errors, "MiB before": before, "MiB after": self._returned(before, "busy")}

    def _returned(self, before: int, what: str) -> int:
        self.expect(
            wait_until(lambda: gpu_mib() <= before + _SLACK_MIB), f"{what}: memory of the GPU did not come back"
        )
        return gpu_mib()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return 0
    import torch

    from transfer_queue.launch.local import LocalStack, default_plan

    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here: run this on a machine with a GPU and a CUDA build of torch")
    stack = LocalStack(default_plan(units=1, unit_capacity=8 * arguments.megabytes << 20)).start()
    result: dict[str, Any] = {"torch": torch.__version__, "MB": arguments.megabytes}
    bench = Bench(stack.controller_address, arguments.megabytes, arguments.rounds)
    steps: list[tuple[str, Callable[[], Any]]] = [("GB/s", bench.speed)]
    steps += [
        (f"killed: {order}", partial(bench.killed, order))
        for order in ("reader", "writer", "writer, reader", "reader, writer")
    ]
    try:
        for name, step in [*steps, ("killed while busy", bench.busy)]:
            try:
                result[name] = step()
            except Exception as error:  # noqa: BLE001 - the other steps still tell something
                bench.problems.append(f"{name}: {type(error).__name__}: {error}")
            print(json.dumps({name: result.get(name)}), file=sys.stderr, flush=True)
    finally:
        stack.stop()
    result["problems"] = bench.problems
    print(json.dumps(result, indent=1))
    return 1 if bench.problems else 0


if __name__ == "__main__":
    sys.exit(main())
