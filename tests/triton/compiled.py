"""Compiles the kernels for a Hopper, which needs no GPU, and prints what they take: a line of JSON each.

A process of its own: under the interpreter there is nothing to compile.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.worker.engine.cuda import elementwise as elementwise
from services.worker.engine.cuda import exact_kernels as exact_kernels
from services.worker.engine.cuda import kernels as kernels
from services.worker.engine.cuda.attention import WARPS_OF_WIDE_TILES
from services.worker.engine.cuda.exact import ROW_COLUMNS, TILES
from services.worker.engine.cuda.plan import cutting_for

HOPPER: Final = GPUTarget("cuda", 90, 32)
NUMBERS: Final = {"bfloat16": "*bf16", "float32": "*fp32"}
HEADS, KV_HEADS, DIM = 32, 8, 128
WIDTH, INNER, VOCABULARY = 4096, 14336, 128256
OF_NUMBERS: Final = (
    *("q", "k", "v", "keys", "values", "out", "both"),
    *("qkv", "query_norm", "key_norm", "cos", "sin"),
    *("x", "weight", "bias"),
)


def main() -> None:
    for dtype in NUMBERS:
        cutting = cutting_for(
            getattr(torch, dtype).itemsize, DIM, kv_heads=KV_HEADS, processors=132, exact=False
        )
        head = {"DIM": DIM, "DIM_PAD": DIM}
        paged = {"BLOCK_SIZE": 16, "WIDEN": False, "TILE": cutting.tile}
        wide = KV_HEADS * DIM
        report(elementwise.store_kv, dtype, {"WIDTH": wide, "WIDTH_PAD": wide}, warps=4)
        report(kernels.join_pieces, dtype, {"HEADS": HEADS, "PIECES": 16} | head, warps=4)
        turned = {"HEADS": HEADS, "TURNED": HEADS + KV_HEADS, "ALL": HEADS + 2 * KV_HEADS, "NORM": True}
        report(elementwise.turn_heads, dtype, turned | {"HALF": DIM // 2, "HALF_PAD": DIM // 2}, warps=1)
        report(elementwise.gate, dtype, {"WIDTH": 14336, "COLUMNS": 1024, "PROGRAMS": 14}, warps=4)
        for window in (0, 4096):
            group = {"KV_HEADS": KV_HEADS, "GROUP": 4, "GROUP_PAD": 16, "WINDOW": window}
            report(kernels.decode_pieces, dtype, group | head | paged, warps=4)
            rows = {"HEADS": HEADS, "GROUP": 4, "ROWS": cutting.rows, "WINDOW": window}
            warps = WARPS_OF_WIDE_TILES if cutting.rows >= 128 else 4
            report(kernels.prefill, dtype, rows | head | paged, warps=warps)
        of_products(dtype)
    row = {"WIDTH": VOCABULARY, "COLUMNS": ROW_COLUMNS}
    report(exact_kernels.log_softmax_rows, "float32", row, warps=4)
    report(exact_kernels.sum_rows, "float32", row, warps=4, types={"out": "*fp64"})
    report(exact_kernels.running_sum_rows, "float32", row, warps=4, types={"x": "*fp64", "out": "*fp64"})


def of_products(dtype: str) -> None:
    """Report what mode "exact" multiplies and normalises with: sides that tiles divide, and others.

    Rows of a weight begin at multiples of 16 bytes, as they do in models.
    """
    tile = TILES[getattr(torch, dtype)]
    sides = {
        "ROW_TILE": tile.rows,
        "COLUMN_TILE": tile.columns,
        "DEPTH_TILE": tile.depth,
        "GROUP": tile.group,
    }
    for columns, depth, bias in ((WIDTH, INNER, False), (WIDTH, WIDTH, True), (INNER + 9, WIDTH + 8, True)):
        for gated in (False, True):
            constants = sides | {"COLUMNS": columns, "DEPTH": depth, "WIDEN": False}
            constants |= {"BIAS": bias, "ADD": not gated, "GATED": gated}
            report(exact_kernels.product, dtype, constants, warps=tile.warps, stages=tile.stages)
    report(exact_kernels.norm_rows, dtype, {"WIDTH": WIDTH, "COLUMNS": ROW_COLUMNS}, warps=4)


def report(
    kernel: Any,
    dtype: str,
    constants: dict[str, int],
    *,
    warps: int,
    stages: int = 2,
    types: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Compile to machine code, and print its registers, spilled bytes and shared memory.

    ``types`` are those of arguments that are not of the usual type.
    """
    names = kernel.arg_names
    signature = {name: _type_of(name, dtype) if name not in constants else "constexpr" for name in names}
    signature |= types
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*") or name.endswith("stride")
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    made = triton.compile(
        ASTSource(kernel, signature, places, aligned),
        target=HOPPER,
        options={"num_warps": warps, "num_stages": stages},
    )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(made.asm["ptx"])
        done = subprocess.run(
            [knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(source) + ".out"],
            capture_output=True,
            text=True,
            check=True,
        )
    print(
        json.dumps(
            {
                "kernel": kernel.__name__,
                "dtype": dtype,
                "window": constants.get("WINDOW", 0),
                "registers": _number(r"Used (\d+) registers", done.stderr),
                "spilled": _number(r"(\d+) bytes spill stores", done.stderr),
                "shared": made.metadata.shared,
                "tensor_cores": "wgmma" in made.asm["ptx"] or "mma.sync" in made.asm["ptx"],
            }
        )
    )


def _type_of(name: str, dtype: str) -> str:
    if name in OF_NUMBERS:
        return NUMBERS[dtype]
    if name.startswith("partial"):
        return "*fp32"
    if name in ("scale", "eps"):
        return "fp32"
    return "i32" if name.endswith("stride") or name == "rows" else "*i32"


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found[1]) if found else -1


if __name__ == "__main__":
    main()
