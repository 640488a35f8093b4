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
    shared = {
        "usual": ("tests/e2e/test_cli.py", "tests/e2e/test_bootstrap.py"),
        "two_gateways": ("tests/e2e/test_usage.py", "tests/integration/client/test_gateways.py"),
    }
    for kind, files in shared.items():
        assert {group_of(f"{file}::test[a]") for file in files} == {kind}
    for file in ("tests/e2e/test_telemetry.py", "tests/unit/cli/test_up.py", "tests/e2e/test_overload.py"):
        assert group_of(f"{file}::test") == file


def test_a_file_that_names_no_fixture_is_not_imported_for_the_stack(tmp_path: Path) -> None:
    file = tmp_path / "test_a.py"
    file.write_text("def test_a(stack: BatchStack): ...\n")
    assert not may_use_one(file)
    file.write_text("def test_a(two_gateways: Stack): ...\n")
    assert may_use_one(file)
