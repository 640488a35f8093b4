"""Portions of the texts of a request, and the bounds of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from services.core.errors import InvalidInput, PromptTooLong
from services.gateway.rows import inputs
from services.gateway.rows.inputs import PORTION_BYTES, PORTION_ROWS, text_rows
from services.gateway.text.text_model import EncodedRows, RowTexts, SamplingDefaults, TextModel

MODEL = TextModel("sha256:x", 10, 600_000, 4, SamplingDefaults(), depends_on_time=False)


@dataclass
class ByteTexts:
    """Texts whose tokens are their bytes."""

    portions: list[tuple[int, int]] = field(default_factory=list)

    async def read_rows(
        self, model: TextModel, tenant_id: str, rows: RowTexts, *, size_bytes: int
    ) -> EncodedRows:
        self.portions.append((len(rows.texts), size_bytes))
        lengths = [len(text) for text in rows.texts]
        return EncodedRows(lengths, bytes(8 * sum(lengths)), b"")


async def rows(texts: ByteTexts, *firsts: str) -> inputs.PreparedRows:
    read: Any = texts  # the other calls of the port are not used
    return await text_rows(read, MODEL, "acme", firsts, (), cut_to=None, field="inputs")


@pytest.mark.parametrize(
    ("sizes", "portions"),
    [
        ([1], [(1, 1)]),
        ([1] * PORTION_ROWS, [(PORTION_ROWS, PORTION_ROWS)]),
        ([1] * (PORTION_ROWS + 1), [(PORTION_ROWS, PORTION_ROWS), (1, 1)]),
        ([PORTION_BYTES - 1, 1, 1], [(2, PORTION_BYTES), (1, 1)]),
        ([1, 3 * PORTION_BYTES, 1], [(1, 1), (1, 3 * PORTION_BYTES), (1, 1)]),
    ],
)
async def test_portions_are_short_and_a_long_text_stands_alone(
    sizes: list[int], portions: list[tuple[int, int]]
) -> None:
    texts = ByteTexts()
    found = await rows(texts, *("x" * size for size in sizes))
    assert texts.portions == portions
    assert list(found.tokens) == sizes
    assert [len(row[0].data) // 8 for row in found.rows] == sizes


async def test_the_tokens_of_a_request_are_bounded_before_the_rest_is_read() -> None:
    texts = ByteTexts()
    with pytest.raises(InvalidInput, match="at most 1048576"):
        await rows(texts, *["x" * 500_000] * 100)
    assert len(texts.portions) == 3


async def test_a_row_without_tokens_or_with_too_many_is_refused_by_its_place() -> None:
    with pytest.raises(InvalidInput, match=r"inputs\[1\] has no tokens"):
        await rows(ByteTexts(), "x", "")
    with pytest.raises(PromptTooLong, match=r"inputs\[1\] has 600001 tokens"):
        await rows(ByteTexts(), "x", "x" * 600_001)
