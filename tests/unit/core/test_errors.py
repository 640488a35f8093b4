"""The error that stands for a group of failed tasks."""

from __future__ import annotations

from services.core.errors import InvalidInput, OverQuota, first_failure


def test_a_bug_stands_before_the_domain_errors_beside_it() -> None:
    bug = KeyError("bug")
    inner = ExceptionGroup("", [InvalidInput("bad"), bug])
    assert first_failure(ExceptionGroup("", [OverQuota("over"), inner])) is bug


def test_the_first_of_domain_errors_alone() -> None:
    first = InvalidInput("bad")
    assert first_failure(ExceptionGroup("", [first, OverQuota("over")])) is first
