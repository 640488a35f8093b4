"""A console whose API a test fills."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clocks import HandClock
from tests.support.console import Browser, FilledApi


@pytest.fixture
def browser() -> Iterator[Browser]:
    found = Browser(FilledApi(), HandClock(1_800_000_000.0))
    yield found
    found.parts.recent.check_integrity()
    found.parts.sign_ins.check_integrity()
