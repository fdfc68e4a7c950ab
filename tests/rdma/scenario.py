"""Runs in the guest: what the fabric code decides on real devices, and data through Mooncake over them.

Prints ``RESULT {"name": …, …}`` lines, which test_rdma.py judges.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import preloaded
from transfer_queue.config import resource
from transfer_queue.fabric import resolve
from transfer_queue.launch.local import LocalStack
from transfer_queue.launch.plan import plan_local

ROWS = 64
BYTES_A_ROW = 1 << 16
HEAL_S = 240.0
READ_S = 20
"""How long a read without a link is tried: instead of 60, in which nothing else happens."""


def report(name: str, **facts: Any) -> None:
    print("RESULT " + json.dumps({"name": name, **facts}), flush=True)


def shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True)


@contextlib.contextmanager
def changed(do: str, undo: str) -> Iterator[None]:
    shell(do)
    try:
        yield
    finally:
        shell(undo)


# ------------------------------------------------------------------------------------------------------------ policies


def decide(
    name: str, policy: Any, device_name: str = "auto", protocol: str = "rdma", serves: bool = True, **environment: str
) -> None:
    decision = resolve(
        "/", environment, policy=policy, device_name=device_name, protocol=protocol, serves=serves
    ).decision
    report(
        name,
        transport=decision.transport,
        fallback=decision.fallback,
        reason=decision.reason,
        warnings=list(decision.warnings),
        devices=decision.settings.device_name.split(",") if decision.settings else [],
    )


def policies() -> None:
    decide("all-good", "required")
    decide("all-good-client", "required", serves=False)
    decide("one-named", "required", "mlx5_1")
    decide("wrong-name", "required", "mlx5_7")
    decide("one-good-one-wrong", "required", "mlx5_0,mlx5_7")
    decide("named-with-auto-discovery", "required", "mlx5_0", MC_MS_AUTO_DISC="1")
    decide("protocol-tcp", "required", "mlx5_0", protocol="tcp")
    decide("bad-gid-index", "required", MC_GID_INDEX="99")
    decide("one-down-named", "required", "mlx5_2")
    decide("one-good-one-down", "required", "mlx5_0,mlx5_2")
    decide("one-down-auto", "auto")
    with changed("mv /dev/infiniband/uverbs1 /dev/hidden", "mv /dev/hidden /dev/infiniband/uverbs1"):
        decide("no-uverbs-node", "auto")
    with changed("ip link set eth0 down", "ip link set eth0 up"):  # eth1, its other end, loses its carrier too
        decide("all-down-required", "required")
        decide("all-down-auto", "auto")
    with changed("mv /dev/infiniband /dev/hidden", "mv /dev/hidden /dev/infiniband"):
        decide("no-verbs-required", "required")
        decide("no-verbs-auto", "auto")
    small = subprocess.run(
        ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "bash", "-c",
         f"ulimit -l 64; {sys.executable} -m transfer_queue.fabric --policy required --json"],
        capture_output=True, text=True,
    )  # fmt: skip
    report("little-locked-memory", status=small.returncode, reason=small.stderr)
    wait_for_links()


def wait_for_links() -> None:
    for device in ("mlx5_0", "mlx5_1"):
        state = Path(f"/sys/class/infiniband/{device}/ports/1/state")
        while "ACTIVE" not in state.read_text():
            time.sleep(0.05)


# ---------------------------------------------------------------------------------------------------------------- data


def packets(device: str) -> int:
    folder = Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters")
    return sum(int((folder / f"{kind}_pkts").read_text()) for kind in ("sent", "rcvd"))


def loopback_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def queue_on(devices: str, port: int) -> LocalStack:
    """A queue whose processes use ``devices``, with ports from ``port`` on."""
    document = {
        "apiVersion": "transferqueue.io/v1alpha1",
        "kind": "TransferQueue",
        "metadata": {"name": "guest"},
        "spec": {
            "backend": {
                "mooncake": {
                    "protocol": "rdma",
                    "deviceName": devices,
                    "globalSegmentSize": "64Mi",
                    "zeroCopy": {"tensorBufferSize": "16Mi", "bytesBufferSize": "16Mi"},
                    "master": {"rpcPort": port, "httpMetadataPort": port + 1, "metricsPort": port + 2},
                }
            },
            "controller": {"port": port + 3, "metricsPort": port + 4},
            "storage": {"replicas": 1, "port": port + 5, "metricsPort": port + 6},
        },
    }
    return LocalStack(plan_local(resource.parse(document)), timeout_s=240.0)


def batch(seed: int) -> Any:
    """Dense, ragged and non-tensor fields; about ROWS * BYTES_A_ROW bytes."""
    import torch
    from tensordict import NonTensorStack, TensorDict

    draws = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 4096, (ROWS,), generator=draws)
    ragged = [torch.randint(0, 1 << 30, (int(length),), generator=draws) for length in lengths]
    return TensorDict(
        {
            "dense": torch.randint(0, 256, (ROWS, BYTES_A_ROW), generator=draws, dtype=torch.uint8),
            "ragged": torch.nested.as_nested_tensor(ragged, layout=torch.jagged),
            "text": NonTensorStack(*[f"row {row} of {seed}" * 9 for row in range(ROWS)]),
        },
        [ROWS],
    )


def equal(got: Any, put: Any) -> bool:
    import torch

    dense = got["dense"].to_padded_tensor(0) if got["dense"].is_nested else got["dense"]
    return bool(
        torch.equal(dense, put["dense"])
        and all(map(torch.equal, got["ragged"].unbind(), put["ragged"].unbind()))
        and list(got["text"]) == list(put["text"])
    )


def round_trip(name: str, seed: int) -> None:
    """Put and get a batch through the queue; how many packets each device and how many bytes loopback carried."""
    import transfer_queue as tq

    keys = [f"{name}-{row}" for row in range(ROWS)]
    data = batch(seed)
    before = (packets("mlx5_0"), packets("mlx5_1"), loopback_bytes())
    tq.kv_batch_put(keys=keys, partition_id=name, fields=data)
    same = equal(tq.kv_batch_get(keys=keys, partition_id=name), data)
    report(
        name,
        same=same,
        payload=ROWS * BYTES_A_ROW,
        mlx5_0=packets("mlx5_0") - before[0],
        mlx5_1=packets("mlx5_1") - before[1],
        loopback=loopback_bytes() - before[2],
    )


def link_down_and_up() -> None:
    """Take the link away under a live queue, read, give it back, read until it works."""
    import transfer_queue as tq

    keys = [f"link-{row}" for row in range(ROWS)]
    data = batch(7)
    tq.kv_batch_put(keys=keys, partition_id="link", fields=data)
    outcomes: list[str] = []

    def read() -> str:
        try:
            return "same" if equal(tq.kv_batch_get(keys=keys, partition_id="link"), data) else "wrong bytes"
        except tq.TransferQueueError as error:
            return f"{type(error).__name__}: {error}"

    shell("ip link set eth0 down")
    outcomes.append(read())  # until its time is over
    shell("ip link set eth0 up")
    wait_for_links()
    started = time.monotonic()
    while outcomes[-1] != "same" and time.monotonic() - started < HEAL_S:
        outcomes.append(read())
        time.sleep(0.5)
    report("link", first=outcomes[0], last=outcomes[-1], wrong=outcomes.count("wrong bytes"), tries=len(outcomes))
    round_trip("after-link", 8)


def load() -> None:
    """What the queues and their user need first, while policies are judged."""
    preloaded.ServerPopen([sys.executable, "-c", ""]).wait()
    from torch import compiler

    # tensordict marks functions for torch's compiler, which nothing here uses: half of the import is that compiler.
    compiler.allow_in_graph = compiler.assume_constant_result = lambda function: function
    import tensordict  # noqa: F401


def main() -> int:
    began = time.monotonic()

    def reached(what: str) -> None:
        report(what, seconds=round(time.monotonic() - began, 1))

    one, two = queue_on("mlx5_0", 21000), queue_on("mlx5_0,mlx5_1", 22000)
    loading = threading.Thread(target=load)
    loading.start()
    policies()
    reached("policies judged")
    with (
        preloaded.servers(),
        concurrent.futures.ThreadPoolExecutor(1) as beside,
        contextlib.ExitStack() as queues,
    ):
        queues.enter_context(one.start())
        reached("first queue up")
        starting = beside.submit(two.start)
        loading.join()
        import transfer_queue as tq

        attach(one)
        round_trip("one-device", 1)
        tq.close()
        queues.enter_context(starting.result())
        reached("second queue up")
        attach(two)
        round_trip("two-devices", 2)
        tq.close()
        os.environ["TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT"] = str(READ_S)
        attach(one)
        link_down_and_up()
        tq.close()
        reached("data moved")
    reached("all down")
    return 0


def attach(queue: LocalStack) -> None:
    import transfer_queue as tq

    os.environ["TQ_CONFIG_FILE"] = str(queue.write_attach_config())
    tq.init()


if __name__ == "__main__":
    sys.exit(main())
