"""What an engine reads of a model's folder besides its shape (``fairway.formats.decoder_config``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fairway.formats.config_fields import UnsupportedModel, positive_int

MAX_JSON_BYTES: Final = 16 * 1024 * 1024
DEFAULT_VOCAB_SIZE: Final = 32000  # of a null model whose config names none


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UnsupportedModel for anything else and for a huge file."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise UnsupportedModel(path.name, f"{path.stat().st_size} bytes")
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UnsupportedModel(path.name, "missing") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedModel(path.name, "not JSON") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(path.name, type(content).__name__)
    return content


def vocab_size_of(fields: Mapping[str, Any]) -> int:
    """Return the vocabulary of a null model, whose config may name nothing else."""
    return positive_int(fields, "vocab_size") if "vocab_size" in fields else DEFAULT_VOCAB_SIZE


def eos_ids(model_dir: Path, fields: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """Return the end-of-sequence ids that the vocabulary holds.

    They are those of generation_config.json where that file is there, else those of config.json: as in
    transformers, a file that names none leaves none. Raises UnsupportedModel.
    """
    generation = model_dir / "generation_config.json"
    value = (read_json(generation) if generation.exists() else fields).get("eos_token_id")
    ids: set[int] = set()
    for entry in value if isinstance(value, list) else [value]:
        if entry is not None and type(entry) is not int:
            raise UnsupportedModel("eos_token_id", value)
        if entry is not None and 0 <= entry < vocab_size:
            ids.add(entry)
    return frozenset(ids)
