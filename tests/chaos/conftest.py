"""Chaos tests use a whole installation."""

from tests.support.fixtures import stack

__all__ = ["stack"]
