"""Whether workers and gateways can serve a checkpoint, judged by its small files.

A ``config.json`` without ``architectures`` does not belong to a checkpoint: it describes a model of the null
executor, which has no weights. The architecture also decides the kind of a version: a decoder or a fixed-cost
model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal

from fairway.formats import drafts
from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.decoder_config import parse_config
from fairway.formats.fixed_cost.config import CONFIG, is_fixed_cost, parse_fixed_cost
from fairway.formats.fixed_cost.encoder_config import EncoderConfig
from fairway.formats.fixed_cost.pooling import FILES, MODULES, last_token

Kind = Literal["causal-lm", "fixed-cost"]

TOKENIZER: Final = "tokenizer.json"
SINGLE, INDEX = drafts.WEIGHTS
# The files that ``checkpoint_problem`` reads.
READ: Final = (CONFIG, INDEX, f"{drafts.FOLDER}/{CONFIG}", f"{drafts.FOLDER}/{INDEX}", *FILES)
_NO_TOKENIZER: Final = f"{TOKENIZER} is missing: gateways need it to tokenize text"


def kind_of(names: Collection[str], read: Callable[[str], bytes]) -> Kind:
    """Return the kind that the architecture in ``config.json`` has; a decoder if there is none."""
    is_fixed = CONFIG in names and is_fixed_cost(_object(read, CONFIG))
    return "fixed-cost" if is_fixed else "causal-lm"


def checkpoint_problem(names: Collection[str], read: Callable[[str], bytes], kind: str = "causal-lm") -> str:
    """Return why a version of this kind and these files cannot be served, or an empty text.

    ``read`` returns a file of at most a few megabytes; its errors are passed on.
    """
    if kind == "fixed-cost":
        return _fixed_cost_problem(names, read)
    fields = _object(read, CONFIG) if CONFIG in names else {}
    if "architectures" not in fields:
        return ""
    if is_fixed_cost(fields):
        return f"{CONFIG}: {fields['architectures'][0]} is a fixed-cost model, not one of kind causal-lm"
    if problem := _shape_problem(CONFIG, fields) or _shard_problem("", names, read):
        return problem
    if TOKENIZER not in names:
        return _NO_TOKENIZER
    try:
        if MODULES in names:
            last_token(parse_config(fields).hidden_size, 1, names, lambda name: json.loads(read(name)))
    except (UnsupportedModel, ValueError, RecursionError) as error:
        return f"how it embeds: {error}"
    draft = f"{drafts.FOLDER}/"
    if draft + CONFIG not in names:
        return ""
    return _shape_problem(draft + CONFIG, _object(read, draft + CONFIG)) or _shard_problem(draft, names, read)


def _fixed_cost_problem(names: Collection[str], read: Callable[[str], bytes]) -> str:
    if any(name.startswith(f"{drafts.FOLDER}/") for name in names):
        return f"{drafts.FOLDER}/: a fixed-cost model has no draft"
    try:
        config = parse_fixed_cost(names, read)
    except UnsupportedModel as refused:
        return f"{refused} by the batcher"
    if problem := _shard_problem("", names, read):
        return problem
    return _NO_TOKENIZER if isinstance(config, EncoderConfig) and TOKENIZER not in names else ""


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
