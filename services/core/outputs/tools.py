"""Tools that a model may call."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_NAME_CHARS: Final = 64


def name_for_model(name: str) -> str:
    """Return the name by which a model calls a tool; a long one keeps its beginning and half of its
    SHA-256."""
    if len(name) <= MAX_NAME_CHARS:
        return name
    return f"{name[:31]}_{hashlib.sha256(name.encode()).hexdigest()[:32]}"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. ``parameters``: a JSON schema as JSON; empty: none."""

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool = False


class ToolMode(StrEnum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls an output may have. ``names`` are the tools that may be called; empty: each may be.

    ``single``: at most one call.
    """

    mode: ToolMode = ToolMode.AUTO
    names: tuple[str, ...] = ()
    single: bool = False
