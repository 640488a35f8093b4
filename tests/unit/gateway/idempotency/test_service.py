"""Names of records."""

from __future__ import annotations

from services.gateway.events import Received
from services.gateway.idempotency.service import record_key
from services.ports.idempotency import RecordKey

SECRET = b"n" * 32


def key_of(text: str, *, part: int = 0, internal: bool = False) -> RecordKey:
    received = Received(0.0, 1, "req_1", part=part, internal=internal)
    return record_key(SECRET, "acme", text, received)


def test_clients_keys_keep_their_names_and_internal_ones_have_others() -> None:
    """Records outlive an upgrade: a name that changed would run its request again."""
    assert key_of("k") == RecordKey("acme", "5ec41ebab42cfa2126f66d97b74fe3cc")
    assert len({key_of("k"), key_of("k", part=1), key_of("k", internal=True)}) == 3
