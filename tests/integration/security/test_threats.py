"""The threat model names a test that exists in each row."""

from __future__ import annotations

import re

from tests.integration.stack import ROOT


def test_each_threat_names_tests_that_exist() -> None:
    page = (ROOT / "docs/security.md").read_text()
    rows = [line for line in page[page.index("| threat |") :].split("\n\n")[0].splitlines()[2:] if line]
    assert len(rows) >= 15
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.split("|")[3])
        assert named, f"no test in: {row}"
        for name in named:
            assert f"def {name}(" in sources, f"{name} does not exist"
