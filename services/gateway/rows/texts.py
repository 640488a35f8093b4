"""Texts and pictures as rows: read in the text processes, in portions that delay no other tenant's text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from services.core.errors import InvalidInput, PromptTooLong
from services.core.fixed_cost.rows import RawTensor
from services.core.fixed_cost.signature import Signature
from services.gateway.rows.inputs import PreparedRows, check_count, check_length, check_total, token_tensor
from services.gateway.rows.tensors import check_image
from services.gateway.text.text_model import PictureFile, RowTexts, TextModel, Texts

PORTION_BYTES: Final = 12 * 1024  # below the size of a short text
PORTION_ROWS: Final = 128
MAX_PIXEL_BYTES: Final = 16 * 1024 * 1024  # the pixels of a request, bounded as its tensors are
_ID_BYTES: Final = 8


async def text_rows(
    texts: Texts,
    model: TextModel,
    tenant_id: str,
    firsts: Sequence[str],
    seconds: Sequence[str],
    *,
    cut_to: int | None,
    field: str,
) -> PreparedRows:
    """Return a row for each text, or for each pair where there are ``seconds``.

    ``cut_to``: a longer row loses tokens at its end, a pair at the longer of its texts first. Raises
    InvalidInput, PromptTooLong, and the errors of ``Texts.read_rows``.
    """
    check_count(len(firsts), field)
    most = 0 if cut_to is None else min(cut_to or model.max_context_tokens, model.max_context_tokens)
    sizes = [
        len(first.encode()) + (len(seconds[index].encode()) if seconds else 0)
        for index, first in enumerate(firsts)
    ]
    rows: list[tuple[RawTensor, ...]] = []
    counts: list[int] = []
    for begin, end, size in _portions(sizes):
        if size > 2 * model.max_prompt_bytes:
            raise PromptTooLong(
                f"{field}[{begin}] of {size} bytes is more than a row may have",
                field=f"{field}[{begin}]",
                size_bytes=size,
                max_prompt_bytes=2 * model.max_prompt_bytes,
            )
        portion = RowTexts(firsts[begin:end], seconds[begin:end], most)
        found = await texts.read_rows(model, tenant_id, portion, size_bytes=size)
        for index, length in enumerate(found.lengths, start=begin):
            check_length(length, model.max_context_tokens, f"{field}[{index}]")
        counts += found.lengths
        check_total(sum(counts), field)
        rows += _rows(found.lengths, found.ids, found.types if _takes_types(model) else b"")
    return PreparedRows(tuple(rows), tuple(counts))


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


def _portions(sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield begin, end and bytes of runs of texts; a long text is a run of its own."""
    begin = total = 0
    for index, size in enumerate(sizes):
        if index > begin and (total + size > PORTION_BYTES or index - begin >= PORTION_ROWS):
            yield begin, index, total
            begin, total = index, 0
        total += size
    yield begin, len(sizes), total


def _rows(lengths: Sequence[int], ids: bytes, types: bytes) -> Iterator[tuple[RawTensor, ...]]:
    begin = 0
    for length in lengths:
        end = begin + length * _ID_BYTES
        row = (token_tensor("input_ids", ids[begin:end]),)
        yield (*row, token_tensor("token_type_ids", types[begin:end])) if types else row
        begin = end


def _takes_types(model: TextModel) -> bool:
    return model.signature is not None and model.signature.has_types
