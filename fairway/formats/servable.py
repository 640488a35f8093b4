"""Whether the engine and the gateways can serve a checkpoint, judged by its small files.

A ``config.json`` without ``architectures`` does not belong to a checkpoint: it describes a model of the null
executor, which has no weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from fairway.formats import drafts
from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.decoder_config import parse_config

CONFIG: Final = "config.json"
TOKENIZER: Final = "tokenizer.json"
SINGLE, INDEX = drafts.WEIGHTS


def checkpoint_problem(names: Collection[str], read: Callable[[str], bytes]) -> str:
    """Return why a checkpoint of these files cannot be served, or an empty text.

    ``read`` returns a file of at most a few megabytes; its errors are passed on.
    """
    fields = _object(read, CONFIG) if CONFIG in names else {}
    if "architectures" not in fields:
        return ""
    if problem := _shape_problem(CONFIG, fields) or _shard_problem("", names, read):
        return problem
    if TOKENIZER not in names:
        return f"{TOKENIZER} is missing: gateways need it to tokenize text"
    draft = f"{drafts.FOLDER}/"
    if draft + CONFIG not in names:
        return ""
    return _shape_problem(draft + CONFIG, _object(read, draft + CONFIG)) or _shard_problem(draft, names, read)


def _shape_problem(name: str, fields: Mapping[str, Any]) -> str:
    try:
        parse_config(fields)
    except UnsupportedModel as refused:
        return f"{name}: {refused} by the engine"
    return ""


def _shard_problem(folder: str, names: Collection[str], read: Callable[[str], bytes]) -> str:
    """Return which file of the weights is missing."""
    if folder + INDEX not in names:
        return "" if folder + SINGLE in names else f"{folder}{SINGLE} is missing, and there is no {INDEX}"
    shards = _object(read, folder + INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        return f"{folder}{INDEX} has no usable weight_map"
    missing = sorted({folder + shard for shard in shards.values()} - set(names))
    rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{missing[0]}{rest} is missing: {folder}{INDEX} names it" if missing else ""


def _object(read: Callable[[str], bytes], name: str) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if there is none."""
    try:
        found = json.loads(read(name))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
