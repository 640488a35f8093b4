"""The tensors of a checkpoint by its headers: which files hold them, and whether they are those of a layout.

The publisher, the registry and the engine judge by the same functions; only an engine reads the values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from fairway.formats import safetensors
from fairway.formats.config_fields import object_in
from fairway.formats.decoder_config import ModelConfig

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
DTYPES: Final = frozenset({"F32", "F16", "BF16"})
MAX_NAMED: Final = 5  # names in an error message
MAX_HEADERS_BYTES: Final = 64 * 1024 * 1024  # the headers of a checkpoint; published ones have some megabytes
TOO_LARGE: Final = f"the headers of the tensor files have more than {MAX_HEADERS_BYTES} bytes"

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
# A buffer that older checkpoints carry; it is computed from the configuration.
COMPUTED: Final = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

Shape = tuple[int, ...]
# Returns a small file of a version, and of a tensor file its header; its errors are passed on.
Read = Callable[[str], bytes]


class BadWeights(ValueError):
    """The tensor files are not those that the configuration implies."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The tensors that a checkpoint holds. ``shapes``: those that it must have."""

    shapes: Mapping[str, Shape]
    # Tensors that it may have, and that are not used.
    optional: Mapping[str, Shape] = field(default_factory=dict)
    # Optional ones that must equal another: a tied model may carry its head twice.
    copies: Mapping[str, str] = field(default_factory=dict)
    # Buffers of any shape that are not used.
    ignored: re.Pattern[str] | None = None


def decoder_layout(config: ModelConfig) -> TensorLayout:
    """Return the layout of a decoder's checkpoint."""
    shapes = expected_shapes(config)
    optional, copies = ({HEAD: shapes[EMBEDDING]}, {HEAD: EMBEDDING}) if config.tied else ({}, {})
    return TensorLayout(shapes, optional, copies, COMPUTED)


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the name and shape of every tensor that a checkpoint of this model holds."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {EMBEDDING: (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.tied:
        shapes[HEAD] = (vocab, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    linears: dict[str, tuple[int, int, bool]] = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes |= {
            "self_attn.q_norm.weight": (config.head_dim,),
            "self_attn.k_norm.weight": (config.head_dim,),
        }
    return shapes


def weight_files(folder: str, names: Collection[str], read: Read) -> tuple[str, ...]:
    """Return the tensor files below ``folder`` (empty, or with its slash) that an engine opens.

    A single file goes before an index, as in transformers, and only the names of an index's files count:
    an entry that a conversion left behind changes nothing. Raises BadWeights, UnsupportedModel.
    """
    if folder + SINGLE in names:
        return (folder + SINGLE,)
    if folder + INDEX not in names:
        raise BadWeights(f"{folder}{SINGLE} is missing, and there is no {INDEX}")
    shards = object_in(folder + INDEX, read).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise BadWeights(f"{folder}{INDEX} has no usable weight_map")
    for shard in shards.values():
        if not isinstance(shard, str) or "/" in shard or not shard.endswith(".safetensors"):
            raise BadWeights(f"{folder}{INDEX}: weight_map names a file outside the model's folder")
    missing = sorted({folder + shard for shard in shards.values()} - set(names))
    if missing:
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadWeights(
            f"{missing[0]}{rest} is missing: {folder}{INDEX} names it; add the file, or write the index anew"
            " if the others hold all tensors"
        )
    return tuple(sorted({folder + shard for shard in shards.values()}))


def require_layout(folder: str, names: Collection[str], read: Read, layout: TensorLayout) -> dict[str, str]:
    """Return the file of each tensor: every one of the layout is there, and no other.

    Raises BadWeights, UnsupportedModel.
    """
    files, headers = read_tensors(folder, names, read)
    compare(headers, layout)
    return files


def read_tensors(
    folder: str, names: Collection[str], read: Read
) -> tuple[dict[str, str], dict[str, safetensors.TensorHeader]]:
    """Return the file of each tensor, and its header; each is in one file.

    Raises BadWeights, UnsupportedModel.
    """
    files: dict[str, str] = {}
    headers: dict[str, safetensors.TensorHeader] = {}
    size_bytes = 0
    for file in weight_files(folder, names, read):
        try:
            header = read(file)
            size_bytes += len(header)
            if size_bytes > MAX_HEADERS_BYTES:
                raise BadWeights(TOO_LARGE)
            found = safetensors.tensors_of(header)
        except safetensors.BadHeader as error:
            raise BadWeights(f"{file} is no valid safetensors file: {error}") from error
        for name, tensor in found.items():
            if name in files:
                raise BadWeights(f"{name} is in two files, {files[name]} and {file}: remove it from one")
            files[name], headers[name] = file, tensor
    return files, headers


def compare(headers: Mapping[str, safetensors.TensorHeader], layout: TensorLayout) -> None:
    """Return if the tensors are those of the layout. Raises BadWeights."""
    if missing := layout.shapes.keys() - headers.keys():
        raise BadWeights(f"missing tensors: {named(missing)}")
    shapes = {**layout.optional, **layout.shapes}
    extra = headers.keys() - shapes.keys()
    if layout.ignored is not None:
        extra = {name for name in extra if not layout.ignored.fullmatch(name)}
    if extra:
        raise BadWeights(f"unexpected tensors: {named(extra)}")
    for name, shape in shapes.items():
        if (found := headers.get(name)) is None:
            continue
        if found.shape != shape:
            raise BadWeights(f"{name} has shape {found.shape}, the configuration says {shape}")
        if found.dtype not in DTYPES:
            raise BadWeights(f"{name} has dtype {found.dtype}, not one of {', '.join(sorted(DTYPES))}")


def named(names: Collection[str]) -> str:
    """Return the first names for a message, and how many more there are."""
    shown = sorted(names)[:MAX_NAMED]
    return ", ".join(shown) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
