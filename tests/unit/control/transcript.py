"""Runs and writes transcripts: text files of commands with the replies, effects and states that follow.

A line that starts with ``>`` is input, those below it up to the next are what it led to. The words of the input:

    core {sampler: GRPOGroupNSampler(4), capacity: 8}     a new core
    at 2.5                                                 set the clock, expire what has to
    commit p {keys: [a, b], fields: [x, y], blocks: [1/7*2]}   block 7 of 2 rows on unit 1
    fetch#3 p {fields: [x], size: 2, task: t, wait: 5}     request 3 (of client 1)
    lookup p …, clear p …, tags p …, reset p …, keys p, partitions, produced p …, consumed p …, counts p
    move 1 [[7, 2, 9]]                                     block 7 of unit 1 is block 9 of unit 2 now
    cancel 3 / unit-lost 1 / unit-joined 1 [7, 8] / unknown 1 [7, 8]
    state / restart                                        the whole state; the state rebuilt from the journal

A field is written ``x``, or ``x:int64(3,)``, ``x~float32(None,)`` (ragged), ``x:text``, ``x:object``.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import yaml

from tests.unit.control.build import i64, ints, places
from transfer_queue import sampler as samplers
from transfer_queue.control import Answer, ControlCore, FreeBlocks, Journal, Parked
from transfer_queue.control import commands as c
from transfer_queue.control.records import Record
from transfer_queue.control.schema import FieldSchema
from transfer_queue.errors import TransferQueueError

__all__ = ["play"]


def play(text: str) -> str:
    """The transcript with all output replaced."""
    session = _Session()
    out: list[str] = []
    for line in text.splitlines():
        if line.startswith(">"):
            out.append(line)
            out += ["  " + shown for shown in session.run(line[1:].strip())]
        elif not line.startswith(" "):
            out.append(line)
    return "\n".join(out) + "\n"


class _Session:
    def __init__(self) -> None:
        self.now = 0.0
        self.options: dict[str, Any] = {}
        self.records: list[Record] = []
        self.core = ControlCore(journal=True)

    def run(self, line: str) -> list[str]:
        word, *rest = line.split(" ", 1 if line.startswith("core") else 2)
        word, _, request = word.partition("#")
        host = getattr(self, "_do_" + word.replace("-", "_"), None)
        if host is not None:
            shown: list[str] = host(*(yaml.safe_load(part) for part in rest))
        else:
            partition = rest[0] if rest else ""
            arguments = yaml.safe_load(rest[1]) if len(rest) > 1 else {}
            shown = self._apply(_COMMANDS[word](partition, arguments), int(request or 0))
        self.core.validate_state()
        return shown + self._effects()

    def _apply(self, command: c.Command, request: int) -> list[str]:
        try:
            reply = self.core.apply(command, self.now, client=1, request=request)
        except TransferQueueError as error:
            return [f"{type(error).__name__}: {error}"]
        return _show(reply)

    def _effects(self) -> list[str]:
        shown = []
        for effect in self.core.drain_effects():
            if isinstance(effect, Journal):
                self.records.append(effect.record)
            elif isinstance(effect, FreeBlocks):
                shown.append(f"=> free on unit {effect.unit}: {_join(effect.blocks)}")
            elif isinstance(effect, Answer):
                error = effect.error
                lines = [f"{type(error).__name__}: {error}"] if error else _show(effect.reply)
                shown.append(f"=> answer #{effect.request}: {lines[0]}")
                shown += ["   " + more for more in lines[1:]]
        return shown

    def _new(self) -> ControlCore:
        name = self.options.get("sampler", "SequentialSampler")
        kind, _, arguments = name.partition("(")
        values = ast.literal_eval("[" + arguments.rstrip(")") + "]")
        return ControlCore(
            sampler=getattr(samplers, kind)(*values),
            polling=self.options.get("polling", False),
            shard=self.options.get("shard", 0),
            sample_capacity=self.options.get("capacity"),
            journal=True,
        )

    # ------------------------------------------------------------------------------------------------- host's calls

    def _do_core(self, options: dict[str, Any] | None = None) -> list[str]:
        self.options = options or {}
        self.core, self.records, self.now = self._new(), [], 0.0
        return []

    def _do_at(self, now: float) -> list[str]:
        self.now = now
        self.core.tick(now)
        return []

    def _do_cancel(self, request: int) -> list[str]:
        self.core.cancel(1, request)
        return []

    def _do_unit_lost(self, unit: int) -> list[str]:
        self.core.unit_lost(unit, self.now)
        return []

    def _do_unit_joined(self, unit: int, inventory: list[int] | None = None) -> list[str]:
        self.core.unit_joined(unit, inventory)
        return []

    def _do_move(self, unit: int, moves: list[list[int]]) -> list[str]:
        try:
            return [_join(self.core.move_blocks(unit, [(old, to, new) for old, to, new in moves]))]
        except TransferQueueError as error:
            return [f"{type(error).__name__}: {error}"]

    def _do_unknown(self, unit: int, blocks: list[int]) -> list[str]:
        return [_join(self.core.unknown_blocks(unit, blocks))]

    def _do_state(self) -> list[str]:
        return self.core.describe().splitlines()

    def _do_restart(self) -> list[str]:
        before = self.core.describe(waiters=False)
        self.core = self._new()
        self.core.replay(self.records)
        assert self.core.describe(waiters=False) == before
        return ["the same state"]


# ------------------------------------------------------------------------------------------------------------- input


def _field(text: str) -> FieldSchema:
    match = re.fullmatch(r"(\w+)(?:([:~])(\w+)(\(.*\))?)?", text)
    assert match, text
    name, ragged, dtype, shape = match.groups()
    if dtype in ("text", "object"):
        return FieldSchema(name, dtype, {"text": "str"}.get(dtype, "object"))
    kind: Any = "ragged" if ragged == "~" else "dense"
    return FieldSchema(name, kind, dtype or "float32", ast.literal_eval(shape or "()"))


def _blocks(texts: list[str]) -> list[c.BlockRef]:
    found, start = [], 0
    for text in texts:
        unit, block, rows = (int(part) for part in re.split("[/*]", text))
        found.append(c.BlockRef(unit, block, start, rows, 10 * rows))
        start += rows
    return found


def _indexes(arguments: dict[str, Any]) -> bytes | None:
    return i64(*arguments["rows"]) if "rows" in arguments else None


def _commit(partition: str, a: dict[str, Any]) -> c.Command:
    return c.Commit(
        partition,
        keys=a.get("keys"),
        indexes=_indexes(a),
        append=a.get("append", 0),
        fields=[_field(text) for text in a.get("fields", [])],
        blocks=_blocks(a.get("blocks", [])),
        tags=a.get("tags"),
        lengths={
            name: b"".join(n.to_bytes(4, "little") for n in sizes) for name, sizes in a.get("lengths", {}).items()
        },
        wait_s=a.get("wait", 0),
    )


def _fetch(partition: str, a: dict[str, Any]) -> c.Command:
    params = {name: a[name] for name in ("dp_rank", "batch_index") if name in a}
    return c.Fetch(partition, a["fields"], a["size"], a["task"], a.get("wait", 0), params)


def _lookup(partition: str, a: dict[str, Any]) -> c.Command:
    return c.Lookup(
        partition, a.get("keys"), _indexes(a), a.get("fields"), a.get("partial", False), a.get("ready", False)
    )


_COMMANDS: dict[str, Any] = {
    "commit": _commit,
    "fetch": _fetch,
    "lookup": _lookup,
    "clear": lambda partition, a: c.Clear(partition, a.get("keys"), _indexes(a)),
    "tags": lambda partition, a: c.SetTags(partition, i64(*a["rows"]), a["tags"]),
    "reset": lambda partition, a: c.ResetConsumption(partition, a.get("task")),
    "keys": lambda partition, a: c.ListKeys(partition),
    "keys-of": lambda partition, a: c.KeysOf(partition, i64(*a["rows"])),
    "partitions": lambda partition, a: c.ListPartitions(partition),
    "produced": lambda partition, a: c.ProductionStatus(partition, a["fields"]),
    "consumed": lambda partition, a: c.ConsumptionStatus(partition, a["task"]),
    "counts": lambda partition, a: c.Snapshot(partition),
}


# ------------------------------------------------------------------------------------------------------------ output


def _join(items: Any) -> str:
    return " ".join(str(item) for item in items) or "none"


def _show(reply: object) -> list[str]:
    if isinstance(reply, Parked):
        return ["parked"]
    if isinstance(reply, c.Done):
        return ["done"]
    if isinstance(reply, c.Value):
        return [yaml.safe_dump(reply.value, default_flow_style=True, sort_keys=False, width=10_000).splitlines()[0]]
    if isinstance(reply, c.Committed):
        tags = f"; tags {reply.tags}" if reply.tags is not None else ""
        return [f"rows {_join(ints(reply.indexes))}; ready: {_join(reply.ready)}{tags}"]
    if isinstance(reply, c.StatusArrays):
        return _show_status(reply)
    assert isinstance(reply, c.Batch), reply
    return _show_batch(reply)


def _show_status(reply: c.StatusArrays) -> list[str]:
    if reply.indexes is None:
        return ["unknown"]
    width, status = len(reply.columns), ints(reply.status, "i1")
    return [
        f"row {index}: " + _join(f"{name}={status[i * width + j]}" for j, name in enumerate(reply.columns))
        for i, index in enumerate(ints(reply.indexes))
    ] or ["no rows"]


def _show_batch(batch: c.Batch) -> list[str]:
    indexes = ints(batch.indexes)
    if not indexes:
        return ["no rows"]
    fields = _join(f"{f.name}:{f.kind}:{f.dtype}{'' if f.shape is None else f.shape}" for f in batch.fields)
    lines = [f"rows {_join(indexes)}; fields: {fields}"]
    found = places(batch)
    for i, status in enumerate(ints(batch.status, "i1")):
        parts = [f"row {indexes[i]}" + ("" if batch.keys is None else f" key {batch.keys[i]}")]
        parts += [f"tag {batch.tags[i]}"] if batch.tags and batch.tags[i] else []
        for name, cells in found.items():
            cell = cells[i]
            length = f" length {ints(batch.lengths[name], '<i4')[i]}" if name in batch.lengths else ""
            parts.append(f"{name} -" if cell is None else f"{name} {cell[0]}/{cell[1]}[{cell[2]}]{length}")
        lines.append(("  " if status else "  (not ready) ") + ", ".join(parts))
    return lines
