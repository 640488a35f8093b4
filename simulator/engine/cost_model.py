"""Cost models by name or by file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from services.core.estimates.cost_model import PRESETS, CostModel, decode

MAX_MODEL_BYTES: Final = 64 * 1024


def cost_model(preset: str) -> CostModel:
    """Return a preset by name, or the model in a file that ``fairway calibrate`` wrote. Raises ValueError."""
    if (known := PRESETS.get(preset)) is not None:
        return known
    try:
        with Path(preset).open("rb") as file:
            text = file.read(MAX_MODEL_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"{preset} is neither a preset ({', '.join(PRESETS)}) nor a file: {error.strerror}"
        ) from error
    if len(text) > MAX_MODEL_BYTES:
        raise ValueError(f"{preset} is larger than {MAX_MODEL_BYTES} bytes: no cost model")
    return decode(text)
