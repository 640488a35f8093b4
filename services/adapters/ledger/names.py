"""Names of the ledger's objects, validated before one becomes a path."""

from __future__ import annotations

import re
from typing import Final

_NAME: Final = re.compile(r"[a-z]+/[0-9-]{1,64}")


def checked(name: str) -> str:
    """Return the name. Our own names are always valid."""
    assert _NAME.fullmatch(name), f"{name!r} is no name of an object"
    return name
