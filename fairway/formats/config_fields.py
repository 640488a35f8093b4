"""A field of a model's ``config.json``: its value within bounds, or an error that names the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

MAX_SIZE: Final = 1 << 31  # bound of every dimension of a model; products of two stay exact
MAX_NUMBER: Final = 1e18  # far above the numbers of published models; products of two are finite
MIN_NUMBER: Final = 1e-18  # the same for numbers that must be positive
MAX_SHOWN: Final = 80
MAX_JSON_BYTES: Final = 16 * 1024 * 1024  # the size of a file that configures a model


class UnsupportedModel(Exception):
    """The engine does not support the configuration. ``reason`` is a stable word."""

    reason = "unsupported_model"

    def __init__(self, field: str, value: object) -> None:
        super().__init__(f"{field}: {_shown(value)} is not supported")
        self.field = field
        self.value = value


def _shown(value: object) -> str:
    try:
        return str(value)[:MAX_SHOWN]
    except ValueError:  # an integer with thousands of digits
        return f"a {type(value).__name__} of many digits"


def object_in(name: str, read: Callable[[str], bytes]) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UnsupportedModel for anything else and for a huge file."""
    data = read(name)
    if len(data) > MAX_JSON_BYTES:
        raise UnsupportedModel(name, f"{len(data)} bytes")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(name, "not JSON") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(name, type(content).__name__)
    return content


def positive_int(fields: Mapping[str, Any], name: str, *, most: int = MAX_SIZE) -> int:
    """Return a required size. Raises UnsupportedModel when it is missing or out of range."""
    value = fields.get(name)
    if type(value) is not int or not 0 < value <= most:
        raise UnsupportedModel(name, "missing" if value is None else value)
    return value


def number(fields: Mapping[str, Any], name: str, *, default: float | None = None, above: float) -> float:
    """Return a finite number above a bound; absent or null means the default, if there is one."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    least = max(above, MIN_NUMBER)
    # Compared without conversion: an integer of many digits has no float.
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not least <= value <= MAX_NUMBER
        or value <= above
    ):
        raise UnsupportedModel(name, "missing" if value is None else value)
    return float(value)


def flag(fields: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Return a boolean; absent or null means the default. Raises UnsupportedModel for any other value."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedModel(name, value)
    return default if value is None else value


def require_inert(fields: Mapping[str, Any], accepted: Mapping[str, tuple[Any, ...]]) -> None:
    """Return if every field that would change the computation has a value that does not, or is absent."""
    for name, values in accepted.items():
        if name in fields and fields[name] not in values:
            raise UnsupportedModel(name, fields[name])
