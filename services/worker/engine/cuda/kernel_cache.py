"""Where Triton keeps the kernels that it compiled: a folder that is private to the user, and bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from services.runtime.process.folders import keep_newest, name_folder
from services.worker.engine.native.build import BuildFailed, make_private

MOST_BYTES: Final = 512 * 1024 * 1024
UNUSED_S: Final = 24 * 3600.0  # another engine may be reading what is younger
VARIABLE: Final = "TRITON_CACHE_DIR"

log = structlog.get_logger()


def keep_kernels_in(folder: Path) -> None:
    """Triton keeps kernels below ``folder``, the newest ``MOST_BYTES``, unless the environment names a place.

    Where others can write to the folder or replace it, Triton's own choice stays. Call it before the first.
    """
    kernels = folder / "triton"
    try:
        make_private(kernels)
        keep_newest(kernels, MOST_BYTES, unused_s=UNUSED_S)
    except (BuildFailed, OSError) as error:
        log.warning("kernels.cache_not_used", reason=str(error))
    else:
        name_folder(VARIABLE, kernels)
