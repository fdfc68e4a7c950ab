"""Plays testdata/*.txt. ``TQ_REWRITE_TRANSCRIPTS=1 pytest …`` writes their output again: read the diff."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.control.transcript import play

_FILES = sorted((Path(__file__).parent / "testdata").glob("*.txt"))


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_transcript_plays_as_written(path: Path) -> None:
    text = path.read_text()
    played = play(text)
    if os.environ.get("TQ_REWRITE_TRANSCRIPTS"):
        path.write_text(played)
    else:
        assert played == text


def test_there_are_transcripts() -> None:
    assert _FILES
