"""Looking at data and changing it: ``ls``, ``get``, ``put``, ``clear``, ``tail``."""

from __future__ import annotations

import json
import math
import sys
import time
from typing import Annotated, Any, Optional

import typer

from transfer_queue._printable import printable
from transfer_queue.cli.connection import ControllerConnection, ControllerOption, QueueOption, find_queue, partitions
from transfer_queue.cli.faults import faults, say
from transfer_queue.cli.output import Output, OutputOption, human_bytes, make_table, show
from transfer_queue.control.commands import ListPartitions
from transfer_queue.control.puts import did_you_mean, name_some
from transfer_queue.errors import ConfigError, KeyNotFoundError, RequestError, UnknownPartitionError, WaitTimeoutError

__all__ = ["clear", "get", "ls", "parse_fields", "parse_json", "put", "reset", "tail"]

_NOT_FINITE = ("inf", "-inf", "nan")
"""Numbers that JSON does not have."""

Partition = Annotated[str, typer.Argument(help="Name of a partition.", show_default=False, autocompletion=partitions)]
Keys = Annotated[list[str], typer.Argument(help="Keys of rows.", show_default=False)]


def ls(
    partition: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="By default all partitions are listed.", show_default=False, autocompletion=partitions),
    ] = None,
    queue: QueueOption = None,
    controller: ControllerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """List partitions, or the keys of one with their tags."""
    with faults(), ControllerConnection(find_queue(queue, controller)) as link:
        if partition is None:
            found = link.look()["partitions"]
            document: Any = [
                {name: item[name] for name in ("name", "rows", "keys", "bytes", "fields", "tasks")} for item in found
            ]
            rows = [
                [item["name"], item["rows"], item["keys"], human_bytes(item["bytes"]), ", ".join(item["fields"])]
                for item in found
            ]
            show(document, output, lambda: [make_table(["PARTITION", "ROWS", "KEYS", "BYTES", "FIELDS"], rows)])
            return
        keys = _keys(link, partition)
        if keys is None:
            raise _unknown(partition, link.request(ListPartitions("")).value)
        show(keys, output, lambda: [make_table(["KEY", "TAG"], [[key, _short(tag)] for key, tag in keys.items()])])


def get(
    partition: Partition,
    keys: Keys,
    field: Annotated[Optional[list[str]], typer.Option("--field", "-F", help="Only this field; repeatable.")] = None,  # noqa: UP045
    queue: QueueOption = None,
    controller: ControllerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Show rows: every field, which all of them must have, or the named ones. JSON and YAML give whole tensors."""
    with faults():
        from transfer_queue.client.client import Client

        client = Client("tq", find_queue(queue, controller))
        try:
            batch = client.run(client.kv.get, list(keys), partition, field or None)
        except KeyNotFoundError as error:
            raise KeyNotFoundError(f"{error}{_separated(keys)}") from None
        finally:
            client.close()
        columns = {str(name): _rows(batch.get(name)) for name in sorted(batch.keys())}
        document = {
            key: {name: _plain(column[row]) for name, column in columns.items()} for row, key in enumerate(keys)
        }
        table = [
            [key, name, _describe(column[row])] for row, key in enumerate(keys) for name, column in columns.items()
        ]
        show(document, output, lambda: [make_table(["KEY", "FIELD", "VALUE"], table)])


def put(
    partition: Partition,
    key: Annotated[str, typer.Argument(help="Key of the row, created if it is new.", show_default=False)],
    fields: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(help="NAME=JSON each; numbers and lists of numbers become tensors.", show_default=False),
    ] = None,
    tag: Annotated[Optional[str], typer.Option("--tag", help="A JSON object, merged into the row's tag.")] = None,  # noqa: UP045
    queue: QueueOption = None,
    controller: ControllerOption = None,
) -> None:
    """Create or update one row."""
    with faults():
        values = parse_fields(fields or [])
        parsed_tag = None if tag is None else parse_json("--tag", tag)
        if parsed_tag is not None and not isinstance(parsed_tag, dict):
            raise ConfigError(f'--tag: expected a JSON object such as {{"score": 1}}, got {tag}')
        if not values and parsed_tag is None:
            raise ConfigError("nothing to put: give fields as NAME=JSON, or --tag")
        from transfer_queue.client.client import Client

        client = Client("tq", find_queue(queue, controller))
        try:
            client.run(client.kv.put_one, key, partition, _tensors(values) or None, parsed_tag, None)
        finally:
            client.close()
        wrote = [*(["fields " + ", ".join(values)] if values else []), *(["its tag"] if parsed_tag is not None else [])]
        say(f"wrote {' and '.join(wrote)} of row {key!r} in partition {partition!r}")


def clear(
    partition: Partition,
    keys: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(help="Keys of rows; missing keys are reported.", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="The whole partition.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    queue: QueueOption = None,
    controller: ControllerOption = None,
) -> None:
    """Forget rows and free their storage. Exit code 1 if there was nothing to clear."""
    with faults():
        from transfer_queue.control.commands import Clear, Lookup, Snapshot

        if bool(keys) == everything:
            raise ConfigError("name the keys to clear, or the whole partition with --all")
        config = find_queue(queue, controller)
        if everything and not yes:
            if not sys.stdin.isatty():
                raise ConfigError(
                    f"clearing all of partition {partition!r} needs --yes: there is no terminal to confirm it"
                )
            typer.confirm(f"Forget every row of partition {partition!r}?", abort=True)
        with ControllerConnection(config) as link:
            names = link.request(ListPartitions("")).value
            if partition not in names:
                raise _unknown(partition, names)
            missing: list[str] = []
            if keys:
                there = link.request(Lookup(partition, keys=keys, fields=[], partial=True))
                rows = len(there.indexes) // 8
                missing = sorted(set(keys) - set(there.keys or ()))
                if not rows:
                    raise KeyNotFoundError(
                        f"nothing to clear: keys {missing} not found in partition {partition!r}{_separated(keys)}"
                    )
            else:
                rows = link.request(Snapshot(partition)).value["rows"]
            link.request(Clear(partition, keys=keys or None))
            gone = f"; not found: {', '.join(map(repr, missing))}" if missing else ""
            say(f"cleared {rows} row{'' if rows == 1 else 's'} of partition {partition!r}{gone}")


def reset(
    partition: Partition,
    task: Annotated[Optional[str], typer.Option(help="Name of a task; all tasks if left out.")] = None,  # noqa: UP045
    idle: Annotated[float, typer.Option(min=0, help="Only tasks that have not fetched for so many seconds.")] = 0.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    queue: QueueOption = None,
    controller: ControllerOption = None,
) -> None:
    """Forget what tasks have consumed, and with it their memory: their rows can be fetched again."""
    with faults():
        from transfer_queue.control.commands import ResetConsumption, Snapshot

        config = find_queue(queue, controller)
        if task is None and not idle and not yes:
            if not sys.stdin.isatty():
                raise ConfigError(
                    f"resetting every task of partition {partition!r} needs --yes where nobody can be asked; or give "
                    "--task or --idle"
                )
            typer.confirm(f"Make all rows of partition {partition!r} fetchable again for every task?", abort=True)
        with ControllerConnection(config) as link:
            names = link.request(ListPartitions("")).value
            if partition not in names:
                raise _unknown(partition, names)
            tasks = link.request(Snapshot(partition)).value["tasks"]
            if task is not None and task not in tasks:
                hint = did_you_mean([task], tasks) or f"; it has {name_some(sorted(tasks))}" if tasks else ""
                raise RequestError(f"no task {task!r} has taken rows of partition {partition!r}{hint}")
            before = len(tasks)
            link.request(ResetConsumption(partition, task, idle))
            gone = before - len(link.request(Snapshot(partition)).value["tasks"])
            say(f"partition {partition!r} has {gone} task{'' if gone == 1 else 's'} less")


def tail(
    partition: Partition,
    count: Annotated[Optional[int], typer.Option("--count", "-n", min=1, help="End after so many keys.")] = None,  # noqa: UP045
    timeout: Annotated[Optional[float], typer.Option("--timeout", min=0, help="Seconds; then exit code 1.")] = None,  # noqa: UP045
    interval: Annotated[float, typer.Option("--interval", min=0.05, help="Seconds between looks.")] = 1.0,
    from_start: Annotated[bool, typer.Option("--from-start", help="Show the keys that are there already.")] = False,
    queue: QueueOption = None,
    controller: ControllerOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Show keys with their tags as they come into a partition, also one that does not exist yet."""
    with faults(), ControllerConnection(find_queue(queue, controller)) as link:
        seen = set() if from_start else set(_keys(link, partition) or {})
        end = None if timeout is None else time.monotonic() + timeout
        shown = 0
        say(f"waiting for keys in partition {partition}")
        while True:
            present = _keys(link, partition) or {}
            for key, tag in present.items():
                if key in seen:
                    continue
                _print_line(key, tag, output)
                shown += 1
                if shown == count:
                    return
            seen = set(present)  # a cleared key may be put again
            if end is not None and time.monotonic() >= end:
                raise WaitTimeoutError(f"{shown} keys came into partition {partition!r} within {timeout:g} s")
            time.sleep(interval)


def parse_fields(items: list[str]) -> dict[str, Any]:
    """``NAME=JSON`` each -> values. Raises ConfigError."""
    fields: dict[str, Any] = {}
    for item in items:
        name, separator, text = item.partition("=")
        if not separator or not name:
            raise ConfigError(f"{item!r} is not a field; write NAME=JSON, for example reward=1.0 or text='\"hello\"'")
        if name in fields:
            raise ConfigError(f"field {name!r} is given twice; give each field once, several values as {name}=[1,2]")
        fields[name] = parse_json(name, text)
    return fields


def parse_json(name: str, text: str) -> Any:
    """The value of the field or option ``name``. Raises ConfigError, also where reading would lose something."""
    if text in _NOT_FINITE:
        return float(text)
    try:
        return json.loads(text, parse_float=_finite, object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        quotes = not name.startswith("--") and text.isidentifier()
        hint = f"; text needs quotes of its own: {name}='\"{text}\"'" if quotes else ""
        raise ConfigError(f"{name}: {text!r} is not JSON ({error}){hint}") from None
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is beyond the range of a float; write inf or -inf if that is meant")
    return number


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"name {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return found


def _tensors(values: dict[str, Any]) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {}
    for name, value in values.items():
        numeric = isinstance(value, int | float) or (isinstance(value, list) and value)
        try:
            found[name] = torch.tensor(value) if numeric else value
        except (TypeError, ValueError, RuntimeError):  # lists of text, or of unequal lengths, are values as they are
            found[name] = value
    return found


def _separated(keys: list[str]) -> str:
    """A hint for keys that were given as a list with commas."""
    joined = next((key for key in keys if "," in key.strip(",")), None)
    return "" if joined is None else f"; separate keys by spaces: {' '.join(filter(None, joined.split(',')))}"


def _unknown(partition: str, names: list[str]) -> UnknownPartitionError:
    hint = did_you_mean([partition], names) or "; tq ls shows the partitions"
    return UnknownPartitionError(f"partition {partition!r} not found{hint}")


def _keys(link: ControllerConnection, partition: str) -> dict[str, Any] | None:
    from transfer_queue.control.commands import ListKeys

    found: dict[str, dict[str, Any]] = link.request(ListKeys(partition)).value
    return found.get(partition)


def _print_line(key: str, tag: dict[str, Any], output: Output) -> None:
    if output is Output.json:
        typer.echo(json.dumps({"key": key, "tag": tag}, default=str))
    elif output is Output.yaml:
        typer.echo(f"- {json.dumps({'key': key, 'tag': tag}, default=str)}")
    else:
        typer.echo(printable(f"{key}  {_short(tag)}".rstrip()))
    sys.stdout.flush()


def _short(tag: dict[str, Any]) -> str:
    return json.dumps(tag, default=str, ensure_ascii=False) if tag else ""


def _rows(column: Any) -> list[Any]:
    if getattr(column, "is_nested", False):
        return list(column.unbind())
    if getattr(column, "dtype", None) is not None:
        return list(column)
    return column.tolist() if hasattr(column, "tolist") else list(column)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)
    return value


def _describe(value: Any) -> str:
    if getattr(value, "dtype", None) is None:  # stacks of values have the name, and no dtype
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"
    flat = value.reshape(-1)
    some = ", ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in flat[:8].tolist())
    more = ", …" if flat.numel() > 8 else ""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}: {some}{more}"
