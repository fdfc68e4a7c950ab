"""The process that tests/preloaded.py forks: ``python -m tests.nursery FILE_DESCRIPTOR MODULE …``.

It imports what programs of tests share and ends with its caller. A forked process leaves ``serve`` with its request,
becomes that program, and ends as any interpreter does, through its exit handlers.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import socket
import sys
import types
import warnings

OWN_PATHS = sys.path[1:]
PROGRAMS = ("transfer_queue.runtime.controller", "transfer_queue.runtime.storage_unit")
MOST_FILES = 32


def load(modules: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in modules:
            importlib.import_module(module)
            if module in PROGRAMS:
                del sys.modules[module]  # it is run as __main__, what it imports stays
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"an import has started {threads - 1} threads, which a fork would lose"
    gc.freeze()  # else each forked process walks over all of it when it ends, and copies its pages: a second of CPU


def serve(connection: socket.socket) -> tuple[dict[str, object], list[int]]:
    """Fork for each request; returns in the forked process only, and exits with the last caller."""
    while True:
        head, files, _, _ = socket.recv_fds(connection, 4, MOST_FILES)
        if not head:
            os._exit(0)
        size, content = int.from_bytes(head, "big"), b""
        while len(content) < size:
            content += connection.recv(size - len(content))
        reading, writing = os.pipe()
        adopted, between_lives = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid == 0:
                os.close(between_lives)
                os.read(adopted, 1)
                for file in (adopted, reading, writing):
                    os.close(file)
                return json.loads(content), files
            os.write(writing, b"%16d" % pid)
            os._exit(0)
        os.waitpid(between, 0)  # only then is the caller the program's parent
        connection.sendall(os.read(reading, 16))
        for file in (*files, reading, writing, adopted, between_lives):
            os.close(file)


def become(request: dict, files: list[int]) -> tuple[str, str]:  # type: ignore[type-arg]
    """Take files, folder, environment, path and arguments of the program; returns what it runs: "-c" or "-m" and code
    or module, or "" and the path of a script."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, max(request["files"]) + 1) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(request["files"], moved, strict=True):
        os.dup2(file, number)
        os.close(file)
    if request.get("session"):
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    output, errors = (io.BufferedWriter(io.FileIO(number, "w", closefd=False)) for number in (1, 2))
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(output, encoding="utf-8", line_buffering=at_once)
    sys.stderr = io.TextIOWrapper(errors, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    words = request["argv"]
    kind, what = words[:2] if words[0] in ("-c", "-m") else ("", words[0])
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = {"-c": "", "-m": os.getcwd()}.get(kind, os.path.dirname(os.path.abspath(what)))
    sys.path[:] = [first, *given, *OWN_PATHS]
    sys.path_importer_cache.clear()
    sys.argv[:] = [kind or what, *words[2 if kind else 1 :]]
    sys.modules["numpy"].random.seed()
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    return kind, what


if __name__ == "__main__":
    caller = socket.socket(fileno=int(sys.argv[1]))
    load(sys.argv[2:])
    wanted = serve(caller)
    caller.close()
    kind, what = become(*wanted)
    if kind == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    elif kind == "-c":
        exec(compile(what, "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.modules["__main__"].__file__ = what
        with open(what, "rb") as script:
            source = script.read()
        exec(compile(source, what, "exec"), sys.modules["__main__"].__dict__)
