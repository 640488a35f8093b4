"""A LoRA adapter in PEFT's files: what it changes of a decoder, or why it cannot be served.

Each target projection W x becomes W x + scale * B (A x), with A [rank, in] and B [out, rank]. A field that
may change the computation in another way is refused by its name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fairway.formats import safetensors
from fairway.formats.config_fields import (
    UnsupportedModel,
    flag,
    number,
    object_in,
    positive_int,
    require_inert,
)
from fairway.formats.decoder_config import ModelConfig
from fairway.formats.version_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from fairway.formats.weights import BadWeights, Read, Shape, TensorLayout, compare, expected_shapes

MAX_RANK: Final = 256
DEFAULT_ALPHA: Final = 8.0
# The projections of a layer that an engine computes as one product, in the order of its outputs.
PRODUCTS: Final[Mapping[str, tuple[str, ...]]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
MODULES: Final[Mapping[str, str]] = {
    module.rpartition(".")[2]: module for modules in PRODUCTS.values() for module in modules
}
ALL_LINEAR: Final = "all-linear"
_INERT: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": (None, "none"),
    # The others begin at changed weights of the base.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
# Fields without effect on an answer.
_IGNORED: Final = frozenset(
    (
        "r", "lora_alpha", "use_rslora", "target_modules", "auto_mapping", "base_model_name_or_path",
        "revision", "inference_mode", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size",
        "eva_config", "runtime_config", *_INERT,
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    rank: int  # rows of every A
    scale: float  # factor of B A x
    modules: tuple[str, ...]  # the projections of each layer that it changes, in the order of ``MODULES``


def parse_adapter(fields: Mapping[str, Any]) -> AdapterConfig:
    """Return what the adapter changes. Raises UnsupportedModel with the first field that is not served."""
    require_inert(fields, _INERT)
    if "peft_type" not in fields:
        raise UnsupportedModel("peft_type", "missing")
    for name, value in fields.items():
        if name not in _IGNORED and value:
            raise UnsupportedModel(name, value)
    rank = positive_int(fields, "r", most=MAX_RANK)
    alpha = number(fields, "lora_alpha", default=DEFAULT_ALPHA, above=0.0)
    divisor = math.sqrt(rank) if flag(fields, "use_rslora") else rank
    return AdapterConfig(rank, alpha / divisor, _modules(fields.get("target_modules")))


def _modules(targets: object) -> tuple[str, ...]:
    if targets == ALL_LINEAR:
        return tuple(MODULES.values())
    if not isinstance(targets, list) or not targets:
        raise UnsupportedModel("target_modules", targets)
    for target in targets:
        if not isinstance(target, str) or target not in MODULES:
            raise UnsupportedModel("target_modules", target)
    return tuple(module for name, module in MODULES.items() if name in targets)


def tensor_name(layer: int, module: str, matrix: str) -> str:
    """Return PEFT's name of matrix A or B of a projection."""
    return f"base_model.model.model.layers.{layer}.{module}.lora_{matrix}.weight"


def adapter_layout(adapter: AdapterConfig, base: ModelConfig) -> TensorLayout:
    """Return the layout of ``ADAPTER_WEIGHTS`` on this base."""
    of_base, shapes = expected_shapes(base), dict[str, Shape]()
    for layer in range(base.layers):
        for module in adapter.modules:
            rows, columns = of_base[f"model.layers.{layer}.{module}.weight"]
            shapes[tensor_name(layer, module, "A")] = (adapter.rank, columns)
            shapes[tensor_name(layer, module, "B")] = (rows, adapter.rank)
    return TensorLayout(shapes)


def require_adapter(read: Read, base: ModelConfig) -> AdapterConfig:
    """Return the adapter if the headers of its weights fit the base. Raises UnsupportedModel, BadWeights."""
    try:
        adapter = parse_adapter(object_in(ADAPTER_CONFIG, read))
    except UnsupportedModel as refused:
        raise UnsupportedModel(f"{ADAPTER_CONFIG}: {refused.field}", refused.value) from refused
    try:
        headers = safetensors.tensors_of(read(ADAPTER_WEIGHTS))
    except safetensors.BadHeader as error:
        raise BadWeights(f"{ADAPTER_WEIGHTS} is no valid safetensors file: {error}") from error
    try:
        compare(headers, adapter_layout(adapter, base))
    except BadWeights as error:
        raise BadWeights(f"{ADAPTER_WEIGHTS}: {error}") from error
    return adapter


def product_ranks(adapter: AdapterConfig) -> dict[str, int]:
    """Return the rows of A of each product that it changes: those of its projections, one after the other."""
    counts = {name: len(of_product(adapter.modules, name)) for name in PRODUCTS}
    return {name: count * adapter.rank for name, count in counts.items() if count}


def of_product(modules: Collection[str], product: str) -> tuple[str, ...]:
    """Return the modules that belong to the product, in the order of its outputs."""
    return tuple(module for module in PRODUCTS[product] if module in modules)


def adapter_bytes(adapter: AdapterConfig, base: ModelConfig, bytes_per_value: int) -> int:
    """Return the memory that an engine takes for the adapter."""
    shapes, values = expected_shapes(base), 0
    for product, rank in product_ranks(adapter).items():
        sizes = [shapes[f"model.layers.0.{module}.weight"] for module in PRODUCTS[product]]
        values += rank * (sizes[0][1] + sum(rows for rows, _ in sizes))
    return values * base.layers * bytes_per_value
