"""Checkpoints: only the tensors that the configuration implies, from files that do not lie."""

from __future__ import annotations

import json
import math
import pickle  # noqa: TID251  (it writes what must be refused)
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fairway.formats.decoder_config import parse_config
from fairway.formats.weights import INDEX, SINGLE, TensorLayout, decoder_layout, expected_shapes
from services.worker.engine.load.weights import Checkpoint
from services.worker.engine.unsupported import BadCheckpoint

FIELDS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
CONFIG = parse_config(FIELDS)
LAYOUT = decoder_layout(CONFIG)
TIED = decoder_layout(parse_config(FIELDS | {"tie_word_embeddings": True}))
NORM = "model.norm.weight"


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in expected_shapes(CONFIG).items()}


def write(folder: Path, content: dict[str, torch.Tensor], name: str = SINGLE) -> None:
    save_file(content, folder / name)


def refused(folder: Path, match: str, layout: TensorLayout = LAYOUT) -> None:
    with pytest.raises(BadCheckpoint, match=match):
        Checkpoint(folder, layout)


def test_tensors_are_read_and_owned(tmp_path: Path) -> None:
    content = tensors()
    write(tmp_path, content)
    with Checkpoint(tmp_path, LAYOUT) as checkpoint:
        norm = checkpoint.tensor(NORM, dtype=torch.float32)
        embedding = checkpoint.tensor("model.embed_tokens.weight", dtype=torch.bfloat16)
    with (tmp_path / SINGLE).open("r+b") as file:  # overwritten in place
        file.write(b"\xff" * (tmp_path / SINGLE).stat().st_size)
    assert torch.equal(norm, content[NORM])
    assert embedding.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    content = {name: tensor.to(dtype) for name, tensor in tensors().items()}
    write(tmp_path, content)
    with Checkpoint(tmp_path, LAYOUT) as checkpoint:
        assert torch.equal(checkpoint.tensor(NORM, dtype=torch.float32), content[NORM].float())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn, torch.int64])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    write(tmp_path, tensors() | {NORM: torch.zeros(8).to(dtype)})
    refused(tmp_path, f"{NORM} has dtype")


def test_missing_and_unexpected_tensors_are_refused_by_name(tmp_path: Path) -> None:
    content = tensors()
    del content[NORM]
    write(tmp_path, content)
    refused(tmp_path, f"missing tensors: {NORM}")
    write(tmp_path, tensors() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(8)})
    refused(tmp_path, r"unexpected tensors: model\.layers\.0\.self_attn\.q_proj\.bias")
    write(tmp_path, tensors() | {"model.layers.2.mlp.up_proj.weight": torch.zeros(12, 8)})
    refused(tmp_path, "unexpected tensors")


@pytest.mark.parametrize("shape", [(9,), (8, 1), (4, 2), ()])
def test_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    write(tmp_path, tensors() | {NORM: torch.zeros(shape)})
    refused(tmp_path, f"{NORM} has shape")


def test_frequencies_that_old_checkpoints_carry_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, tensors() | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    Checkpoint(tmp_path, LAYOUT).__exit__()


def test_a_tied_model_may_carry_its_head_only_if_it_is_the_same(tmp_path: Path) -> None:
    content = tensors()
    write(tmp_path, content | {"lm_head.weight": content["model.embed_tokens.weight"].clone()})
    Checkpoint(tmp_path, TIED).__exit__()
    write(tmp_path, content)
    refused(tmp_path, "lm_head.weight differs", TIED)
    write(tmp_path, content | {"lm_head.weight": torch.zeros(3, 3)})
    refused(tmp_path, "lm_head.weight has shape", TIED)
    del content["lm_head.weight"]
    write(tmp_path, content)
    refused(tmp_path, "missing tensors: lm_head.weight")


# --- files that lie ------------------------------------------------------------------------------


def relabelled(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of a safetensors file and keep its data."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + raw[8 + length :])


LIES: dict[str, Callable[[dict[str, Any]], None]] = {
    "shape": lambda header: header[NORM].update(shape=[1 << 40]),
    "dtype": lambda header: header[NORM].update(dtype="F64"),
    "offset beyond the end": lambda header: header[NORM].update(data_offsets=[0, 1 << 40]),
    "offsets that overlap": lambda header: header[NORM].update(data_offsets=[0, 32]),
    "offsets reversed": lambda header: header[NORM].update(data_offsets=header[NORM]["data_offsets"][::-1]),
    "negative offset": lambda header: header[NORM].update(data_offsets=[-32, 0]),
    "no shape": lambda header: header[NORM].pop("shape"),
    "overflowing shape": lambda header: header[NORM].update(shape=[1 << 62, 1 << 62]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_refused(tmp_path: Path, lie: str) -> None:
    write(tmp_path, tensors())
    relabelled(tmp_path / SINGLE, LIES[lie])
    refused(tmp_path, "no valid safetensors file")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1, -1000])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    write(tmp_path, tensors())
    path = tmp_path / SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    refused(tmp_path, "no valid safetensors file")


def test_a_header_that_claims_the_whole_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", 1 << 50) + b"{}")
    refused(tmp_path, "no valid safetensors file")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("/nonexistent/executed", "w")


def test_pickle_is_never_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    refused(tmp_path, "model.safetensors is missing")
    (tmp_path / SINGLE).write_bytes(pickle.dumps(Evil()))
    refused(tmp_path, "no valid safetensors file")


# --- shards --------------------------------------------------------------------------------------


def write_shards(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    content = tensors()
    names = sorted(content)
    first, second = names[::2], names[1::2]
    write(folder, {name: content[name] for name in first}, "a.safetensors")
    write(folder, {name: content[name] for name in second}, "b.safetensors")
    weight_map = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map | changes}))
    return content


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    content = write_shards(tmp_path)
    with Checkpoint(tmp_path, LAYOUT) as checkpoint:
        for name, tensor in content.items():
            assert torch.equal(checkpoint.tensor(name, dtype=torch.float32), tensor)


@pytest.mark.parametrize(
    "file",
    ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin", "..", 7, None, "a\0.safetensors"],
)
def test_an_index_cannot_point_elsewhere(tmp_path: Path, file: Any) -> None:
    write_shards(tmp_path, **{NORM: file})
    refused(tmp_path, "outside|no valid|is missing")


def test_of_an_index_only_its_files_count(tmp_path: Path) -> None:
    write_shards(
        tmp_path, **{NORM: "b.safetensors" if sorted(tensors()).index(NORM) % 2 == 0 else "a.safetensors"}
    )
    Checkpoint(tmp_path, LAYOUT).__exit__()
    write_shards(tmp_path, **{"model.ghost": "a.safetensors"})
    Checkpoint(tmp_path, LAYOUT).__exit__()
    (tmp_path / "b.safetensors").unlink()
    refused(tmp_path, "b.safetensors is missing")


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "nonsense"])
def test_an_index_of_another_form_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    refused(tmp_path, INDEX)


def test_the_expected_names_are_those_that_transformers_writes(save_model: Any) -> None:
    for family, overrides in (
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Mistral", {}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"attention_bias": True}),
    ):
        _, folder = save_model(family, **overrides)
        shapes = expected_shapes(parse_config(json.loads((folder / "config.json").read_text())))
        assert {name: tuple(t.shape) for name, t in load_file(folder / SINGLE).items()} == shapes


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_no_numbers_are_refused_by_name(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    content = tensors()
    content[NORM][3] = value
    write(tmp_path, content)
    with (
        Checkpoint(tmp_path, LAYOUT) as checkpoint,
        pytest.raises(BadCheckpoint, match=f"{NORM} holds values"),
    ):
        checkpoint.tensor(NORM, dtype=dtype)


def test_finite_weights_whose_logits_overflow_do_not_load(save_model: Any, load_engine: Any) -> None:
    """A damaged exponent leaves a number: the first answers find it, and these are the warm-up's."""
    _, folder = save_model("Llama", tie_word_embeddings=False)
    content = load_file(folder / SINGLE)
    content["lm_head.weight"] = torch.full_like(content["lm_head.weight"], 3e38)
    save_file(content, folder / SINGLE)
    with pytest.raises(BadCheckpoint, match="not finite in the warm-up"):
        load_engine(folder)


@pytest.mark.parametrize(
    "name",
    [
        "self_attn.q_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ],
)
def test_a_product_that_is_not_finite_is_refused_by_its_part(
    save_model: Any, load_engine: Any, name: str
) -> None:
    _, folder = save_model("Llama")
    content, part = load_file(folder / SINGLE), f"model.layers.1.{name}.weight"
    content[part][-1, -1] = math.nan
    save_file(content, folder / SINGLE)
    with pytest.raises(BadCheckpoint, match=rf"{re.escape(part)} holds values that are not finite"):
        load_engine(folder)
