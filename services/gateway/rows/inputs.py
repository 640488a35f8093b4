"""The rows of a request, and the tokens that it is charged for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct

from services.core.errors import InvalidInput, PromptTooLong
from services.core.fixed_cost.rows import RawTensor

MAX_ROWS: Final = 2048  # of a request, as in the proto
MAX_REQUEST_TOKENS: Final = 1_048_576  # of all its rows


class PreparedRows(Struct, frozen=True):
    """Rows that the model accepts. ``tokens``: of each row; 1 for a row without tokens.

    ``tiles``: of each image whose size is free; empty: of other rows.
    """

    rows: tuple[tuple[RawTensor, ...], ...]
    tokens: tuple[int, ...]
    tiles: tuple[int, ...] = ()

    @property
    def total_tokens(self) -> int:
        return sum(self.tokens)


def check_count(count: int, field: str) -> None:
    """Return if a request may have so many rows. Raises InvalidInput."""
    if not 1 <= count <= MAX_ROWS:
        raise InvalidInput(
            f"{field} is empty" if not count else f"{field} has {count} rows; at most {MAX_ROWS} are taken",
            field=field,
        )


def check_total(tokens: int, field: str) -> None:
    """Return if a request may have so many tokens. Raises InvalidInput."""
    if tokens > MAX_REQUEST_TOKENS:
        raise InvalidInput(
            f"{field} has {tokens} tokens; a request has at most {MAX_REQUEST_TOKENS}",
            field=field,
            tokens=tokens,
            max_tokens=MAX_REQUEST_TOKENS,
        )


def check_length(tokens: int, max_tokens: int, field: str) -> None:
    """Return if a row has 1 to ``max_tokens`` tokens. Raises InvalidInput, PromptTooLong."""
    if not tokens:
        raise InvalidInput(f"{field} has no tokens", field=field)
    if tokens > max_tokens:
        raise PromptTooLong(
            f"{field} has {tokens} tokens; the model takes at most {max_tokens}",
            field=field,
            prompt_tokens=tokens,
            max_context_tokens=max_tokens,
        )


def token_tensor(name: str, data: bytes) -> RawTensor:
    """Return a tensor of 64-bit integers with one element per token."""
    return RawTensor(name, "INT64", (len(data) // 8,), data)


def id_rows(
    rows: Sequence[Sequence[int]], *, vocab_size: int, max_tokens: int, cut_to: int | None, field: str
) -> PreparedRows:
    """Return the rows of token ids, each cut to its first ``cut_to``. Raises InvalidInput, PromptTooLong."""
    check_count(len(rows), field)
    check_total(sum(map(len, rows)), field)
    found, counts = [], []
    for index, row in enumerate(rows):
        where = f"{field}[{index}]"
        kept = row if cut_to is None else row[:cut_to]
        check_length(len(kept), max_tokens, where)
        ids = np.fromiter(kept, np.int64, len(kept))
        check_ids(ids, vocab_size, where)
        found.append((token_tensor("input_ids", ids.tobytes()),))
        counts.append(len(ids))
    return PreparedRows(tuple(found), tuple(counts))


def check_ids(ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]], vocab_size: int, field: str) -> None:
    """Return if every id is within the vocabulary that it will index. Raises InvalidInput."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        outside = int(ids.max() if ids.max() >= vocab_size else ids.min())
        raise InvalidInput(
            f"{field} holds token {outside}; the model's vocabulary has {vocab_size}",
            field=field,
            token=outside,
            vocab_size=vocab_size,
        )
