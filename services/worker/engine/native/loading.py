"""From a cache folder to operators that have computed something right, or a reason why there are none."""

from __future__ import annotations

from pathlib import Path

import torch

from services.worker.engine.native.build import BuildFailed, Toolchain, build
from services.worker.engine.native.library import SUFFIX, Library, loaded_openmp
from services.worker.engine.native.operators import NativeOperators


def load_library(cache: Path, dtype: torch.dtype) -> Library:
    """Return the operators for the data type, compiled if need be. Raises BuildFailed."""
    if dtype not in SUFFIX:
        raise BuildFailed(f"there are no operators for {dtype}")
    path = build(cache, Toolchain(openmp=loaded_openmp()))
    try:
        library = Library(path, dtype)
    except (OSError, AttributeError) as error:
        raise BuildFailed(f"{path.name} cannot be loaded: {error}") from error
    if not _computes(NativeOperators(library, kv_heads=1, eps=1e-5, threads=1), dtype):
        raise BuildFailed(f"{path.name} computes wrongly")
    return library


def _computes(operators: NativeOperators, dtype: torch.dtype) -> bool:
    """Whether a product of small integers, which no rounding touches, is right."""
    weight = (torch.arange(40 * 24) % 7 - 3).view(40, 24).to(dtype)
    x = (torch.arange(5 * 24) % 5 - 2).view(5, 24).to(dtype)
    expected = (x.double() @ weight.double().T).to(dtype)
    return torch.equal(operators.projection(weight, None)(x), expected)
