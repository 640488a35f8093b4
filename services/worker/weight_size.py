"""How much memory a version's weights take, from the headers of its safetensors files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Final

from services.core.errors import FailedPrecondition

MAX_HEADER_BYTES: Final = 64 * 1024 * 1024
MAX_FILES: Final = 4096


def weight_bytes(folder: Path, bytes_per_value: int) -> int:
    """Return the bytes of all tensors at ``bytes_per_value``. Blocks for I/O. Raises FailedPrecondition."""
    files = sorted(folder.rglob("*.safetensors"))[:MAX_FILES]
    if not files:
        raise FailedPrecondition("the version has no weights: no .safetensors file")
    return sum(_values(path) for path in files) * bytes_per_value


def _values(path: Path) -> int:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= min(MAX_HEADER_BYTES, path.stat().st_size):
                raise ValueError("the header's size")
            header = json.loads(file.read(size))
        return sum(
            math.prod(int(extent) for extent in entry["shape"])
            for name, entry in header.items()
            if name != "__metadata__"
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise FailedPrecondition(f"{path.name} has no readable safetensors header") from exc
