"""The refusal of a model, and the readers of config fields that raise it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

MAX_SIZE: Final = 1 << 31  # no dimension of a model is above it; products of two stay exact
MAX_SHOWN: Final = 80


class LoadError(Exception):
    """Loading cannot succeed, and would not on a retry. ``reason`` is a stable word for the agent.

    LoadError
    ├── UnsupportedModel   the configuration asks for what this engine does not compute
    ├── BadCheckpoint      the weights are not those that the configuration implies
    ├── BadEngineConfig    the model does not fit the limits that the process was started with
    └── TooLittleMemory    weights and working memory leave too little for KV
    """

    reason = "load_failed"


class UnsupportedModel(LoadError):
    reason = "unsupported_model"

    def __init__(self, field: str, value: object) -> None:
        super().__init__(f"{field}: {str(value)[:MAX_SHOWN]} is not supported")
        self.field = field
        self.value = value


class BadCheckpoint(LoadError):
    reason = "bad_checkpoint"


class BadEngineConfig(LoadError):
    reason = "bad_engine_config"


class TooLittleMemory(LoadError):
    """The bytes say what is needed at least."""

    reason = "does_not_fit"

    def __init__(self, message: str, *, weight_bytes: int, working_bytes: int, kv_bytes: int) -> None:
        super().__init__(message)
        self.weight_bytes = weight_bytes
        self.working_bytes = working_bytes
        self.kv_bytes = kv_bytes


def positive_int(fields: Mapping[str, Any], name: str, *, most: int = MAX_SIZE) -> int:
    """Return a required size. Raises UnsupportedModel when it is missing or no sensible size."""
    value = fields.get(name)
    if type(value) is not int or not 0 < value <= most:
        raise UnsupportedModel(name, "missing" if value is None else value)
    return value


def number(fields: Mapping[str, Any], name: str, *, default: float | None = None, above: float) -> float:
    """Return a finite number above a bound; absent or null means the default, if there is one."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= above
    ):
        raise UnsupportedModel(name, "missing" if value is None else value)
    return float(value)
