"""Prefixes have one name each, and no domain names another's."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from services.core.prefix import PREFIX_BLOCK_TOKENS, extend, prefix_chain, prefix_root

ROOT = prefix_root(b"secret", "tenant-a", "sha256:1")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=4 * PREFIX_BLOCK_TOKENS)


@given(TOKENS, st.integers(0, 300))
def test_a_chain_names_prefixes(tokens: list[int], cut: int) -> None:
    chain = prefix_chain(ROOT, tokens)
    shorter = prefix_chain(ROOT, tokens[:cut])
    assert len(chain) == len(tokens) // PREFIX_BLOCK_TOKENS
    assert chain[: len(shorter)] == shorter
    assert 0 not in chain


def test_a_chain_can_be_extended_from_its_last_name() -> None:
    tokens = list(range(3 * PREFIX_BLOCK_TOKENS))
    last = array("I", tokens[2 * PREFIX_BLOCK_TOKENS :]).tobytes()
    chain = prefix_chain(ROOT, tokens)
    assert extend(chain[1], last) == chain[2]


def test_one_other_token_changes_every_name_from_its_block_on() -> None:
    tokens = list(range(4 * PREFIX_BLOCK_TOKENS))
    other = [*tokens]
    other[PREFIX_BLOCK_TOKENS] += 1
    one, two = prefix_chain(ROOT, tokens), prefix_chain(ROOT, other)
    assert one[0] == two[0]
    assert all(a != b for a, b in zip(one[1:], two[1:], strict=True))


def test_secret_domain_and_version_each_make_another_root() -> None:
    roots = {
        ROOT,
        prefix_root(b"other", "tenant-a", "sha256:1"),
        prefix_root(b"secret", "tenant-b", "sha256:1"),
        prefix_root(b"secret", "tenant-a", "sha256:2"),
        prefix_root(b"secret", "tenant-asha256:1", ""),
    }
    assert len(roots) == 5


def test_a_chain_is_bounded() -> None:
    assert len(prefix_chain(ROOT, range(10 * PREFIX_BLOCK_TOKENS), limit=3)) == 3
