"""End-to-end tests use a whole installation, as its users do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fixtures import stack

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def openai_python() -> str:
    """The interpreter of the environment that holds the OpenAI SDK."""
    python = ROOT / ".venv-openai" / "bin" / "python"
    if not python.exists():
        pytest.fail("the OpenAI SDK's environment is missing: run `make e2e-env`")
    return str(python)


__all__ = ["openai_python", "stack"]
