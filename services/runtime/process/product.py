"""The version of the installed product."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def product_version() -> str:
    """Return the version of the installed package, "unknown" in a bare source tree."""
    try:
        return version("fairway")
    except PackageNotFoundError:
        return "unknown"
