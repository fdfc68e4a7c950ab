"""Which blocks a save need not write, as an earlier checkpoint in the same place has them in its files."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import msgspec

from transfer_queue.checkpoint.directory import CheckpointDirectory
from transfer_queue.checkpoint.files import BlockPlace, BorrowedFile, check_places, read_file, read_manifest
from transfer_queue.errors import CheckpointError, CheckpointNotFoundError

__all__ = ["Loan", "identity_of", "lent"]

log = logging.getLogger(__name__)

_MOST_SMALL = 16
_SMALL_BYTES = 64 << 20
"""A checkpoint borrows at most so many files below this size, as each save adds one. The blocks of further files are
written to a file of the new checkpoint."""


class Loan(NamedTuple):
    """``places``: identity -> place of a block in ``files``, which count from -1 down."""

    files: list[BorrowedFile]
    places: dict[bytes, BlockPlace]


def identity_of(run: str, block: int, nbytes: int) -> bytes:
    """Names the bytes of a block, which never change. ``run``: the life of its controller, in which block numbers are
    unique."""
    return hashlib.blake2b(f"{run}/{block}/{nbytes}".encode(), digest_size=16).digest()


@contextmanager
def lent(
    directory: CheckpointDirectory, former: CheckpointDirectory | None, wanted: Collection[bytes]
) -> Iterator[Loan]:
    """The blocks ``wanted`` that a save to ``directory`` may refer to, in files that stay meanwhile.

    ``former``: an earlier checkpoint of the same series; None: the one that the directory has. Without a sound one,
    none are lent.
    """
    loan = Loan([], {})
    with ExitStack() as held:
        try:
            if former is None:
                loan = _loan(directory, "", wanted)
            else:
                held.enter_context(former.locked(shared=True))
                loan = _loan(former, f"../{str(former).rpartition('/')[2]}/", wanted)
        except CheckpointNotFoundError as error:  # there is none, or one of its files is gone
            log.debug("all blocks are written: %s", error)
        except (CheckpointError, OSError, msgspec.DecodeError) as error:
            log.warning("the earlier checkpoint cannot be used, so all blocks are written: %s", error)
        yield loan


def _loan(source: CheckpointDirectory, beside: str, wanted: Collection[bytes]) -> Loan:
    """Raises CheckpointError, OSError, msgspec.DecodeError. ``beside``: leads from the directory of the save to
    ``source``."""
    manifest = read_manifest(source)
    content = read_file(source, manifest, "blocks.msgpack")
    found: dict[str, list[BlockPlace]] = {}
    saved = msgspec.msgpack.decode(content, type=list[BlockPlace], strict=False)
    check_places(source, manifest, saved, "blocks.msgpack")
    for place in saved:
        if place.identity in wanted:
            found.setdefault(manifest.path_of(place.file), []).append(place)
    sizes = manifest.sizes()
    used = {path: sum(place.nbytes for place in places) for path, places in found.items()}
    dense = [path for path in used if 2 * used[path] >= sizes[path]]
    small = sorted((path for path in dense if sizes[path] < _SMALL_BYTES), key=lambda path: used[path])
    files = [path for path in dense if path not in small[:-_MOST_SMALL]]
    return Loan(
        [BorrowedFile(path if path.startswith("../") else beside + path, sizes[path], used[path]) for path in files],
        {
            place.identity: msgspec.structs.replace(place, file=-1 - number)
            for number, path in enumerate(files)
            for place in found[path]
        },
    )
