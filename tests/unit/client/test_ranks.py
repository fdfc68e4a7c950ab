"""Ranks of one job: rank 0 tells the others of its queue by the job's store, and they check what it names."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from transfer_queue.errors import StartError
from transfer_queue.launch.ranks import Ranks


@pytest.fixture
def job() -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def both(job: dict[str, str]) -> tuple[Ranks, Ranks]:
    first, second = Ranks.of(job), Ranks.of({**job, "RANK": "1"})
    assert first is not None
    assert second is not None
    return first, second


def attach_file(folder: Path) -> Path:
    path = folder / "attach.yaml"
    path.write_text("{name: local, controller: {addresses: ['127.0.0.1:1']}}")
    path.chmod(0o600)
    return path


def test_the_other_ranks_find_the_queue_of_rank_0(job: dict[str, str], tmp_path: Path) -> None:
    first, second = both(job)
    path = attach_file(tmp_path)
    first.publish(str(path))
    found, where = second.find()
    assert (found.name, where) == ("local", str(path))
    assert "rank 0" in found.target.origin
    first.withdraw()


def test_a_file_that_is_not_this_users_alone_or_of_another_machine_is_refused(
    job: dict[str, str], tmp_path: Path
) -> None:
    first, second = both(job)
    path = attach_file(tmp_path)
    path.chmod(0o644)
    first.publish(str(path))
    with pytest.raises(StartError, match="not this user's alone"):
        second.find()
    first.publish(str(tmp_path / "elsewhere.yaml"))
    with pytest.raises(StartError, match=rf"{socket.gethostname()}, which processes of other machines cannot reach"):
        second.find()
    first.withdraw()


@pytest.mark.parametrize("change", [{"WORLD_SIZE": "1"}, {"RANK": ""}, {"MASTER_PORT": ""}, {"RANK": "first"}])
def test_a_process_that_is_no_rank_of_several_starts_its_own(job: dict[str, str], change: dict[str, str]) -> None:
    assert Ranks.of({**job, **change}) is None
