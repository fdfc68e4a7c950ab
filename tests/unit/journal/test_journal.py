"""The journal on disk: what a crash at any byte leaves, what damage at any byte does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.errors import CorruptJournalError, JournalWriteError, StartError
from transfer_queue.journal import Journal
from transfer_queue.journal.files import FRAME_BYTES, HEADER_BYTES

BATCHES = [b"first", b"", b"the third batch", bytes(40), b"last"]


def written(folder: Path, batches: list[bytes] = BATCHES, segment_bytes: int = 1 << 20) -> Path:
    """A folder whose journal holds the batches."""
    journal = Journal(folder, segment_bytes=segment_bytes)
    assert list(journal.recover().batches) == []
    for batch in batches:
        journal.append([batch[:2], batch[2:]])
    journal.close()
    return folder


def recovered(folder: Path, segment_bytes: int = 1 << 20) -> list[bytes]:
    journal = Journal(folder, segment_bytes=segment_bytes)
    try:
        return list(journal.recover().batches)
    finally:
        journal.close()


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


def test_a_journal_cut_at_any_byte_yields_the_whole_batches_before_and_goes_on(tmp_path: Path) -> None:
    path = segments(written(tmp_path / "full"))[0]
    data = path.read_bytes()
    ends = [HEADER_BYTES]
    for batch in BATCHES:
        ends.append(ends[-1] + FRAME_BYTES + len(batch))
    assert ends[-1] == len(data)
    for cut in range(len(data)):
        whole = sum(end <= cut for end in ends[1:])
        folder = tmp_path / "cut"
        folder.mkdir()
        (folder / path.name).write_bytes(data[:cut])
        journal = Journal(folder)
        assert list(journal.recover().batches) == BATCHES[:whole], cut
        journal.append([b"after the crash"])
        journal.close()
        assert recovered(folder) == [*BATCHES[:whole], b"after the crash"], cut
        shutil.rmtree(folder)


def test_a_flipped_bit_at_any_byte_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = segments(written(tmp_path))[0]
    data = path.read_bytes()
    for place in range(len(data)):
        for bit in (0, 3, 7):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(CorruptJournalError, match=path.name):
                recovered(tmp_path)
    path.write_bytes(data)
    assert recovered(tmp_path) == BATCHES


@pytest.mark.parametrize("kind", ["segment", "snapshot"])
def test_a_file_that_another_user_left_in_a_shared_folder_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    folder = written(tmp_path / "shared")
    planted = segments(written(tmp_path / "elsewhere", [b"rows of somebody else"]))[0]
    path = folder / f"{kind}-0000000000000001"
    shutil.copyfile(planted, path)
    folder.chmod(0o1777)
    if os.geteuid() == 0:
        os.chown(path, 65534, -1)
        with pytest.raises(StartError, match=f"{path} belongs to user 65534"):
            recovered(folder)
    path.unlink()
    path.symlink_to(planted)
    with pytest.raises(StartError, match=f"{path} is a link"):
        recovered(folder)


def test_a_tail_of_zeros_counts_as_cut_off(tmp_path: Path) -> None:
    path = segments(written(tmp_path))[0]
    with path.open("ab") as file:
        file.write(bytes(5000))
    assert recovered(tmp_path) == BATCHES


def test_damage_names_the_byte_of_the_batch_and_what_to_do(tmp_path: Path) -> None:
    path = segments(written(tmp_path))[0]
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + FRAME_BYTES] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptJournalError, match=rf"{path} at byte {HEADER_BYTES}: .* Restore the folder"):
        recovered(tmp_path)


@settings(max_examples=40, deadline=None)
@given(batches=st.lists(st.binary(max_size=200), max_size=30), segment=st.integers(1, 500), data=st.data())
def test_batches_come_back_in_order_over_many_segments_and_snapshots(
    tmp_path_factory: pytest.TempPathFactory, batches: list[bytes], segment: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    snapshot, since = None, []
    journal = Journal(folder, segment_bytes=segment)
    assert list(journal.recover().batches) == []
    for batch in batches:
        journal.append([batch])
        since.append(batch)
        step = data.draw(st.sampled_from(["go on", "go on", "reopen", "snapshot"]))
        if step == "snapshot":
            snapshot, since = b"after " + batch, []
            journal.write_snapshot(journal.start_snapshot(), snapshot)
        elif step == "reopen":
            journal.close()
            journal = Journal(folder, segment_bytes=segment)
            found = journal.recover()
            assert (found.snapshot, list(found.batches)) == (snapshot, since)
    journal.close()
    journal = Journal(folder)
    found = journal.recover()
    assert (found.snapshot, list(found.batches)) == (snapshot, since)
    journal.close()


def test_a_snapshot_deletes_what_came_before_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path, segment_bytes=100)
    list(journal.recover().batches)
    for _ in range(50):
        journal.append([bytes(50)])
    assert len(segments(tmp_path)) > 20
    journal.write_snapshot(journal.start_snapshot(), b"state")
    assert len(segments(tmp_path)) == 1
    journal.close()


def test_a_snapshot_cut_short_by_a_crash_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "snapshot-0000000000000001.new").write_bytes(b"TQSNAPS1 and half of the rest")
    (tmp_path / "notes.new").write_text("of the user")
    assert recovered(tmp_path) == BATCHES
    assert list(tmp_path.glob("*.new")) == [tmp_path / "notes.new"]


def test_a_file_of_something_else_is_named_and_stays_whatever_it_is_called(tmp_path: Path) -> None:
    written(tmp_path)
    foreign = tmp_path / "snapshot-0000000000000001.new"
    foreign.write_text("of the user")
    with pytest.raises(CorruptJournalError, match=f"{foreign} at byte 0: the file does not belong to the journal"):
        recovered(tmp_path)
    assert foreign.read_text() == "of the user"


@pytest.mark.parametrize("harm", ["missing", "shortened", "renamed"])
def test_a_segment_that_is_gone_or_shortened_in_the_middle_is_an_error(tmp_path: Path, harm: str) -> None:
    written(tmp_path, [b"x" * 50] * 5, segment_bytes=60)
    first, second, third, *_ = segments(tmp_path)
    if harm == "missing":
        second.unlink()
    elif harm == "shortened":
        second.write_bytes(second.read_bytes()[:HEADER_BYTES])
    else:
        third.unlink()
        shutil.copy(first, third)
    with pytest.raises(CorruptJournalError, match="segment-"):
        recovered(tmp_path)


def test_two_processes_cannot_use_one_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(StartError, match="used by another process"):
        Journal(tmp_path)
    journal.close()


def test_a_batch_that_does_not_fit_on_the_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource
    import signal

    journal = Journal(tmp_path)
    list(journal.recover().batches)
    journal.append([b"kept"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
        with pytest.raises(JournalWriteError, match="make room"):
            journal.append([bytes(1000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    journal.append([b"again"])
    journal.close()
    assert recovered(tmp_path) == [b"kept", b"again"]
