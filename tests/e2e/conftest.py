"""End-to-end tests use a whole installation, as its users do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stack import Stack

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def stack(usual: Stack) -> Stack:
    """The installation that these tests share. A test that changes it leaves it as it was."""
    return usual


@pytest.fixture(scope="session")
def openai_python() -> str:
    """The interpreter of the environment that holds the OpenAI SDK."""
    python = ROOT / ".venv-openai" / "bin" / "python"
    if not python.exists():
        pytest.fail("the OpenAI SDK's environment is missing: run `make e2e-env`")
    return str(python)
