"""What a version's ``generation_config.json`` decides: where an output ends, and the defaults of sampling."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

from fairway.formats.config_fields import UnsupportedModel, object_in
from fairway.formats.weights import Read

GENERATION_CONFIG: Final = "generation_config.json"
_BOUNDS: Final = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 1_000_000),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
}


def eos_ids(names: Collection[str], read: Read, fields: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """Return the end-of-sequence ids that the vocabulary holds; ``fields`` are those of config.json.

    They are those of generation_config.json where that file is there, else those of config.json: as in
    transformers, a file that names none leaves none. Raises UnsupportedModel.
    """
    own = GENERATION_CONFIG in names
    value = (object_in(GENERATION_CONFIG, read) if own else fields).get("eos_token_id")
    ids: set[int] = set()
    for entry in value if isinstance(value, list) else [value]:
        if entry is not None and type(entry) is not int:
            raise UnsupportedModel(
                f"{GENERATION_CONFIG if own else 'config.json'}: eos_token_id", repr(value)
            )
        if entry is not None and 0 <= entry < vocab_size:
            ids.add(entry)
    return frozenset(ids)


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of sampling that the file sets, by their name. Raises UnsupportedModel."""
    found: dict[str, Any] = {}
    for name, (low, high) in _BOUNDS.items():
        value = generation.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high or not math.isfinite(value):
            raise UnsupportedModel(f"{GENERATION_CONFIG}: {name}, which is {low} to {high}", value)
        found[name] = int(value) if name == "top_k" else float(value)
    return found
