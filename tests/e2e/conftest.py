"""End-to-end tests use a whole installation, as its users do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stack import Stack

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One installation for the whole suite, with two workers and two replicas of the bundled model.

    A test that changes it leaves it as it was. Nothing is shed, however slow the machine that it shares is.
    """
    state = tmp_path_factory.mktemp("fairway") / "state"
    with Stack.started(state, workers=2, replicas=2, settings={"FAIRWAY_SHEDDING": "false"}) as running:
        yield running


@pytest.fixture(scope="session")
def openai_python() -> str:
    """The interpreter of the environment that holds the OpenAI SDK."""
    python = ROOT / ".venv-openai" / "bin" / "python"
    if not python.exists():
        pytest.fail("the OpenAI SDK's environment is missing: run `make e2e-env`")
    return str(python)
