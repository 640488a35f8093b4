"""From a cache folder to operators that have passed ``check``, or a reason why there are none."""

from __future__ import annotations

from pathlib import Path

import torch

from services.worker.engine.native.build import BuildFailed, Toolchain, build
from services.worker.engine.native.check import wrong
from services.worker.engine.native.library import SUFFIX, Library, loaded_openmp


def load_library(cache: Path, dtype: torch.dtype) -> Library:
    """Return the operators for the data type, compiled if need be. Raises BuildFailed."""
    if dtype not in SUFFIX:
        raise BuildFailed(f"there are no operators for {dtype}")
    path = build(cache, Toolchain(openmp=loaded_openmp()))
    try:
        library = Library(path, dtype)
    except (OSError, AttributeError) as error:
        raise BuildFailed(f"{path.name} cannot be loaded: {error}") from error
    if names := wrong(library, dtype):
        raise BuildFailed(f"{path.name} computes wrongly: {', '.join(names)}")
    return library
