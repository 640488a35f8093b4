"""Weights from safetensors files, one or in shards; nothing here can run code from a checkpoint.

Every header is compared with the layout that the configuration implies before a tensor is allocated: names,
shapes and dtypes. The safetensors library refuses headers that lie about sizes and offsets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.decoder_config import ModelConfig
from services.worker.engine.load.config import read_json
from services.worker.engine.unsupported import BadCheckpoint

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
DTYPES: Final = frozenset({"F32", "F16", "BF16"})
MAX_NAMED: Final = 5  # names in an error message

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
# A buffer that older checkpoints carry; it is computed from the configuration.
COMPUTED: Final = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The tensors that a checkpoint holds. ``shapes``: those that it must have."""

    shapes: Mapping[str, Shape]
    # Those that it may have, and that are not used.
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


class Checkpoint:
    """The open files of one model. A context manager: the files are mapped while it is open."""

    def __init__(self, model_dir: Path, layout: TensorLayout) -> None:
        """Every tensor of the layout is there, and no other. Raises BadCheckpoint otherwise."""
        self._stack = ExitStack()
        self._sources: dict[str, Any] = {}  # tensor name -> the open file that holds it
        try:
            for path, names in _files(model_dir).items():
                self._open(path, names)
            self._compare(layout)
            for name, original in layout.copies.items():
                self._check_copy(name, original)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sources.clear()
        self._stack.close()

    def tensor(self, name: str, *, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that the caller owns, in its checked shape, converted to ``dtype``."""
        try:
            stored: torch.Tensor = self._sources[name].get_tensor(name)
        except SafetensorError as error:
            raise BadCheckpoint(f"{name} cannot be read") from error
        # A copy: a file that is overwritten in place must not change a loaded model.
        owned = stored.to(dtype, copy=True)
        least, most = torch.aminmax(owned)  # both are NaN where any is
        if not (least.isfinite() and most.isfinite()):
            raise BadCheckpoint(f"{name} holds values that are not finite in {dtype}")
        return owned

    def _open(self, path: Path, expected: frozenset[str] | None) -> None:
        try:
            source = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except FileNotFoundError as error:
            raise BadCheckpoint(f"{path.name} is missing") from error
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{path.name} is no valid safetensors file") from error
        names = frozenset(source.keys())
        if expected is not None and names != expected:
            raise BadCheckpoint(f"{path.name} and its index disagree on {_named(names ^ expected)}")
        for name in sorted(names):
            if name in self._sources:
                raise BadCheckpoint(f"{name} is in two files")
            self._sources[name] = source

    def _compare(self, layout: TensorLayout) -> None:
        missing = layout.shapes.keys() - self._sources.keys()
        if missing:
            raise BadCheckpoint(f"missing tensors: {_named(missing)}")
        shapes = {**layout.optional, **layout.shapes}
        extra = self._sources.keys() - shapes.keys()
        if layout.ignored is not None:
            extra = {name for name in extra if not layout.ignored.fullmatch(name)}
        if extra:
            raise BadCheckpoint(f"unexpected tensors: {_named(extra)}")
        for name, shape in shapes.items():
            if name in self._sources:
                self._compare_header(name, shape)

    def _compare_header(self, name: str, shape: Shape) -> None:
        header = self._sources[name].get_slice(name)
        if tuple(header.get_shape()) != shape:
            raise BadCheckpoint(
                f"{name} has shape {tuple(header.get_shape())}, the configuration says {shape}"
            )
        if header.get_dtype() not in DTYPES:
            raise BadCheckpoint(f"{name} has dtype {header.get_dtype()}")

    def _check_copy(self, name: str, original: str) -> None:
        if name not in self._sources:
            return
        copy, tensor = (self._sources[each].get_tensor(each) for each in (name, original))
        if not torch.equal(copy, tensor):
            raise BadCheckpoint(f"{name} differs from {original}, to which it is tied")


def _files(model_dir: Path) -> dict[Path, frozenset[str] | None]:
    """Return the files and, where there is an index, the names that each must hold."""
    if not (model_dir / INDEX).exists():
        return {model_dir / SINGLE: None}
    try:
        weight_map = read_json(model_dir / INDEX).get("weight_map")
    except UnsupportedModel as error:
        raise BadCheckpoint(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{INDEX} has no weight_map")
    files: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise BadCheckpoint(f"{INDEX} names a file outside the model's folder")
        files.setdefault(file, set()).add(name)
    return {model_dir / file: frozenset(names) for file, names in sorted(files.items())}


def _named(names: frozenset[str] | set[str]) -> str:
    shown = sorted(names)[:MAX_NAMED]
    return ", ".join(shown) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
