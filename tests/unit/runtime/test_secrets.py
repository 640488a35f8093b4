from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import PermissionDenied, TicketExpired, Unauthenticated
from services.runtime import secrets

KEY = b"k" * 32


@given(st.binary(min_size=32, max_size=32))
def test_a_new_key_parses_and_verifies(random_bytes: bytes) -> None:
    text, stored = secrets.new_key("team-a", random_bytes)
    name, secret = secrets.parse_key(text)
    assert name == "team-a"
    assert secrets.verify(secret, stored)
    assert secret not in stored
    assert not secrets.verify(secret + "a", stored)
    assert not secrets.verify(stored, stored)


def test_secrets_differ_and_have_256_bits() -> None:
    drawn = {secrets.new_secret() for _ in range(100)}
    assert len(drawn) == 100
    assert {len(one) for one in drawn} == {32}
    with pytest.raises(ValueError, match="32"):
        secrets.new_key("a", b"short")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fw_",
        "fw_a_",
        "fw_a_short",
        "sk_a_" + "x" * 40,
        "fw_A_" + "x" * 40,
        "fw_-a_" + "x" * 40,
        "fw_a_" + "x" * 200,
        "fw_a_" + "x" * 40 + "\n",
        "fw_a_" + "ü" * 40,
        "x" * 10_000,
        "fw_a/b_" + "x" * 40,
    ],
)
def test_what_is_no_key_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(Unauthenticated) as caught:
        secrets.parse_key(text)
    assert "xxx" not in str(caught.value)


def test_an_empty_hash_matches_nothing() -> None:
    assert not secrets.verify("", "")
    assert not secrets.verify("x" * 32, "")


def test_a_ticket_is_good_until_it_expires() -> None:
    ticket = secrets.Ticket("tenant-a", "req_1", 100, 140, 1)
    signed = secrets.issue_ticket(KEY, ticket)
    assert len(signed) < 64
    assert secrets.check_ticket(KEY, signed, 99.9) == ticket
    leeway_s = secrets.TICKET_LEEWAY_S
    assert secrets.check_ticket(KEY, signed, 99.9 + leeway_s) == ticket, "clocks may differ a little"
    with pytest.raises(TicketExpired, match=r"expired 7200 s ago.*clocks of the gateway") as late:
        secrets.check_ticket(KEY, signed, 7300.0)
    assert late.value.retry_after_s is not None
    assert late.value.metadata == {"expired_s": "7200"}
    with pytest.raises(TicketExpired):
        secrets.check_ticket(KEY, signed, 100.0 + leeway_s)


def test_the_longest_ids_fit_a_ticket() -> None:
    signed = secrets.issue_ticket(KEY, secrets.Ticket("t" * 64, "r" * 64, 2**40, 2**22, 16))
    assert len(signed) <= secrets.MAX_TICKET_BYTES


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_any_changed_byte_is_refused(position: int, mask: int) -> None:
    signed = bytearray(secrets.issue_ticket(KEY, secrets.Ticket("tenant-a", "req_1", 100, 140, 1)))
    signed[position % len(signed)] ^= mask
    with pytest.raises(PermissionDenied):
        secrets.check_ticket(KEY, bytes(signed), 0.0)


@pytest.mark.parametrize("signed", [b"", b"\x01", b"\x01" + b"x" * 31, b"\x01" + b"x" * 1000])
def test_malformed_tickets_are_refused(signed: bytes) -> None:
    with pytest.raises(PermissionDenied):
        secrets.check_ticket(KEY, signed, 0.0)


def test_another_key_and_another_purpose_do_not_verify() -> None:
    import hmac

    payload = b"payload"
    with pytest.raises(PermissionDenied):
        secrets.verify_ticket(b"o" * 32, secrets.sign_ticket(KEY, payload))
    plain = b"\x01" + hmac.digest(KEY, payload, "sha256") + payload  # the raw key is for no purpose
    with pytest.raises(PermissionDenied):
        secrets.verify_ticket(KEY, plain)
    with pytest.raises(ValueError, match="16 bytes"):
        secrets.sign_ticket(b"", payload)


def test_a_signed_foreign_payload_is_no_ticket() -> None:
    for payload in (b"", b"\xc1", b"\x93\x01\x02\x03"):
        with pytest.raises(PermissionDenied):
            secrets.check_ticket(KEY, secrets.sign_ticket(KEY, payload), 0.0)
