"""`make test-quick` starts no installation, and the tests that share one stay in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.groups import group_of
from tests.support.installations import may_use_one
from tests.support.stack import fairway


def test_a_test_without_the_mark_starts_no_installation(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="test_a_test_without_the_mark"):
        fairway("up", "--detach", "--state-dir", str(tmp_path))


def test_what_leads_to_an_installation_is_marked(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        uses = "installations" in getattr(item, "fixturenames", ())
        assert uses == (item.get_closest_marker("stack") is not None), item.nodeid


def test_those_that_share_an_installation_are_one_group() -> None:
    ids = ("tests/e2e/test_a.py::test_a[x@y]@usual", "tests/unit/test_b.py::test_b@usual")
    assert {group_of(each) for each in ids} == {"@usual"}
    assert group_of("tests/unit/test_b.py::test_b[a@usual]") == "tests/unit/test_b.py"


def test_a_file_that_names_no_fixture_is_not_imported_for_the_stack(tmp_path: Path) -> None:
    file = tmp_path / "test_a.py"
    file.write_text("def test_a(stack: BatchStack): ...\n")
    assert not may_use_one(file)
    file.write_text("def test_a(two_gateways): ...\n")
    assert may_use_one(file)
