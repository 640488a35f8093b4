"""A tenant holds at most its share of the pool, its cached prefixes included; others lose nothing to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.prefix.cache import PrefixCache
from services.worker.engine_protocol import Cancel, Submit
from tests.unit.worker.engine.prefix.cache_rig import CacheRig, ask

SHARES = {"acme": 0.25, "beta": 0.5, "": 0.0}
DOMAINS = {"acme": 1, "beta": 2, "": 3}


def of(
    tenant: str, handle: int, prompt: Sequence[int], max_tokens: int = 4, *, share: float | None = None
) -> Submit:
    found = ask(handle, prompt, max_tokens, domain=DOMAINS[tenant])
    share = SHARES[tenant] if share is None else share
    return msgspec.structs.replace(found, tenant=tenant, kv_share=share)


def prompt_of(number: int, tokens: int) -> list[int]:
    return [number * 7 % 50 + place % 13 for place in range(tokens)]


def used(rig: CacheRig) -> Counter[str]:
    """The blocks of each tenant, counted from tables and cache alone."""
    planner, cached = rig.engine._planner, rig.cache._cached
    found: dict[str, set[int]] = {tenant: set() for tenant in DOMAINS}
    for sequence in planner._places.holders():
        found[sequence.tenant].update(sequence.blocks)
    for block in cached.cached():
        tenant = next(name for name, root in DOMAINS.items() if root == cached.root[block])
        found[tenant].add(block)
    return Counter({tenant: len(blocks) for tenant, blocks in found.items()})


def check(rig: CacheRig) -> None:
    counted = used(rig)
    for tenant, share in SHARES.items():
        if share:
            assert counted[tenant] <= int(share * rig.cache.blocks_total), f"{tenant} exceeds its budget"
            assert rig.engine._planner._budgets.used(tenant) == counted[tenant]


def finish(rig: CacheRig) -> None:
    for _ in range(2000):
        if not rig.engine.has_work:
            return
        rig.step()
        check(rig)
    raise AssertionError("the engine does not come to an end")


def test_one_tenant_runs_as_many_as_its_share_holds_and_others_pass() -> None:
    rig = CacheRig(40, max_sequences=8)
    for handle in range(1, 5):
        rig.engine.apply(of("acme", handle, prompt_of(handle, 60)))
    rig.engine.apply(of("", 9, prompt_of(9, 60)))
    rig.step()
    running = {one.handle for one in rig.engine._planner._places.holders()}
    assert 9 in running, "another tenant does not wait for one that has no budget left"
    assert running & {1, 2, 3, 4} == {1, 2}
    finish(rig)
    assert set(rig.finished) == {1, 2, 3, 4, 9}


def test_its_own_cached_prefixes_go_first_and_those_of_others_stay() -> None:
    rig = CacheRig(40)
    rig.run(of("", 1, prompt_of(1, 128)), of("acme", 2, prompt_of(2, 128)))
    others = used(rig)[""]
    for handle in range(3, 12):
        rig.engine.apply(of("acme", handle, prompt_of(handle, 128)))
        finish(rig)
        assert used(rig)[""] == others, "the prefix of another tenant was evicted"
    assert used(rig)["acme"] > 0


def test_a_sequence_that_outgrows_the_budget_is_handed_back() -> None:
    rig = CacheRig(16)
    rig.engine.apply(of("acme", 1, prompt_of(1, 40), 60))
    finish(rig)
    assert rig.finished == {1: "preempted"}


def test_a_smaller_share_and_a_smaller_pool_are_enforced_by_the_next_step() -> None:
    rig = CacheRig(40, max_sequences=8, max_model_len=160)
    rig.engine.apply(of("beta", 1, prompt_of(1, 100), 30))
    rig.engine.apply(of("beta", 2, prompt_of(2, 100), 30))
    rig.step()
    assert used(rig)["beta"] > 10
    rig.engine.apply(of("beta", 3, prompt_of(3, 20), share=0.25))
    rig.step()
    assert used(rig)["beta"] <= 10


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("ask"), st.sampled_from(["acme", "beta", ""]), st.integers(1, 150), st.integers(1, 30)
        ),
        st.tuples(st.just("step"), st.just(""), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("cancel"), st.just(""), st.integers(1, 12), st.just(0)),
    ),
    min_size=5,
    max_size=25,
)


def run(operations: list[tuple[str, str, int, int]], *, cache: type[PrefixCache] = PrefixCache) -> None:
    rig, handles = CacheRig(32, max_sequences=6, max_model_len=512, cache=cache), 0
    for kind, tenant, number, output in operations:
        if kind == "ask":
            handles += 1
            rig.engine.apply(of(tenant, handles, prompt_of(number % 4, number), output))
        elif kind == "cancel":
            rig.engine.apply(Cancel([number]))
        else:
            for _ in range(number):
                if rig.engine.has_work:
                    rig.step()
                    check(rig)
    finish(rig)
    assert not rig.engine._planner.waiting, "a sequence waits for ever"


@settings(max_examples=60)
@given(OPERATIONS)
def test_no_budget_is_ever_exceeded_and_everything_ends(
    operations: list[tuple[str, str, int, int]],
) -> None:
    run(operations)


class CountsNoSequences(PrefixCache):
    """A pool with a bug: to the budgets, sequences hold nothing."""

    def freed_by(self, tables: Iterable[Sequence[int]], *, kept: Collection[int] = ()) -> int:
        return 0


def test_a_planted_bug_is_found() -> None:
    with pytest.raises(AssertionError, match="exceeds its"):
        run([("ask", "acme", 100, 30), ("ask", "acme", 101, 30), ("step", "", 4, 0)], cache=CountsNoSequences)
