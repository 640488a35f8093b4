"""The operators of a decoder in C++. Every result of a row depends on that row alone, to the last bit.

That holds by construction and for any number of rows and threads: an output element of a linear is one chain
of fused multiply-adds, a sum over a row goes over the same sixteen running sums (``source/simd.h``). On
processors with fused multiply-add the bits are also the same from one to another.
"""

from __future__ import annotations

import contextlib
import mmap
from ctypes import byref
from typing import Final

import torch
import torch.nn.functional as F

from services.worker.engine.execute.executor import RuledRows
from services.worker.engine.execute.operators import (
    Gated,
    HeadNorms,
    Heads,
    NotFinite,
    Operators,
    Parts,
    Projection,
)
from services.worker.engine.native.library import Library, LinearCall, RotateCall, RuleOutCall

LANES: Final = 16  # numbers in a vector, equal to the constant in source/simd.h
PANEL: Final = 2 * LANES
STORE: Final = 0  # source/linear.h, Epilogue
ADD: Final = 1
GATE: Final = 2


class Scratch:
    """Room for the rows that a linear packs; it grows to the largest and stays."""

    def __init__(self) -> None:
        self._room = torch.empty(0)

    def pointer(self, elements: int) -> int:
        """Return where so many floats may be written, until the next call."""
        if self._room.numel() < elements:
            self._room = torch.empty(elements, dtype=torch.float32)
        return self._room.data_ptr()


class NativeOperators:
    """Implements ``operators.Operators`` for one data type on the CPU.

    ``linears`` are computed by those operators instead, and depend on company as they do.
    """

    def __init__(
        self, library: Library, *, kv_heads: int, eps: float, threads: int, linears: Operators | None = None
    ) -> None:
        self.library = library
        self.copies = linears is None or linears.copies
        self._linears = linears
        self._kv_heads = kv_heads
        self._eps = eps
        self.threads = threads
        self.scratch = Scratch()

    def projection(self, parts: Parts, bias: torch.Tensor | None) -> Projection:
        """See ``Operators``."""
        if self._linears is not None:
            return self._linears.projection(parts, bias)
        return _Linear(self, parts, bias, gated=False)

    def gated(self, parts: Parts, bias: torch.Tensor | None) -> Gated:
        """See ``Operators``."""
        if self._linears is not None:
            return self._linears.gated(parts, bias)
        return _Gated(self, parts, bias, gated=True)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See ``Operators``."""
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, width = x.shape
        self.library.norm(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, self._eps, self.threads
        )
        return out

    def heads(
        self, qkv: torch.Tensor, norms: HeadNorms | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> Heads:
        """See ``Operators``; ``qkv`` is changed in place and the results are views of it."""
        rows, all_heads, dim = qkv.shape
        kv_heads = self._kv_heads
        heads = all_heads - 2 * kv_heads
        call = RotateCall(
            x=qkv.data_ptr(),
            row_stride=all_heads * dim,
            q_norm=norms.query.data_ptr() if norms is not None else None,
            k_norm=norms.key.data_ptr() if norms is not None else None,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            rows=rows,
            q_heads=heads,
            k_heads=kv_heads,
            dim=dim,
            threads=self.threads,
            eps=self._eps,
        )
        self.library.rotate(byref(call))
        return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]

    def rule_out(self, logits: torch.Tensor, ruled: RuledRows) -> None:
        """See ``RuleOut``; the logits are contiguous."""
        places = torch.tensor(ruled.rows)
        rows, row_bytes = ruled.allowed.shape
        assert row_bytes * 8 >= logits.shape[1], "masks of another vocabulary"
        call = RuleOutCall(
            logits=logits.data_ptr(),
            allowed=ruled.allowed.ctypes.data,
            places=places.data_ptr(),
            rows=rows,
            row_bytes=row_bytes,
            vocabulary=logits.shape[1],
            threads=self.threads,
        )
        self.library.rule_out(byref(call))


class _Packed:
    """A weight in panels, and what a call on it needs. ``bytes`` are those of weight and bias as given."""

    def __init__(self, owner: NativeOperators, parts: Parts, bias: torch.Tensor | None, *, gated: bool):
        self.bytes = sum(part.nbytes for part in parts) + (0 if bias is None else bias.nbytes)
        rows, self._k = sum(len(part) for part in parts), parts[0].shape[1]
        self._columns = rows // 2 if gated else rows
        panels = -(-self._columns // (LANES if gated else PANEL))
        self._weight = huge_tensor(panels * PANEL * self._k, parts[0].dtype)
        first, room = 0, self._weight.data_ptr()
        for index, part in enumerate(parts):
            source, count = part.contiguous(), len(part)
            if not owner.library.pack(source.data_ptr(), room, first, count, rows, self._k, gated):
                raise NotFinite(index)
            first += count
        self._bias = None if bias is None else bias.contiguous()
        self._owner = owner

    def run(
        self, x: torch.Tensor, out: torch.Tensor | None, epilogue: int, *, packed: int = 0
    ) -> torch.Tensor:
        """Return ``out`` [rows, columns], added to, or a new tensor. ``packed``: instead so many columns as
        they lie in the panels, without the bias."""
        x = x.contiguous()
        rows, columns = len(x), packed or self._columns
        if out is None:
            out = x.new_empty((rows, columns))
        call = LinearCall(
            x=x.data_ptr(),
            x_stride=self._k,
            weight=self._weight.data_ptr(),
            bias=None if self._bias is None or packed else self._bias.data_ptr(),
            out=out.data_ptr(),
            out_stride=columns,
            scratch=self._owner.scratch.pointer(rows * self._k),
            rows=rows,
            columns=columns,
            k=self._k,
            epilogue=epilogue,
            threads=self._owner.threads,
        )
        self._owner.library.linear(byref(call))
        return out


class _Linear(_Packed):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x, None, STORE)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.run(x, residual, ADD)


class _Gated(_Packed):
    """A panel of the packed weight has LANES columns of the gate beside LANES of the other."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x, None, GATE)

    def both(self, x: torch.Tensor) -> torch.Tensor:
        rows, inner = len(x), self._columns
        panels = -(-inner // LANES)
        sums = self.run(x, None, STORE, packed=panels * PANEL)
        sides = sums.view(rows, panels, 2, LANES).transpose(1, 2).reshape(rows, 2, panels * LANES)
        both = sides[:, :, :inner].reshape(rows, 2 * inner)
        return both if self._bias is None else both + self._bias

    def combine(self, both: torch.Tensor) -> torch.Tensor:
        rows, inner = len(both), self._columns
        panels = -(-inner // LANES)
        sides = F.pad(both.view(rows, 2, inner), (0, panels * LANES - inner)).view(rows, 2, panels, LANES)
        rows_of_panels = sides.transpose(1, 2).reshape(rows * panels, PANEL)
        # The gate of an identity is that of the panels, by the same instructions as any other.
        identity = _Gated(self._owner, [torch.eye(PANEL, dtype=both.dtype)], None, gated=True)
        return identity(rows_of_panels).view(rows, panels * LANES)[:, :inner].contiguous()


HUGE_PAGE: Final = 2 * 1024 * 1024  # bytes, on x86-64, and on ARM with pages of 4 KiB


def huge_tensor(elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor [elements] of zeros, in huge pages where the system has them.

    Each step reads all weights once: in small pages these are more addresses than a processor caches, and it
    looks up every one again. What does not fill a huge page has small ones: none is wasted.
    """
    size = elements * dtype.itemsize
    whole = size // HUGE_PAGE * HUGE_PAGE
    if not whole:
        return torch.zeros(elements, dtype=dtype)
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = torch.frombuffer(memory, dtype=dtype)
    begin = -everything.data_ptr() % HUGE_PAGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            memory.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    return everything[begin // dtype.itemsize :][:elements]
