"""What a publisher accepts, an engine loads: one judgement of drawn checkpoints, good and bad."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fairway.client.publish.publish import PublishRefused, declared_kind, find_files, require_servable
from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.decoder_config import parse_config
from fairway.formats.fixed_cost.config import parse_fixed_cost
from fairway.formats.fixed_cost.layouts import layout_of
from fairway.formats.weights import HEAD, INDEX, SINGLE, decoder_layout, expected_shapes
from services.core.errors import FailedPrecondition
from services.worker.detokenizer import load_vocabulary
from services.worker.engine.load.config import eos_ids, read_json
from services.worker.engine.load.weights import Checkpoint
from services.worker.engine.unsupported import BadCheckpoint
from tests.support.model_folder import tensor_file

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
NORM = "model.norm.weight"
Shapes = dict[str, Sequence[int]]
Change = Callable[[Path, dict[str, Any], Shapes], object]


def as_text(folder: Path, fields: dict[str, Any], shapes: Shapes) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "1"}')


def draft_of_another_vocabulary(folder: Path, fields: dict[str, Any], shapes: Shapes) -> None:
    (folder / "draft").mkdir()
    other = FIELDS | {"vocab_size": 13}
    (folder / "draft" / "config.json").write_text(json.dumps(other))
    (folder / "draft" / SINGLE).write_bytes(tensor_file(expected_shapes(parse_config(other))))


BAD: Mapping[str, tuple[Change, str]] = {
    "no architectures": (lambda _, fields, __: fields.pop("architectures"), "architectures"),
    "another architecture": (lambda _, fields, __: fields.update(architectures=["GPT2LMHeadModel"]), "GPT2"),
    "text as eos": (as_text, "generation_config.json: eos_token_id"),
    "text as eos of the config": (lambda _, fields, __: fields.update(eos_token_id=["</s>"]), "eos_token_id"),
    "a value head": (lambda _, __, shapes: shapes.update({"v_head.bias": [1]}), "v_head.bias"),
    "another width": (lambda _, fields, __: fields.update(intermediate_size=24), "has shape"),
    "a tensor less": (lambda _, __, shapes: shapes.pop(NORM), NORM),
    "an untied head": (lambda _, fields, shapes: fields.update(tie_word_embeddings=False), HEAD),
    "a layer more": (lambda _, fields, __: fields.update(num_hidden_layers=3), "missing tensors"),
}


def write(folder: Path, rng: random.Random, change: Change | None = None, dtype: str = "F32") -> Path:
    """Write a checkpoint, in one file or in shards, with an index that may be left over."""
    folder.mkdir()
    fields = FIELDS | {"tie_word_embeddings": True}
    shapes: Shapes = dict(expected_shapes(parse_config(fields)))
    if change is not None:
        change(folder, fields, shapes)
    (folder / "config.json").write_text(json.dumps(fields))
    vocab = {f"w{number}": number for number in range(12)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    state = {"version": "1.0", "added_tokens": [], "model": model, "decoder": {"type": "Fuse"}}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    names = sorted(shapes)
    if rng.random() < 0.5:
        cut = rng.randrange(1, len(names))
        parts = {"a.safetensors": names[:cut], "b.safetensors": names[cut:]}
        weight_map = {rng.choice(["other.", ""]) + name: file for file in parts for name in parts[file]}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    else:
        parts = {SINGLE: names}
        if rng.random() < 0.5:  # what a conversion from shards left behind
            (folder / INDEX).write_text(json.dumps({"weight_map": {"gone": "gone.safetensors"}}))
    for file, held in parts.items():
        (folder / file).write_bytes(tensor_file({name: shapes[name] for name in held}, dtype))
    return folder


def refusal_of_publisher(folder: Path) -> str:
    files = find_files(folder)
    try:
        require_servable(files, declared_kind(files))
    except PublishRefused as refused:
        return str(refused)
    return ""


def refusal_of_engine(folder: Path) -> str:
    try:
        fields = read_json(folder / "config.json")
        config = parse_config(fields)
        eos_ids(folder, fields, config.vocab_size)
        Checkpoint(folder, decoder_layout(config)).__exit__()
        load_vocabulary(folder)
    except (UnsupportedModel, BadCheckpoint, FailedPrecondition) as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("seed", range(24))
def test_a_good_checkpoint_is_accepted_and_loads(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    folder = write(tmp_path / "m", rng, dtype=rng.choice(["F32", "F16", "BF16"]))
    assert (refusal_of_publisher(folder), refusal_of_engine(folder)) == ("", "")


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("seed", range(4))
def test_a_bad_checkpoint_is_refused_by_both_by_name(seed: int, name: str, tmp_path: Path) -> None:
    change, words = BAD[name]
    folder = write(tmp_path / "m", random.Random(seed), change)
    published, loaded = refusal_of_publisher(folder), refusal_of_engine(folder)
    assert words in published
    assert words.rpartition(": ")[2] in loaded


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3", "U8", "I64"])
def test_a_dtype_that_is_not_computed_with_is_refused_by_both(dtype: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", random.Random(3), dtype=dtype)
    assert all(
        f"has dtype {dtype}" in one for one in (refusal_of_publisher(folder), refusal_of_engine(folder))
    )


def test_a_draft_is_judged_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", random.Random(1), draft_of_another_vocabulary)
    assert "draft/config.json: a vocabulary of 13 is not the model's 12" in refusal_of_publisher(folder)
    (folder / "draft" / "config.json").write_text(json.dumps(FIELDS))
    assert "embed_tokens.weight has shape (13, 8)" in refusal_of_publisher(folder)
    (folder / "draft" / SINGLE).write_bytes(tensor_file(expected_shapes(parse_config(FIELDS))))
    assert refusal_of_publisher(folder) == ""


def test_a_missing_shard_is_named_with_the_mend(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", random.Random(1))
    (folder / SINGLE).rename(folder / "a.safetensors") if (folder / SINGLE).exists() else None
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "c.safetensors"}}))
    for refused in (refusal_of_publisher(folder), refusal_of_engine(folder)):
        assert f"c.safetensors is missing: {INDEX} names it; add the file, or write the index anew" in refused


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    rng = random.Random(1)
    folder = write(tmp_path / "m", rng)
    shapes = expected_shapes(parse_config(FIELDS | {"tie_word_embeddings": True}))
    (folder / SINGLE).unlink(missing_ok=True)
    for file, held in {"a.safetensors": shapes, "b.safetensors": {NORM: shapes[NORM]}}.items():
        (folder / file).write_bytes(tensor_file(held))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    for refused in (refusal_of_publisher(folder), refusal_of_engine(folder)):
        assert f"{NORM} is in two files, a.safetensors and b.safetensors" in refused


def test_a_fixed_cost_model_is_judged_by_its_headers(tmp_path: Path) -> None:
    fields = {"architectures": ["Mlp"], "input_size": 4, "layers": [{"size": 3}]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    layout = layout_of(parse_fixed_cost(["config.json"], lambda _: json.dumps(fields).encode()))
    (tmp_path / SINGLE).write_bytes(tensor_file(layout.shapes))
    assert refusal_of_publisher(tmp_path) == ""
    (tmp_path / SINGLE).write_bytes(tensor_file({**layout.shapes, "layers.0.bias": (4,)}))
    assert "layers.0.bias has shape (4,), the configuration says (3,)" in refusal_of_publisher(tmp_path)


def test_a_snapshot_of_a_cache_is_published_through_its_links(tmp_path: Path) -> None:
    repo = tmp_path / "models--a--b"
    folder = write(tmp_path / "m", random.Random(2))
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(repo / "blobs" / str(number))
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    assert refusal_of_publisher(snapshot) == ""
    (snapshot / "secret.txt").symlink_to("/etc/hostname")
    with pytest.raises(PublishRefused, match="outside the folder"):
        find_files(snapshot)
