"""How the outcomes of a client's tests are compared."""

from __future__ import annotations

from tests.compat.suites.__main__ import read_report
from tests.compat.suites.table import compare


def report(*cases: tuple[str, str]) -> str:
    body = "".join(f'<testcase classname="t" name="{name}">{child}</testcase>' for name, child in cases)
    return f"<testsuites><testsuite>{body}</testsuite></testsuites>"


def test_only_what_passes_with_the_release_alone_and_has_no_reason_is_a_difference() -> None:
    theirs = read_report(report(("a", ""), ("b", ""), ("c", ""), ("d", "<failure/>"), ("e", "<skipped/>")))
    ours = read_report(report(("a", ""), ("b", "<failure/>"), ("c", "<error/>"), ("d", ""), ("e", "<skipped/>")))
    text, differing = compare(theirs, ours, reasons={"t::c": "no such thing here"})
    assert differing == ["t::b"]
    assert text.splitlines() == [
        "passes with 0.1.x: 3 of 5",
        "passes here:       2 of 5",
        "  passed -> failed  t::b",
        "  passed -> error  t::c  (no such thing here)",
        "  failed -> passed  t::d",
        "differences without a reason: 1",
    ]
