"""What gateways apply does not count; what an engine reads does, and so does a file that nobody knows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.core.manifest import Manifest, ManifestFile, sha256_of
from services.core.rollouts.computation import GENERATION_CONFIG, computation_digest


def sampling(content: bytes) -> dict[str, bytes]:
    return {GENERATION_CONFIG: content}


SAMPLING = sampling(b'{"eos_token_id": [2, 1], "temperature": 0.7}')


def manifest(**changes: str) -> Manifest:
    """Return a version whose files have these contents, by name with ``__`` for the dot."""
    contents = {
        "config.json": "shape",
        "model.safetensors": "weights",
        "tokenizer.json": "tokens",
        "tokenizer_config.json": "template",
        GENERATION_CONFIG: "sampling",
    }
    contents |= {name.replace("__", "."): content for name, content in changes.items()}
    return Manifest(
        tuple(ManifestFile(path, 1, sha256_of(text.encode())) for path, text in sorted(contents.items()))
    )


SAME = computation_digest(manifest(), SAMPLING)


@pytest.mark.parametrize(
    "name", ["tokenizer_config__json", "chat_template__jinja", "safety_policy__json", "README__md"]
)
def test_text_and_sampling_do_not_count(name: str) -> None:
    assert computation_digest(manifest(**{name: "other"}), SAMPLING) == SAME
    assert computation_digest(manifest(), sampling(b'{"eos_token_id": [1, 2], "temperature": 0.1}')) == SAME


@pytest.mark.parametrize(
    "name",
    [
        "model__safetensors",
        "config__json",
        "tokenizer__json",
        "engine_limits__json",
        "draft/model__safetensors",
        "draft/generation_config__json",
        "unknown__json",
    ],
)
def test_what_an_engine_reads_counts(name: str) -> None:
    assert computation_digest(manifest(**{name: "other"}), SAMPLING) != SAME


def test_the_end_of_sequence_and_the_manifest_s_terms_count() -> None:
    others = {
        computation_digest(manifest(), sampling(content))
        for content in (b"", b"{}", b'{"eos_token_id": 1}', b'{"eos_token_id": "x"}', b"no json")
    }
    assert SAME not in others
    assert len(others) == 5
    assert computation_digest(manifest(), sampling(b'{"eos_token_id": 1}')) == computation_digest(
        manifest(), sampling(b'{"eos_token_id": [1]}')
    )
    assert computation_digest(replace(manifest(), max_context_tokens=512), SAMPLING) != SAME


def test_tokens_declared_beside_the_tokenizer_count() -> None:
    tokenizer = b'{"added_tokens": [], "model": {"vocab": {"<x>": 0}}}'
    plain = SAMPLING | {"tokenizer.json": tokenizer}
    template = {"tokenizer_config.json": b'{"chat_template": "y"}'}
    assert [computation_digest(manifest(), found) for found in (plain, plain | template)] == [SAME] * 2
    named = {
        computation_digest(manifest(), plain | {"tokenizer_config.json": content})
        for content in (b'{"eos_token": "<x>"}', b'{"eos_token": "<y>"}', b'{"eos_token": 7}')
    }
    assert SAME not in named
    assert len(named) == 3
