"""Folders of the user that the environment names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return where programs of this user keep what they can make again (XDG base directories)."""
    named = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    return Path(named) if named.startswith("/") else Path.home() / ".cache"


def folder_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return PATH, HOME and TMPDIR, those that are set: what a program needs to find its files."""
    found = os.environ if environ is None else environ
    return {name: found[name] for name in ("PATH", "HOME", "TMPDIR") if name in found}
