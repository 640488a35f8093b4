from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import InvalidInput
from services.core.paging import DEFAULT_PAGE, MAX_PAGE, page_of


def name(item: str) -> str:
    return item


@given(st.sets(st.text(alphabet="ab-_9.", min_size=1, max_size=6), max_size=40), st.integers(1, 7))
def test_pages_joined_are_the_list(items: set[str], size: int) -> None:
    whole, token = sorted(items), ""
    seen: list[str] = []
    for _ in range(len(items) + 1):
        page, token = page_of(whole, name, size=size, token=token)
        assert len(page) <= size
        seen += page
        if not token:
            break
    assert seen == whole


@given(st.sets(st.text(alphabet="abc", min_size=1, max_size=5), min_size=3), st.data())
def test_what_comes_and_goes_between_pages_moves_no_other(items: set[str], data: st.DataObject) -> None:
    whole = sorted(items)
    first, token = page_of(whole, name, size=2, token="")
    gone = data.draw(st.sampled_from(whole))
    changed = sorted({*whole, data.draw(st.text(alphabet="abc", min_size=1, max_size=5))} - {gone})
    rest, _ = page_of(changed, name, size=1000, token=token) if token else ((), "")
    assert not set(first) & set(rest)
    assert set(whole) - {gone} <= {*first, *rest}


def test_size_has_a_default_and_a_bound() -> None:
    whole = [f"{n:05}" for n in range(2000)]
    assert len(page_of(whole, name, size=0, token="")[0]) == DEFAULT_PAGE
    assert len(page_of(whole, name, size=10**9, token="")[0]) == MAX_PAGE


@pytest.mark.parametrize("token", ["!", "a", "YQ=x", "/w", "ü", "gICA"])
def test_a_token_that_no_page_gave_is_refused(token: str) -> None:
    with pytest.raises(InvalidInput):
        page_of(["a"], name, size=1, token=token)
