"""From a cache folder to operators that have passed ``check``, or a reason why there are none."""

from __future__ import annotations

from pathlib import Path

import structlog
import torch

from services.worker.engine.native import prebuilt
from services.worker.engine.native.build import BuildFailed, Toolchain, build
from services.worker.engine.native.check import wrong
from services.worker.engine.native.library import SUFFIX, Library, loaded_openmp

log = structlog.get_logger()


def load_library(cache: Path, dtype: torch.dtype, *, beforehand: Path = prebuilt.FOLDER) -> Library:
    """Return the operators for the data type, compiled beforehand or now. Raises BuildFailed."""
    if dtype not in SUFFIX:
        raise BuildFailed(f"there are no operators for {dtype}")
    openmp = loaded_openmp()
    try:
        if (found := prebuilt.find(beforehand, openmp)) is not None:
            return _tried(found, dtype)
    except BuildFailed as error:
        log.warning("operators.prebuilt_refused", reason=str(error))
    return _tried(build(cache, Toolchain(openmp=openmp)), dtype)


def _tried(path: Path, dtype: torch.dtype) -> Library:
    try:
        library = Library(path, dtype)
    except (OSError, AttributeError) as error:
        raise BuildFailed(f"{path.name} cannot be loaded: {error}") from error
    if names := wrong(library, dtype):
        raise BuildFailed(f"{path.name} computes wrongly: {', '.join(names)}")
    return library
