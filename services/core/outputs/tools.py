"""Tools that a model may call."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
    """Which calls an output may have. ``names``: of the tools that may be called; empty: each may be.

    ``single``: at most one call.
    """

    mode: ToolMode = ToolMode.AUTO
    names: tuple[str, ...] = ()
    single: bool = False
