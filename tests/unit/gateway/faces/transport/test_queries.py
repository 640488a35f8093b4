"""Query strings of lists, and their pages."""

from __future__ import annotations

import pytest

from services.core.errors import InvalidInput
from services.gateway.faces.responses.routes import ItemsQuery
from services.gateway.faces.transport.queries import page_of, read_query


def asked(text: str) -> ItemsQuery:
    return read_query({"query_string": text.encode()}, ItemsQuery)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=", "limit"),
        ("limit=\u0661", "limit"),
        ("limit=" + "9" * 5000, "limit"),
        ("order=up", "order"),
        ("color=red", "color"),
        ("x" * 100 + "=", "x" * 64),
    ],
)
def test_what_is_no_query_of_a_list_is_refused_by_name(text: str, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        asked(text)
    assert caught.value.metadata["field"] == field


def test_a_query_has_a_bound_of_fields() -> None:
    with pytest.raises(InvalidInput, match="too many fields"):
        asked("&".join(["limit=1"] * 33))


def test_pages_have_every_item_once() -> None:
    assert asked("") == asked("after=") == ItemsQuery(limit=20, after="", order="desc")
    items, after = [f"i{number}" for number in range(5)], ""
    found: list[str] = []
    for pages in range(3):
        page, more = page_of(items, str, asked(f"limit=2&order=asc&after={after}"))
        assert more == (pages < 2)
        found += page
        after = page[-1]
    assert found == items
    with pytest.raises(InvalidInput) as caught:
        page_of(items, str, asked("after=other"))
    assert caught.value.metadata["field"] == "after"
