"""How an embedding is made of a model's output, as ``modules.json`` of sentence-transformers declares it.

The modules must be the model, a pooling, and at most a normalisation: mean or CLS of an encoder, the last
token of a decoder. Others are rejected: a vector that is pooled otherwise is a wrong answer that looks right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from fairway.formats.config_fields import UnsupportedModel, flag, positive_int
from fairway.formats.fixed_cost.encoder_config import EncoderConfig, Pooling

MODULES: Final = "modules.json"
POOLING: Final = "1_Pooling/config.json"
SENTENCES: Final = "sentence_bert_config.json"
PROMPTS: Final = "config_sentence_transformers.json"
FILES: Final = (MODULES, POOLING, SENTENCES, PROMPTS)

LAST_TOKEN: Final = "lasttoken"
_MODES: Final = "pooling_mode_"
_POOLINGS: Final[Mapping[str, Pooling]] = {"mean_tokens": "mean", "cls_token": "cls"}
_PLACES: Final = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}

Read = Callable[[str], Any]  # the JSON value in a file of this name


def pooled(config: EncoderConfig, names: Collection[str], read: Read) -> EncoderConfig:
    """Return the encoder with its pooling, normalisation and case of texts. Raises UnsupportedModel."""
    if MODULES not in names:
        raise UnsupportedModel(
            f"{MODULES}, which declares how an embedding is pooled (mean or CLS)", "missing"
        )
    mode, normalize = _declared(config.hidden_size, names, read)
    if mode not in _POOLINGS:
        raise UnsupportedModel(f"{POOLING}: pooling_mode", mode)
    lowercase = lowercases(names, read)
    return replace(config, pooling=_POOLINGS[mode], normalize=normalize, lowercase=lowercase)


@dataclass(frozen=True, slots=True)
class LastToken:
    """A decoder's embedding: the hidden state of the last token, after the final norm."""

    normalize: bool
    max_tokens: int
    lowercase: bool = False  # texts are lowercased before their tokenizer


def last_token(hidden_size: int, max_positions: int, names: Collection[str], read: Read) -> LastToken | None:
    """Return how a decoder embeds; None if its files declare no embedding. Raises UnsupportedModel."""
    if MODULES not in names:
        return None
    mode, normalize = _declared(hidden_size, names, read)
    if mode != LAST_TOKEN:
        raise UnsupportedModel(f"{POOLING}: pooling_mode of a decoder", mode)
    return LastToken(normalize, max_tokens(max_positions, names, read), lowercases(names, read))


def max_tokens(max_positions: int, names: Collection[str], read: Read) -> int:
    """Return the most tokens of a row: ``max_seq_length`` within the positions, else all positions."""
    fields = _sentences(names, read)
    if fields.get("max_seq_length") is None:
        return max_positions
    try:
        return min(max_positions, positive_int(fields, "max_seq_length"))
    except UnsupportedModel as refused:
        raise UnsupportedModel(f"{SENTENCES}: {refused.field}", refused.value) from refused


def lowercases(names: Collection[str], read: Read) -> bool:
    """Return ``do_lower_case``: whether texts are lowercased. Raises UnsupportedModel."""
    try:
        return flag(_sentences(names, read), "do_lower_case")
    except UnsupportedModel as refused:
        raise UnsupportedModel(f"{SENTENCES}: {refused.field}", refused.value) from refused


def require_case(names: Collection[str], read: Read) -> None:
    """Return if texts keep their case: what is no embedding has no such setting. Raises UnsupportedModel."""
    if lowercases(names, read):
        raise UnsupportedModel(f"{SENTENCES}: do_lower_case", True)


def _sentences(names: Collection[str], read: Read) -> Mapping[str, Any]:
    return _fields(SENTENCES, read(SENTENCES)) if SENTENCES in names else {}


def _modules(value: Any) -> list[str]:
    """Return the kinds of the modules, in order."""
    entries = value if isinstance(value, list) else []
    kinds = []
    for entry in entries:
        kind, place = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (entry, None)
        kinds.append(str(kind).rpartition(".")[2])
        if kinds[-1] not in _PLACES:
            raise UnsupportedModel(f"{MODULES}: type", kind)
        if place != _PLACES[kinds[-1]]:
            raise UnsupportedModel(f"{MODULES}: path of {kinds[-1]}", place)
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModel(f"{MODULES}: modules", kinds)
    return kinds


def _declared(hidden_size: int, names: Collection[str], read: Read) -> tuple[str, bool]:
    """Return the pooling mode, and whether vectors are normalised."""
    normalize = "Normalize" in _modules(read(MODULES))
    if POOLING not in names:
        raise UnsupportedModel(POOLING, "missing")
    prompts = _fields(PROMPTS, read(PROMPTS)) if PROMPTS in names else {}
    if prompts.get("default_prompt_name") is not None:
        raise UnsupportedModel(f"{PROMPTS}: default_prompt_name", prompts["default_prompt_name"])
    return _mode(_fields(POOLING, read(POOLING)), hidden_size), normalize


def _mode(fields: Mapping[str, Any], hidden_size: int) -> str:
    width = fields.get("word_embedding_dimension", fields.get("embedding_dimension", hidden_size))
    if width != hidden_size:
        raise UnsupportedModel(f"{POOLING}: word_embedding_dimension", width)
    named = fields.get("pooling_mode")  # what newer releases write
    if isinstance(named, str):
        modes = [{"mean": "mean_tokens", "cls": "cls_token"}.get(named, named)]
    else:
        modes = [
            name.removeprefix(_MODES) for name, value in fields.items() if name.startswith(_MODES) and value
        ]
    if len(modes) != 1:
        raise UnsupportedModel(f"{POOLING}: pooling_mode", " and ".join(modes) or named)
    return modes[0]


def _fields(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UnsupportedModel(name, type(value).__name__)
    return value
