"""LoRA adapters beside a model's weights: what each adds to the products of its sequences' rows.

A row of an adapter gets B (A x) in addition, by the operators of the base's products: its result depends on
its company as far as theirs does. Rows without an adapter are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from fairway.formats.adapter import PRODUCTS, AdapterConfig, of_product, require_adapter, tensor_name
from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.decoder_config import ModelConfig
from fairway.formats.version_files import ADAPTER_WEIGHTS
from fairway.formats.weights import BadWeights, expected_shapes
from services.worker.engine.execute.operators import Gated, Operators, Projection
from services.worker.engine.execute.step_rows import Ints
from services.worker.engine.load.config import read_part
from services.worker.engine.load.weights import tensor_of
from services.worker.engine.unsupported import BadCheckpoint

SLICE_ROWS: Final = 64  # rows that are changed at once, which bounds the memory besides the weights


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one of several ranks computes of a model."""

    layers: Container[int]
    part: Callable[[str, str, torch.Tensor], torch.Tensor]  # the rank's part of a module's matrix "A" or "B"
    total: Callable[[str, torch.Tensor], torch.Tensor]  # the sum of a product's A x over all ranks


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to a product: ``b`` (``a`` x). The scale is part of ``b``."""

    a: Projection
    b: Projection
    total: Callable[[torch.Tensor], torch.Tensor] | None  # the sum over ranks that have parts of ``a``

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        inner = self.a(x)
        return self.b.add_to(y, inner if self.total is None else self.total(inner))


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Rows [count] of a step that one adapter computes. ``layers``: its products by name, of each layer."""

    layers: Sequence[Mapping[str, LowRank]]
    rows: torch.Tensor

    def add(self, layer: int, product: str, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add to the rows of y, the product of x, in place."""
        if (added := self.layers[layer].get(product)) is not None:
            mine = added.add_to(y.index_select(0, self.rows), x.index_select(0, self.rows))
            y.index_copy_(0, self.rows, mine)

    def gate(self, layer: int, gated: Gated, y: torch.Tensor, x: torch.Tensor) -> None:
        """Replace the rows of y, which is ``gated(x)``, in place."""
        if (added := self.layers[layer].get("gate_up")) is not None:
            mine = x.index_select(0, self.rows)
            y.index_copy_(0, self.rows, gated.combine(added.add_to(gated.both(mine), mine)))


class AdapterSet:
    """Implements ``executor.Adapters``. ``begin`` comes before each step."""

    def __init__(
        self, model: ModelConfig, operators: Operators, dtype: torch.dtype, share: RankShare | None = None
    ) -> None:
        """``share`` None: the whole model."""
        self._model = model
        self._share = share
        self._operators = operators
        self._dtype = dtype
        self._loaded: dict[int, Sequence[Mapping[str, LowRank]]] = {}
        self._of_rows: torch.Tensor | None = None  # the adapter of each row of the step, None without any

    def load(self, adapter: int, folder: Path) -> int:
        """See ``Adapters``."""
        try:
            found = require_adapter(partial(read_part, folder), self._model)
        except (BadWeights, UnsupportedModel) as error:
            raise BadCheckpoint(str(error)) from error
        try:
            with torch.inference_mode(), safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:

                def tensor(name: str) -> torch.Tensor:
                    return tensor_of(file, name, torch.float32)

                mine: Container[int] = self._share.layers if self._share else range(self._model.layers)
                layers = [
                    self._layer(found, layer, tensor) if layer in mine else {}
                    for layer in range(self._model.layers)
                ]
        except (SafetensorError, OSError) as error:
            raise BadCheckpoint(f"{ADAPTER_WEIGHTS} cannot be read") from error
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            raise MemoryError from error  # torch has no type of its own for it on a CPU
        self._loaded[adapter] = layers
        return sum(part.a.bytes + part.b.bytes for layer in layers for part in layer.values())

    def drop(self, adapter: int) -> None:
        """See ``Adapters``."""
        self._loaded.pop(adapter, None)

    def begin(self, adapters: Sequence[int], rows: Ints) -> None:
        """Begin a step: so many rows of each of these adapters, 0 the base."""
        self._of_rows = torch.from_numpy(np.repeat(adapters, rows)) if any(adapters) else None

    def rows(self, chosen: torch.Tensor | None = None) -> list[AdaptedRows]:
        """Return the rows of the step that adapters compute; of the ``chosen`` ones by their places there."""
        if self._of_rows is None:
            return []
        of_rows = self._of_rows if chosen is None else self._of_rows[chosen]
        found: list[AdaptedRows] = []
        for adapter in sorted({*of_rows.tolist()} - {0}):
            rows = torch.nonzero(of_rows == adapter)[:, 0]
            for first in range(0, len(rows), SLICE_ROWS):
                found.append(AdaptedRows(self._loaded[adapter], rows[first : first + SLICE_ROWS]))
        return found

    def _layer(
        self, adapter: AdapterConfig, layer: int, tensor: Callable[[str], torch.Tensor]
    ) -> dict[str, LowRank]:
        """Return the products of a layer that are changed. Each has one A, that of its projections in turn,
        and one B with a block for each."""
        shapes, found = expected_shapes(self._model), dict[str, LowRank]()
        for product, modules in PRODUCTS.items():
            if not (changed := of_product(adapter.modules, product)):
                continue
            size = adapter.rank
            a = torch.cat(
                [self._part(module, "A", tensor(tensor_name(layer, module, "A"))) for module in changed]
            )
            blocks = []
            for module in modules:
                block = torch.zeros(shapes[f"model.layers.{layer}.{module}.weight"][0], len(a))
                if module in changed:
                    column = changed.index(module) * size
                    b = tensor(tensor_name(layer, module, "B"))
                    block[:, column : column + size] = b * adapter.scale
                blocks.append(self._part(module, "B", block))
            left, right = (
                self._operators.projection([part.to(self._dtype)], None) for part in (a, torch.cat(blocks))
            )
            total = None if self._share is None else partial(self._share.total, product)
            found[product] = LowRank(left, right, total)
        return found

    def _part(self, module: str, matrix: str, whole: torch.Tensor) -> torch.Tensor:
        return whole if self._share is None else self._share.part(module, matrix, whole)
