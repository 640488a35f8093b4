"""LoRA adapters on vLLM's workers: our products beside those of its layers, in the rows that name an adapter.

vLLM's own adapters are not used: they have to be wired at the start, cost every step about as much as the
model, and give rows of the base the adapter of the last slot on CPUs. The layers have hooks only while an
adapter is loaded, so that an engine without adapters runs vLLM's code alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from fairway.formats.adapter import PRODUCTS, require_adapter
from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.decoder_config import ModelConfig
from fairway.formats.weights import BadWeights
from services.worker.engine.execute.adapters import AdaptedRows, AdapterSet, RankShare
from services.worker.engine.execute.operators import TorchOperators
from services.worker.engine.load.config import read_part
from services.worker.engine.unsupported import REFUSALS, BadCheckpoint

# The layers of a decoder that compute its products, by the ends of their names in vLLM.
LAYERS: Final[Mapping[str, str]] = {
    "self_attn.qkv_proj": "qkv",
    "self_attn.o_proj": "output",
    "mlp.gate_up_proj": "gate_up",
    "mlp.down_proj": "down",
}
NAME: Final = re.compile(r".*\blayers\.(\d+)\.(" + "|".join(map(re.escape, LAYERS)) + ")")
# Modules of which every rank reads a part of the inputs: their sums over the ranks are the outputs.
SPLIT_BY_INPUT: Final = (*PRODUCTS["output"], *PRODUCTS["down"])
KEYS_AND_VALUES: Final = PRODUCTS["qkv"][1:]


class VllmAdapters:
    """Implements ``executor.Adapters`` for all ranks together."""

    def __init__(self, ranks: Any, model: ModelConfig) -> None:
        """``ranks`` is vLLM's executor."""
        self._ranks = ranks
        self._model = model

    def load(self, adapter: int, folder: Path) -> int:
        """See ``Adapters``."""
        try:
            require_adapter(partial(read_part, folder), self._model)
        except (BadWeights, UnsupportedModel) as error:
            raise BadCheckpoint(str(error)) from error
        taken = self._ranks.collective_rpc("fairway_load_adapter", args=(self._model, adapter, folder))
        if refused := [each for each in taken if isinstance(each, str)]:
            self.drop(adapter)
            if not all(refused):
                raise MemoryError
            raise BadCheckpoint(refused[0])
        return sum(taken)

    def drop(self, adapter: int) -> None:
        """See ``Adapters``."""
        self._ranks.collective_rpc("fairway_drop_adapter", args=(adapter,))


class RankAdapters:
    """The adapters of one rank, and the hooks that add their products to what the rank's layers return."""

    def __init__(self, runner: Any, model: ModelConfig) -> None:
        """``runner`` is vLLM's model runner. Raises BadCheckpoint for layers that have other products."""
        self._runner = runner
        self._layers = {
            (int(found[1]), LAYERS[found[2]]): module
            for name, module in runner.model.named_modules()
            if (found := NAME.fullmatch(name))
        }
        mine = {layer for layer, _ in self._layers}
        if len(self._layers) != len(mine) * len(LAYERS) or not mine:
            raise BadCheckpoint("vLLM computes this model's products in other layers")
        operators = TorchOperators(kv_heads=model.kv_heads, eps=model.norm_eps)
        share = RankShare(mine, partial(_part, model.kv_heads), _total)
        self._set = AdapterSet(model, operators, runner.model_config.dtype, share)
        self._loaded: set[int] = set()
        self._hooks: list[Any] = []
        self._of_requests: Mapping[str, int] = {}
        self._rows: list[AdaptedRows] = []

    def load(self, adapter: int, folder: Path) -> int | str:
        """Return the bytes that the adapter takes; or why it cannot be loaded, empty for a lack of memory."""
        try:
            taken = self._set.load(adapter, folder)
        except REFUSALS as error:
            return str(error) or type(error).__name__
        except MemoryError:
            return ""
        self._loaded.add(adapter)
        if not self._hooks:
            self._hooks = [self._runner.model.register_forward_pre_hook(self._begin)]
            self._hooks += [
                module.register_forward_hook(self._adding(*place)) for place, module in self._layers.items()
            ]
        return taken

    def drop(self, adapter: int) -> None:
        """Free an adapter, the last with the hooks. Idempotent."""
        self._set.drop(adapter)
        self._loaded.discard(adapter)
        while self._hooks and not self._loaded:
            self._hooks.pop().remove()

    def step(self, of_requests: Mapping[str, int]) -> None:
        """The next forward pass computes these requests with these adapters, and others with the base."""
        self._of_requests = of_requests

    def _begin(self, *_: Any) -> None:
        """Find the rows of the pass, whose order only the runner has."""
        names = self._runner.input_batch.req_ids if self._of_requests else []
        rows = np.diff(self._runner.query_start_loc.np[: len(names) + 1])
        self._set.begin([self._of_requests.get(name, 0) for name in names], rows)
        self._rows = self._set.rows()

    def _adding(self, layer: int, product: str) -> Callable[..., None]:
        def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
            for rows in self._rows:
                rows.add(layer, product, output[0] if isinstance(output, tuple) else output, inputs[0])

        return add


def _part(kv_heads: int, module: str, matrix: str, whole: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of matrix A [rank, in] or B [out, rank], as vLLM divides the module."""
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    by_input = module in SPLIT_BY_INPUT
    if by_input != (matrix == "A"):
        return whole
    parts = min(ranks, kv_heads) if module in KEYS_AND_VALUES else ranks  # ranks may share a head of keys
    dim = int(by_input)
    size = whole.shape[dim] // parts
    return whole.narrow(dim, rank * parts // ranks * size, size).contiguous()


def _total(product: str, inner: torch.Tensor) -> torch.Tensor:
    """Return A x, of which a rank has the terms of its inputs where the product is split by those."""
    return tensor_model_parallel_all_reduce(inner) if PRODUCTS[product][0] in SPLIT_BY_INPUT else inner
