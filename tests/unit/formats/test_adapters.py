"""Adapters that are not served are refused with the field, the tensor or the file that is at fault."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from fairway.formats.adapter import MAX_RANK, adapter_layout, parse_adapter
from fairway.formats.decoder_config import parse_config
from fairway.formats.servable import engine_problems
from fairway.formats.version_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_problem
from services.core.errors import InvalidInput
from services.core.manifest import (
    Manifest,
    ManifestFile,
    canonical_json,
    check_manifest,
    digest_of,
    on_base,
    sha256_of,
    weights_digest_of,
)
from services.core.rollouts.computation import computation_digest
from tests.support.model_folder import header_of
from tests.unit.formats.test_servable import CONFIG, PLAIN, SHAPES

FIELDS: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "bias": "none",
}
LAYOUT = dict(adapter_layout(parse_adapter(FIELDS), parse_config(CONFIG)).shapes)


def problem(fields: dict[str, Any], shapes: dict[str, Any]) -> str:
    def read(name: str) -> bytes:
        if name == ADAPTER_WEIGHTS:
            return header_of(shapes)
        if name == ADAPTER_CONFIG:
            return json.dumps(fields).encode()
        return header_of(SHAPES) if name.endswith(".safetensors") else json.dumps(PLAIN[name]).encode()

    found = engine_problems([*PLAIN, ADAPTER_CONFIG, ADAPTER_WEIGHTS], read, is_adapter=True)
    assert found["torch"] == found["vllm"]  # vLLM's layers get the products that ours do
    return found["torch"]


def test_an_adapter_in_pefts_files_is_served() -> None:
    saved = {"lora_dropout": 0.1, "base_model_name_or_path": "x", "use_dora": False, "rank_pattern": {}}
    assert not problem(FIELDS | saved, LAYOUT)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("peft_type", ["IA3", None, 1]),
        ("task_type", ["SEQ_CLS"]),
        ("r", [0, -1, MAX_RANK + 1, 2.0, "8", None, True]),
        ("lora_alpha", [0, -1.0, "16", 1e300]),
        ("use_rslora", ["yes", 1]),
        ("target_modules", [[], None, ["embed_tokens"], ["q_proj", 3], ".*_proj", {"q_proj": 1}]),
        ("bias", ["all", "lora_only"]),
        ("modules_to_save", [["lm_head"]]),
        ("use_dora", [True]),
        ("init_lora_weights", ["pissa", "olora", "loftq"]),
        ("rank_pattern", [{"q_proj": 4}]),
        ("alpha_pattern", [{"q_proj": 4}]),
        ("layers_to_transform", [[0, 1], 3]),
        ("fan_in_fan_out", [True]),
        ("lora_bias", [True]),
        ("a_field_of_tomorrow", [True, "on"]),
    ],
)
def test_a_field_that_is_not_served_is_named(name: str, values: list[Any]) -> None:
    for value in values:
        assert f"{ADAPTER_CONFIG}: {name}:" in problem(FIELDS | {name: value}, LAYOUT)


def test_drawn_tensors_of_another_layout_are_named() -> None:
    rng = random.Random(37)
    for _ in range(200):
        shapes, name = dict(LAYOUT), rng.choice(sorted(LAYOUT))
        match rng.randrange(4):
            case 0:
                del shapes[name]
            case 1:
                shapes[name] = tuple(size + rng.choice((-1, 1)) for size in shapes[name])
            case 2:
                shapes[name] = shapes[name][::-1] if len(set(shapes[name])) > 1 else (1, 1)
            case _:
                name = rng.choice((name.replace(".weight", ".bias"), name + "2", "lm_head.weight"))
                shapes[name] = (4, 4)
        found = problem(FIELDS, shapes)
        assert found.startswith(ADAPTER_WEIGHTS)
        assert name in found


def test_a_folder_of_other_files_is_no_adapter() -> None:
    own = [ADAPTER_CONFIG, ADAPTER_WEIGHTS]
    assert not adapter_problem([*own, "chat_template.jinja", "README.md"])
    for others in (
        own[:1],
        own[1:],
        [*own, "config.json"],
        [*own, "model.safetensors"],
        [*own, "draft/a.json"],
    ):
        assert adapter_problem(others)


def file(path: str, content: str = "") -> ManifestFile:
    digest = sha256_of((path + content).encode())
    return ManifestFile(path, 1, digest, (digest,))


BASE = (file("chat_template.jinja"), file("config.json"), file("model.safetensors"))
OF_BASE = Manifest(
    BASE, chat_template_digest=BASE[0].digest, max_context_tokens=64, weights_digest=weights_digest_of(BASE)
)
OWN = (file(ADAPTER_CONFIG), file(ADAPTER_WEIGHTS))
ADAPTER = Manifest(
    OWN,
    schema=3,
    weights_digest=weights_digest_of(OWN),
    base_model="chat",
    base_digest=digest_of(OF_BASE),
)


def test_a_manifest_with_a_base_is_checked() -> None:
    check_manifest(ADAPTER)
    wrong = [
        {"schema": 2},
        {"base_digest": ""},
        {"base_digest": "v1"},
        {"base_model": ""},
        {"base_model": "A/b"},
    ]
    for fields in (*wrong, {"kind": "fixed-cost"}, {"base_model": "", "base_digest": ""}):
        with pytest.raises(InvalidInput):
            check_manifest(replace(ADAPTER, **fields))  # type: ignore[arg-type]


def test_other_manifests_keep_their_digests() -> None:
    assert b"base" not in canonical_json(OF_BASE)
    assert b"base_digest" in canonical_json(ADAPTER)


def test_a_reader_finds_the_files_of_the_base_under_the_adapters_own() -> None:
    found = on_base(ADAPTER, OF_BASE)
    assert {each.path for each in found.files} == {each.path for each in (*BASE, *OWN)}
    assert (found.max_context_tokens, found.weights_digest) == (64, OF_BASE.weights_digest)
    template = file("chat_template.jinja", "its own")
    own = on_base(replace(ADAPTER, files=(*OWN, template), max_context_tokens=32), OF_BASE)
    assert template in own.files
    assert BASE[0] not in own.files
    assert own.max_context_tokens == 32


def test_an_adapter_computes_what_its_base_does_unless_it_has_a_file_that_counts() -> None:
    assert computation_digest(on_base(ADAPTER, OF_BASE), {}) == computation_digest(OF_BASE, {})
    limits = replace(ADAPTER, files=(*OWN, file("engine_limits.json")))
    assert computation_digest(on_base(limits, OF_BASE), {}) != computation_digest(OF_BASE, {})
