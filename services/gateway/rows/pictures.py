"""Pictures as rows: decoded one by one in the text processes, where a hostile file ends no gateway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from services.core.errors import InvalidInput
from services.core.fixed_cost.rows import RawTensor
from services.core.fixed_cost.signature import Signature
from services.gateway.rows.inputs import PreparedRows
from services.gateway.rows.tensors import check_image
from services.gateway.text.text_model import PictureFile, TextModel, Texts

MAX_PIXEL_BYTES: Final = 16 * 1024 * 1024  # of a request, as of its tensors


async def picture_rows(
    texts: Texts, model: TextModel, tenant_id: str, signature: Signature, files: Sequence[bytes]
) -> PreparedRows:
    """Return a row for each picture. Raises InvalidInput, UnsupportedFeature, and as ``Texts.read`` does."""
    rows: list[tuple[RawTensor, ...]] = []
    tiles: list[int] = []
    total = 0
    for index, data in enumerate(files):
        field = f"images[{index}]"
        try:
            pixels = await texts.read_picture(model, tenant_id, PictureFile(data))
        except InvalidInput as error:
            raise InvalidInput(f"{field}: {error.message}", field=field) from None
        total += len(pixels.data)
        if total > MAX_PIXEL_BYTES:
            raise InvalidInput(
                f"images: the first {index + 1} have {total} bytes of pixels; a request has at most "
                f"{MAX_PIXEL_BYTES}: send fewer",
                field="images",
            )
        if signature.inputs[0].is_image:
            tiles.append(check_image((1, *pixels.shape), signature.max_tokens, field))
        rows.append((RawTensor("pixel_values", "FP32", tuple(pixels.shape), pixels.data),))
    return PreparedRows(tuple(rows), (1,) * len(rows), tuple(tiles))
