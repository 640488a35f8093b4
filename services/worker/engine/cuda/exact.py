"""What computes on CUDA in mode "exact": a row's bits depend neither on its neighbours nor on its place.

A product has one tile for all numbers of rows; a reduction is one program per row (``exact_kernels``). cuBLAS
is faster, and takes other kernels for other numbers of rows. The price is that one tile has to do for a
single row and for thousands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from services.worker.engine.cuda import exact_kernels as exact_kernels
from services.worker.engine.cuda.operators import TritonOperators
from services.worker.engine.execute.operators import Parts, whole

ROW_COLUMNS: Final = 1024  # columns of a row that are read at once


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program of a product computes at once, and with how many warps and loads ahead (``stages``)."""

    rows: int
    columns: int
    depth: int
    group: int
    warps: int
    stages: int


TILES: Final = {
    torch.bfloat16: Tile(rows=64, columns=64, depth=64, group=8, warps=4, stages=4),
    torch.float32: Tile(rows=32, columns=32, depth=32, group=8, warps=4, stages=3),
}


class ExactOperators(TritonOperators):
    """Implements ``Operators``: a row's result is a function of that row and the weights, to the last bit.

    What it inherits for heads is that already: one program per row and head.
    """

    def projection(self, parts: Parts, bias: torch.Tensor | None) -> Product:
        """See ``Operators``."""
        return Product(whole(parts), bias, gated=False)

    def gated(self, parts: Parts, bias: torch.Tensor | None) -> Product:
        """See ``Operators``."""
        return Product(whole(parts), bias, gated=True)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See ``Operators``."""
        x = x.contiguous()
        out = torch.empty_like(x)
        exact_kernels.norm_rows[(len(x),)](x, weight, out, self._eps, **_columns(x))
        return out


class Product:
    """Implements ``Projection`` and ``Gated``. ``bytes`` are those of weight and bias."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool) -> None:
        self.bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._weight = weight.contiguous()
        self._bias = bias
        self._gated = gated
        self._columns = len(weight) // 2 if gated else len(weight)
        self._tile = TILES[weight.dtype]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.into(x, x.new_empty(len(x), self._columns))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See ``Projection``; the residual is changed in place."""
        return self.into(x, residual, add=True)

    def both(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Gated``."""
        return Product(self._weight, self._bias, gated=False)(x)

    def combine(self, both: torch.Tensor) -> torch.Tensor:
        """See ``Gated``. The identity of both sides is one product as any other."""
        identity = torch.eye(both.shape[1], dtype=both.dtype, device=both.device)
        return Product(identity, None, gated=True)(both)

    def into(self, x: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> torch.Tensor:
        """Return ``out`` [rows, columns], of any type, which was written or added to."""
        x, weight, tile, rows = x.contiguous(), self._weight, self._tile, len(x)
        assert out.is_contiguous(), "written row by row"
        programs = -(-rows // tile.rows) * -(-self._columns // tile.columns)
        exact_kernels.product[(programs,)](
            x, weight, weight if self._bias is None else self._bias, out, rows,
            COLUMNS=self._columns, DEPTH=weight.shape[1], BIAS=self._bias is not None,
            ADD=add, GATED=self._gated,
            ROW_TILE=tile.rows, COLUMN_TILE=tile.columns, DEPTH_TILE=tile.depth, GROUP=tile.group,
            WIDEN=weight.device.type != "cuda",  # only the interpreter runs elsewhere
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return out


class TritonReductions:
    """Implements ``Reductions``: a row's result is a function of that row alone, to the last bit."""

    def log_softmax(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Reductions``."""
        out = torch.empty_like(x)
        exact_kernels.log_softmax_rows[(len(x),)](x, out, **_columns(x))
        return out

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Reductions``."""
        x = x.contiguous()
        out = torch.empty(x.shape[:-1], dtype=torch.float64, device=x.device)
        exact_kernels.sum_rows[(out.numel(),)](x, out, **_columns(x))
        return out

    def running_sums(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Reductions``."""
        out = torch.empty_like(x)
        # How wide x is may be for a neighbour: as many numbers at once whatever the width.
        exact_kernels.running_sum_rows[(len(x),)](x, out, WIDTH=x.shape[-1], COLUMNS=ROW_COLUMNS, num_warps=4)
        return out

    def greatest(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Reductions``. Equal numbers keep their order, which ``topk`` leaves open on CUDA."""
        values, places = x.sort(dim=-1, descending=True, stable=True)
        return values[:, :count], places[:, :count]


def _columns(x: torch.Tensor) -> dict[str, Any]:
    """Return the constants and warps of a program that reduces a row of x."""
    width = x.shape[-1]
    columns = min(ROW_COLUMNS, 1 << (width - 1).bit_length())
    return {"WIDTH": width, "COLUMNS": columns, "num_warps": 4 if columns > 128 else 1}
