"""The memory of a version's weights, from the headers of the safetensors files that are loaded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Final

from services.core.errors import FailedPrecondition

MAX_HEADER_BYTES: Final = 64 * 1024 * 1024
MAX_INDEX_BYTES: Final = 64 * 1024 * 1024
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"


def weight_bytes(folder: Path, bytes_per_value: int) -> int:
    """Return the bytes of all tensors at ``bytes_per_value``. Blocks for I/O. Raises FailedPrecondition.

    Counts only what the engine opens: some publishers add the same weights in another layout.
    """
    return sum(_values(folder / name) for name in _files(folder)) * bytes_per_value


def _files(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise FailedPrecondition(f"the version has no weights: neither {SINGLE} nor {INDEX}")
        return [SINGLE]
    try:
        if index.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError("the index's size")
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
            raise ValueError("a file outside the folder")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise FailedPrecondition(f"{INDEX} is no readable index") from exc
    return sorted(names)


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
    except FileNotFoundError as exc:
        raise FailedPrecondition(f"the version has no {path.name}, which {INDEX} names") from exc
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise FailedPrecondition(f"{path.name} has no readable safetensors header") from exc
