"""The C interface of ``source/operators.cc``: the arguments of each call, and the loaded library."""

from __future__ import annotations

import ctypes
import re
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

SUFFIX: Final = {torch.float32: "f32", torch.bfloat16: "bf16"}
OPENMP: Final = re.compile(r"lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


class LinearCall(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("scratch", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("k", c_int64),
        ("epilogue", c_int32),
        ("threads", c_int32),
    ]


class RotateCall(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("x", c_void_p),
        ("row_stride", c_int64),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("rows", c_int32),
        ("q_heads", c_int32),
        ("k_heads", c_int32),
        ("dim", c_int32),
        ("threads", c_int32),
        ("eps", c_float),
    ]


class AttentionCall(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("row_stride", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("out", c_void_p),
        ("slots", c_void_p),
        ("first_rows", c_void_p),
        ("span_rows", c_void_p),
        ("lengths", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("tiles", c_void_p),
        ("rows", c_int32),
        ("tile_count", c_int32),
        ("most_pairs", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("block_size", c_int32),
        ("window", c_int32),
        ("threads", c_int32),
        ("scale", c_float),
    ]


class RuleOutCall(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("logits", c_void_p),
        ("allowed", c_void_p),
        ("places", c_void_p),
        ("rows", c_int64),
        ("row_bytes", c_int64),
        ("vocabulary", c_int64),
        ("threads", c_int32),
    ]


class Library:
    """The functions for one data type. Threads are those of the caller's OpenMP pool."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        """Raises OSError where the file is no library, AttributeError where it is another one."""
        self.name = path.name
        library, suffix = ctypes.CDLL(str(path)), SUFFIX[dtype]

        def function(name: str, *arguments: Any) -> Any:
            found = getattr(library, f"fairway_{name}")
            found.argtypes, found.restype = arguments, None
            return found

        self.pack = function(f"pack_{suffix}", c_void_p, c_void_p, *[c_int64] * 4, c_int32)
        self.pack.restype = c_int32
        self.linear = function(f"linear_{suffix}", ctypes.POINTER(LinearCall))
        self.norm = function(
            f"norm_{suffix}", c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int32
        )
        self.rotate = function(f"rotate_{suffix}", ctypes.POINTER(RotateCall))
        self.attend = function(f"attend_{suffix}", ctypes.POINTER(AttentionCall))
        self.rule_out = function("rule_out", ctypes.POINTER(RuleOutCall))


def loaded_openmp() -> Path | None:
    """Return the OpenMP runtime that this process has loaded, torch's own where there are several."""
    try:
        maps = Path("/proc/self/maps").read_text("utf-8").splitlines()
    except OSError:
        return None
    paths = [line.split(maxsplit=5)[5] for line in maps if "/" in line]
    found = sorted({path for path in paths if OPENMP.search(path)}, key=lambda path: "torch" not in path)
    return Path(found[0]) if found else None
