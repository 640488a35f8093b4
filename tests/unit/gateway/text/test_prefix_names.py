"""Names of prompt prefixes: the same on every gateway, another's for nobody, and off the loop when long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from fairway.v1 import inference_pb2
from services.core.generation import Principal
from services.core.prefix import MAX_PREFIX_BLOCKS, PREFIX_BLOCK_TOKENS, prefix_chain, prefix_root
from services.core.records import KeyRole
from services.gateway.requests.validate import Validator
from services.gateway.text.tokenise import INLINE_TOKENS, PrefixNames
from services.runtime.secrets import prefix_secret

SECRET = prefix_secret(b"k" * 32)


class Counting(Executor):
    """Says in which thread work ran."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self.threads: list[str] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        def counted() -> Any:
            self.threads.append(threading.current_thread().name)
            return fn(*args, **kwargs)

        return self._pool.submit(counted)


@pytest.mark.parametrize("tokens", [1, 63, 64, 200, INLINE_TOKENS, INLINE_TOKENS + 1, 300_000])
def test_whole_blocks_are_named_in_order_and_long_prompts_leave_the_loop(tokens: int) -> None:
    executor = Counting()
    named = asyncio.run(PrefixNames(SECRET, executor).prompt(range(tokens), "acme", "d1"))
    assert len(named.prefix_hashes) == min(MAX_PREFIX_BLOCKS, tokens // PREFIX_BLOCK_TOKENS)
    assert named.prefix_root == prefix_root(SECRET, "acme", "d1")
    assert named.prefix_hashes == prefix_chain(named.prefix_root, range(tokens))
    assert bool(executor.threads) == (tokens > INLINE_TOKENS)


def test_gateways_agree_and_tenants_versions_and_installations_share_nothing() -> None:
    def first(secret: bytes, tenant: str, digest: str) -> int:
        names = PrefixNames(secret, Counting())
        return asyncio.run(names.prompt(range(64), tenant, digest)).prefix_hashes[0]

    known = first(SECRET, "acme", "d1")
    assert known == first(prefix_secret(b"k" * 32), "acme", "d1")
    others = {first(SECRET, "beta", "d1"), first(SECRET, "acme", "d2"), first(b"x" * 32, "acme", "d1")}
    assert len(others | {known}) == 4
    assert SECRET != b"k" * 32, "the key that signs tickets names nothing"


@pytest.mark.asyncio
async def test_what_the_validator_resolves_is_named_when_it_is_told_to(
    fleet: Any, executor: ThreadPoolExecutor
) -> None:
    who = Principal("alpha", KeyRole.TENANT, "acme")
    asked = inference_pb2.Generation(model="chat-small", token_ids=inference_pb2.TokenIds(ids=[5] * 70))
    plain = Validator(fleet.catalog, fleet.identity, Random(7))
    assert (await plain.resolve(who, asked, "req_1", plain.check(who, asked))).prompt.prefix_hashes == ()
    naming = Validator(
        fleet.catalog,
        fleet.identity,
        Random(7),
        prefixes=PrefixNames(SECRET, executor),
    )
    found = await naming.resolve(who, asked, "req_1", naming.check(who, asked))
    root = prefix_root(SECRET, "acme", found.version_digest)
    assert found.prompt.prefix_hashes == prefix_chain(root, [5] * 70)
    assert len(found.prompt.prefix_hashes) == 1
