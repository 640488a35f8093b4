"""What an engine computes with of a version: versions that agree in it can be served by one engine.

A gateway applies chat template, sampling defaults and safety policy; an engine reads none of them, except
for the end-of-sequence ids among the sampling defaults and the tokens declared beside tokenizer.json. A file
that is not listed here counts, so that an unknown one prevents sharing rather than being ignored. The files
of an adapter do not count: an engine loads it beside its base.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

import msgspec

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.limits import POLICY_NAME
from fairway.formats.probe import PROBE
from fairway.formats.tokenizer_files import FILES, TOKENIZER, read_tokenizer_files
from fairway.formats.version_files import ADAPTER_FILES
from services.core.manifest import Manifest, sha256_of

GENERATION_CONFIG: Final = "generation_config.json"
# Files whose contents decide the digest, by less than all of them.
READ: Final = (GENERATION_CONFIG, *FILES)
# Read by gateways, or by people.
_TEXT_FILES: Final = frozenset(
    {
        "chat_template.jinja",
        GENERATION_CONFIG,
        POLICY_NAME,
        "special_tokens_map.json",
        "tokenizer_config.json",
    }
)
_PROSE: Final = ".md"
_WEIGHTS: Final = (".safetensors", ".safetensors.index.json")


def computation_digest(manifest: Manifest, contents: Mapping[str, bytes]) -> str:
    """Return one digest of everything that an engine of the version computes with.

    ``contents`` are those of the files in ``READ`` that the version has. An adapter has those of its base
    among its files (``manifest.on_base``).
    """
    apart = {*_TEXT_FILES, *ADAPTER_FILES} if manifest.base_digest else _TEXT_FILES
    files = [
        (file.path, file.digest)
        for file in manifest.files
        if file.path not in apart and not file.path.lower().endswith(_PROSE)
    ]
    eos = _eos_of(contents.get(GENERATION_CONFIG, b""))
    declared = _declared(contents)
    parts = (manifest.kind, manifest.max_context_tokens, eos, files, *((declared,) if declared else ()))
    return sha256_of(json.dumps(parts).encode())


def parts_but_weights(manifest: Manifest, contents: Mapping[str, bytes]) -> dict[str, str]:
    """Return what an engine of the version computes with but its weights, by name. Arguments as above."""
    files = {
        file.path: file.digest
        for file in manifest.files
        if file.path not in _TEXT_FILES
        and not file.path.lower().endswith(_PROSE)
        and ("/" in file.path or file.path == PROBE or not file.path.endswith(_WEIGHTS))
    }
    return files | {
        "kind": manifest.kind,
        "max_context_tokens": str(manifest.max_context_tokens),
        "end-of-sequence ids": str(_eos_of(contents.get(GENERATION_CONFIG, b""))),
        "declared tokens": _declared(contents),
    }


def _declared(contents: Mapping[str, bytes]) -> str:
    """Return the digest of a tokenizer to which other files add tokens; empty where they add none."""
    if TOKENIZER not in contents:
        return ""
    try:
        found = read_tokenizer_files(contents.keys(), lambda name: contents[name]).tokenizer
    except UnsupportedModel:
        found = b"".join(contents.get(name, b"") for name in FILES)
    return sha256_of(found) if found != contents[TOKENIZER] else ""


def _eos_of(generation_config: bytes) -> object:
    """Return the end-of-sequence ids, in one order; for what is no such file its digest."""
    if not generation_config:  # The ids are those of config.json, which counts as a file.
        return None
    try:
        found = msgspec.json.decode(generation_config, type=dict[str, msgspec.Raw]).get("eos_token_id")
        ids = [] if found is None else msgspec.json.decode(found, type=int | list[int] | None)
    except (msgspec.DecodeError, RecursionError):
        return sha256_of(generation_config)
    return sorted({*ids} if isinstance(ids, list) else {ids} - {None})
