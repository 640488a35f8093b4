"""A checkpoint folder from a GGUF file: the values of its tensors, its tokenizer and its templates.

Quantised tensors are stored as float32, so that their values are those of the file; halves stay as they are.
Tensors are read and written by rows: memory is bounded, whatever the file's size.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.decoder_config import parse_config
from fairway.formats.weights import SINGLE, expected_shapes
from fairway.importing.gguf_config import ROPE_DIVISORS, config_of
from fairway.importing.gguf_file import BadGguf, GgufFile, GgufTensor, read_gguf
from fairway.importing.gguf_tokenizer import GgufTokens, tokens_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PIECE_VALUES: Final = 256 * 1024  # dequantised at once
_KEPT: Final = {"F32": "F32", "F16": "F16", "BF16": "BF16"}  # types stored as they are
_VALUE_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_DIVISORS: Final = 4096

# Names in a GGUF file by those of a checkpoint.
_OUTER: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

Report = Callable[[int, int], object]  # done and total bytes


@dataclass(frozen=True, slots=True)
class _Planned:
    """A tensor to write."""

    source: str  # name in the GGUF file
    tensor: GgufTensor  # its place there
    dtype: str  # type in the checkpoint
    heads: int  # number of heads whose rows are to be reordered; 0: none

    @property
    def size_bytes(self) -> int:
        return math.prod(self.tensor.shape) * _VALUE_BYTES[self.dtype]


def convert_gguf(path: Path, folder: Path, report: Report = lambda done, total: None) -> None:
    """Write a checkpoint that Fairway loads into an empty folder. Raises BadGguf, OSError."""
    file = read_gguf(path)
    config = config_of(file, _rope_divisors(file))
    tokens = tokens_of(file, config["vocab_size"])
    plan = _plan(file, config)
    needed = sum(planned.size_bytes for planned in plan.values())
    if needed > (free := shutil.disk_usage(folder).free):
        raise BadGguf(path, "tensors", f"the checkpoint takes {needed} bytes, {free} are free in {folder}")
    _write_small(folder, config, tokens)
    with (folder / SINGLE).open("wb") as out:
        _write_tensors(file, plan, out, report)


def _rope_divisors(file: GgufFile) -> list[float] | None:
    tensor = file.tensors.get(ROPE_DIVISORS)
    if tensor is None:
        return None
    if len(tensor.shape) != 1 or tensor.shape[0] > _MAX_DIVISORS or tensor.type != "F32":
        raise file.refusal(ROPE_DIVISORS, f"{tensor.type} of shape {tensor.shape} is no row of divisors")
    with file.path.open("rb") as stream:
        values: list[float] = _values(file, ROPE_DIVISORS, stream, tensor, 0, 1).ravel().tolist()
    return values


def _plan(file: GgufFile, config: dict[str, Any]) -> dict[str, _Planned]:
    """Return the tensors to write by their names: those that the configuration implies. Raises BadGguf."""
    try:
        shapes = expected_shapes(parse_config(config))
    except UnsupportedModel as error:
        raise file.refusal("general.architecture", str(error)) from error
    names = {_source_of(name): name for name in shapes}
    if missing := sorted(names.keys() - file.tensors.keys()):
        raise file.refusal(missing[0], f"the tensor is missing, with {len(missing) - 1} more")
    if extra := sorted(file.tensors.keys() - names.keys() - {ROPE_DIVISORS}):
        raise file.refusal(extra[0], f"the tensor is unexpected, with {len(extra) - 1} more")
    permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    plan = {}
    for source, name in names.items():
        tensor = file.tensors[source]
        if tensor.shape != shapes[name]:
            raise file.refusal(source, f"its shape is {tensor.shape}, the metadata imply {shapes[name]}")
        _require_readable(file, source, tensor.type)
        is_llama = file.metadata["general.architecture"] == "llama"
        heads = permuted.get(source.split(".")[-2], 0) if is_llama else 0
        if heads and len(tensor.shape) == 1 and tensor.type not in _KEPT:
            raise file.refusal(source, f"a bias of type {tensor.type} is not read")
        plan[name] = _Planned(source, tensor, _KEPT.get(tensor.type, "F32"), heads)
    return plan


def _source_of(name: str) -> str:
    """Return the name in a GGUF file of a tensor of a checkpoint."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def _require_readable(file: GgufFile, source: str, type_name: str) -> None:
    import gguf.quants

    known = {found.name for found in gguf.quants._type_traits}
    if type_name not in _KEPT and type_name not in known:
        raise file.refusal(source, f"its type {type_name} cannot be dequantised")


def _write_small(folder: Path, config: dict[str, Any], tokens: GgufTokens) -> None:
    generation: dict[str, Any] = dict(tokens.ids)
    if tokens.end_ids:
        generation["eos_token_id"] = list(tokens.end_ids)
    settings = tokens.settings | {"model_max_length": config["max_position_embeddings"]}
    for name, content in (
        ("config.json", config | tokens.ids),
        ("generation_config.json", generation),
        ("tokenizer.json", tokens.tokenizer),
        ("tokenizer_config.json", settings),
    ):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    for name, text in tokens.templates.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, "utf-8")


def _write_tensors(file: GgufFile, plan: dict[str, _Planned], out: IO[bytes], report: Report) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, planned in plan.items():
        header[name] = {
            "dtype": planned.dtype,
            "shape": planned.tensor.shape,
            "data_offsets": [total, total + planned.size_bytes],
        }
        total += planned.size_bytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    out.write(len(encoded).to_bytes(8, "little") + encoded)
    done = 0
    with file.path.open("rb") as stream:
        for planned in plan.values():
            for data in _pieces(file, planned, stream):
                done += out.write(data)
                report(done, total)


def _pieces(file: GgufFile, planned: _Planned, stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of a tensor in order, by rows; of reordered ones by heads."""
    tensor = planned.tensor
    if planned.heads and len(tensor.shape) == 1:  # a bias
        rows = tensor.shape[0]
        tensor = GgufTensor((rows, 1), tensor.type, tensor.offset_bytes, tensor.row_bytes // rows)
    unit = tensor.rows // planned.heads if planned.heads else 1
    step = unit * max(1, PIECE_VALUES // (unit * tensor.shape[-1]))
    for first in range(0, tensor.rows, step):
        values = _values(file, planned.source, stream, tensor, first, min(step, tensor.rows - first))
        if planned.heads:  # conversions of llama interleave the halves of each head
            values = values.reshape(-1, unit // 2, 2, tensor.shape[-1]).swapaxes(1, 2)
        yield values.tobytes()


def _values(
    file: GgufFile, name: str, stream: IO[bytes], tensor: GgufTensor, first: int, rows: int
) -> NDArray[np.generic]:
    """Return rows of a tensor, as floats or as the halves that are in the file. Raises BadGguf."""
    import gguf.quants
    import numpy as np
    from gguf.constants import GGMLQuantizationType

    stream.seek(tensor.offset_bytes + first * tensor.row_bytes)
    data = stream.read(rows * tensor.row_bytes)
    if len(data) != rows * tensor.row_bytes:
        raise file.refusal(name, "the file became shorter while it was read")
    if tensor.type in _KEPT:
        return np.frombuffer(data, dtype="<f4" if tensor.type == "F32" else "<u2").reshape(rows, -1)
    # Blocks do not depend on each other: one long row is one call, where each 16 rows would be one.
    raw = np.frombuffer(data, dtype=np.uint8).reshape(1, -1)
    found: NDArray[np.float32] = gguf.quants.dequantize(raw, GGMLQuantizationType[tensor.type])
    return found.reshape(rows, -1)
