"""Fixtures of the suites that use a whole installation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stack import Stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, installations: None) -> Iterator[Stack]:
    """An installation with two workers and two replicas of the bundled model."""
    state = tmp_path_factory.mktemp("fairway") / "state"
    with Stack.started(state, workers=2, replicas=2) as running:
        yield running
