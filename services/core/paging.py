"""Pages of a sorted list. A page token contains the name after which the next page starts."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from services.core.errors import InvalidInput

DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1000

T = TypeVar("T")


def page_of(
    items: Sequence[T], name: Callable[[T], str], *, size: int, token: str, descending: bool = False
) -> tuple[tuple[T, ...], str]:
    """Return one page and the token of the next, empty at the end. ``items`` are sorted by ``name``.

    An item that is created or deleted between two pages moves no other item: none is skipped or repeated.
    Raises InvalidInput for a token that no page returned.
    """
    after = _decode(token)
    rest = [item for item in items if not token or (name(item) < after if descending else name(item) > after)]
    page = tuple(rest[: min(size or DEFAULT_PAGE, MAX_PAGE)])
    return page, _encode(name(page[-1])) if len(page) < len(rest) else ""


def _encode(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _decode(token: str) -> str:
    try:
        return base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as exc:
        raise InvalidInput("page_token is none that this list gave", field="page_token") from exc
