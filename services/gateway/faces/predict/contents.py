"""Elements of a tensor as row-major little-endian bytes, and back, for the forms of the protocol without raw
bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from services.core.errors import InvalidInput, UnsupportedFeature

# The data types whose elements are numbers or truth values in JSON and in typed contents.
DTYPES: Final[dict[str, Any]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP32": np.float32,
    "FP64": np.float64,
}
_NUMBERS: Final = frozenset((int, float))
_MAX_DEPTH: Final = 16


def bytes_of(elements: Sequence[Any], datatype: str, field: str) -> bytes:
    """Return flat elements as bytes. Raises InvalidInput, UnsupportedFeature."""
    if datatype not in DTYPES:
        raise UnsupportedFeature(f"{field}: {datatype} is taken as raw bytes only", field=field)
    allowed = _NUMBERS if datatype.startswith("FP") else {bool if datatype == "BOOL" else int}
    if not allowed.issuperset(map(type, elements)):
        raise InvalidInput(f"{field} has an element that is no {datatype}", field=field)
    try:
        with np.errstate(over="ignore"):
            return np.array(elements, DTYPES[datatype]).tobytes()
    except (OverflowError, ValueError):
        raise InvalidInput(f"{field} has an element out of the range of {datatype}", field=field) from None


def elements_of(data: bytes, datatype: str) -> list[Any]:
    """Return the elements of raw bytes. Raises UnsupportedFeature for a data type without such a form."""
    if datatype not in DTYPES:
        raise UnsupportedFeature(f"{datatype} is returned as raw bytes only", field="outputs")
    found: list[Any] = np.frombuffer(data, DTYPES[datatype]).tolist()
    return found


def flat(value: Any, field: str) -> list[Any]:
    """Return the elements of nested lists in row-major order. Raises InvalidInput."""
    found, level = [value], 0
    while found and isinstance(found[0], list):
        level += 1
        if level > _MAX_DEPTH or not all(isinstance(part, list) for part in found):
            raise InvalidInput(f"{field} is not a tensor in nested lists", field=field)
        found = [element for part in found for element in part]
    return found
