"""Which stored responses a key may read, and how far a conversation goes back."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec
import pytest
from msgspec import structs

from services.core.errors import InvalidInput, NotFound
from services.core.generation import Principal
from services.core.records import KeyRole
from services.gateway.faces.responses.background import answer_of
from services.gateway.faces.responses.conversations import MAX_CHAIN, Conversations
from services.gateway.faces.responses.requests import responses_body, responses_request
from services.gateway.faces.responses.types import Status
from services.gateway.responses.store import BegunResponse, ResponseStore
from services.gateway.service import ServedModel
from simulator.stores.idempotency import MemoryIdempotency
from simulator.stores.limiter import MemoryLimiter
from tests.support.clocks import HandClock

HEAD = responses_request(responses_body(b'{"model":"m","input":"hi"}'), b"[]").head
CALLER = Principal("k", KeyRole.TENANT, "acme")


class Models:
    """ "alias" is another name of "m"."""

    async def list_models(self, principal: Principal) -> Sequence[ServedModel]:
        names = ("m", "alias") if "m" in principal.models else principal.models
        return [ServedModel(name, "sha256:1", 1, 1, 1) for name in names]


class Shelf:
    def __init__(self) -> None:
        clock = HandClock()
        self.store = ResponseStore(MemoryIdempotency(clock, MemoryLimiter(clock)), b"n" * 32, "g", clock)
        self.conversations = Conversations(Models(), self.store, 10_000)

    async def keep(
        self, name: str, previous: str = "", *, status: Status = "completed", model: str = "m"
    ) -> None:
        begun = BegunResponse("r", model, previous, False, b"{}", b'["%b"]' % name.encode())
        await self.store.keep("acme", name, begun, answer_of(structs.replace(HEAD, id=name, status=status)))


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


async def test_a_chain_is_read_oldest_first_and_no_further_than_its_bound(shelf: Shelf) -> None:
    for number in range(MAX_CHAIN + 1):
        await shelf.keep(str(number), str(number - 1) if number else "")
    items = msgspec.json.decode(await shelf.conversations.earlier(CALLER, str(MAX_CHAIN - 1)))
    assert [found[0] for found in items[::2]] == [str(number) for number in range(MAX_CHAIN)]
    with pytest.raises(InvalidInput, match=f"more than {MAX_CHAIN} responses"):
        await shelf.conversations.earlier(CALLER, str(MAX_CHAIN))


async def test_a_chain_that_meets_itself_ends(shelf: Shelf) -> None:
    await shelf.keep("a", "b")
    await shelf.keep("b", "a")
    with pytest.raises(InvalidInput):
        await shelf.conversations.earlier(CALLER, "a")


@pytest.mark.parametrize("status", ["failed", "cancelled"])
async def test_what_has_no_complete_answer_is_not_continued(shelf: Shelf, status: Status) -> None:
    await shelf.keep("a", status=status)
    with pytest.raises(InvalidInput) as caught:
        await shelf.conversations.earlier(CALLER, "a")
    assert caught.value.metadata["field"] == "previous_response_id"


async def test_a_key_reads_responses_of_its_models_and_its_tenant(shelf: Shelf) -> None:
    await shelf.keep("a")
    await shelf.keep("b", model="alias")
    await shelf.keep("c", model="secret")
    for principal, seen in (
        (CALLER, "abc"),
        (Principal("k", KeyRole.TENANT, "acme", ("m",)), "ab"),
        (Principal("k", KeyRole.TENANT, "acme", ("other",)), ""),
        (Principal("k", KeyRole.TENANT, "evil"), ""),
    ):
        found = ""
        for name in "abc":
            with suppress(NotFound):
                await shelf.conversations.find(principal, name)
                found += name
        assert found == seen, principal
