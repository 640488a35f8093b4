"""Tokens of an OpenID provider: what is verified, how its keys rotate, and what a provider's absence does."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from joserfc.jwk import RSAKey

from services.adapters.oidc import (
    MAX_VERIFIED,
    REFETCH_S,
    ProviderTokens,
    read_provider,
)
from services.core.errors import FairwayError, PermissionDenied, Unauthenticated, Unavailable
from services.core.generation import Principal
from services.core.records import KeyRole
from services.runtime.config import ConfigError
from tests.support.clocks import QuickClock
from tests.support.credentials import settings_of, spoiled_tokens
from tests.support.oidc_provider import OidcProvider, oidc_provider
from tests.support.waiting import until


@pytest.fixture
def provider() -> Iterator[OidcProvider]:
    with oidc_provider() as found:
        yield found


@asynccontextmanager
async def reading(provider: OidcProvider, **changes: Any) -> AsyncIterator[tuple[ProviderTokens, QuickClock]]:
    """Yield tokens whose keys are read, and their clock, which a test moves."""
    clock = QuickClock(time.time())
    tokens = ProviderTokens(settings_of(provider, **changes), clock)
    task = asyncio.create_task(tokens.run())
    try:
        if not provider.down:
            await until(lambda: not tokens.problem())
        yield tokens, clock
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_token_names_its_owner(provider: OidcProvider) -> None:
    async with reading(provider) as (tokens, clock):
        clock.now_s = time.time()
        text = provider.token(groups=["x", "tenant-admins"], tenant="acme", sub="auth0|ann")
        found = tokens.verify(text)
        assert found == Principal(
            "token:auth0|ann",
            KeyRole.TENANT_ADMIN,
            "acme",
            subject="auth0|ann",
            issuer=provider.issuer,
            expire_unix_s=found.expire_unix_s,
        )
        assert found.of_token
        assert abs(found.expire_unix_s - clock.unix_s() - 630) < 2  # with the clock's permitted difference
        assert tokens.verify(text) is found  # verified once


async def test_what_is_wrong_with_a_token_is_refused_and_not_kept(provider: OidcProvider) -> None:
    async with reading(provider) as (tokens, _):
        for name, text in spoiled_tokens(provider).items():
            with pytest.raises(Unauthenticated) as caught:
                tokens.verify(text)
            assert text[:40] not in caught.value.message, name
        assert len(tokens) == 0
        assert provider.requests == ["/jwks"]  # no address of a token is fetched
        tokens.verify(provider.token())


@pytest.mark.parametrize(
    ("claims", "changes", "role", "tenant"),
    [
        ({"groups": "admins", "tenant": "acme"}, {}, KeyRole.ADMIN, ""),
        ({"groups": ["tenants", "admins"], "tenant": "acme"}, {}, KeyRole.TENANT, "acme"),
        ({"realm": {"roles": ["viewers"]}}, {"role_claim": "realm.roles"}, KeyRole.VIEWER, ""),
        ({"https://x.org/r": ["viewers"]}, {"role_claim": "https://x.org/r"}, KeyRole.VIEWER, ""),
        ({"groups": ["tenants"], "org": {"id": "b"}}, {"tenant_claim": "org.id"}, KeyRole.TENANT, "b"),
    ],
)
async def test_claims_give_role_and_tenant(
    provider: OidcProvider, claims: dict[str, Any], changes: dict[str, Any], role: KeyRole, tenant: str
) -> None:
    async with reading(provider, **changes) as (tokens, _):
        found = tokens.verify(provider.token(**claims))
        assert (found.role, found.tenant_id) == (role, tenant)


@pytest.mark.parametrize(
    "claims",
    [
        {"groups": ["strangers"]},
        {"groups": None},
        {"groups": {"admins": 1}},
        {"groups": [["admins"]]},
        {"groups": ["tenants"]},
        {"groups": ["tenants"], "tenant": ["acme"]},
        {"groups": ["tenants"], "tenant": ""},
    ],
)
async def test_a_token_without_role_or_tenant_may_do_nothing(
    provider: OidcProvider, claims: dict[str, Any]
) -> None:
    async with reading(provider) as (tokens, _):
        with pytest.raises(PermissionDenied):
            tokens.verify(provider.token(**claims))


async def test_a_kept_token_ends_at_its_time(provider: OidcProvider) -> None:
    async with reading(provider) as (tokens, clock):
        clock.now_s = time.time()
        text = provider.token()
        tokens.verify(text)
        clock.now_s += 629
        tokens.verify(text)
        clock.now_s += 2
        with pytest.raises(Unauthenticated, match="expired"):
            tokens.verify(text)
        assert len(tokens) == 0


async def test_verified_tokens_are_bounded(provider: OidcProvider) -> None:
    provider.rotate(kind="EC")
    async with reading(provider) as (tokens, _):
        texts = [provider.token(sub=str(number)) for number in range(3)]
        for text in texts[:2]:
            tokens.verify(text)
        first = tokens.verify(texts[0])  # used last
        for _ in range(MAX_VERIFIED - 2):
            tokens._verified[len(tokens).to_bytes(8, "big")] = first
        tokens.verify(texts[2])
        assert len(tokens) == MAX_VERIFIED
        assert tokens.verify(texts[0]) is first


async def test_a_new_key_is_read_and_a_withdrawn_one_opens_nothing(provider: OidcProvider) -> None:
    async with reading(provider) as (tokens, clock):
        old = provider.token()
        tokens.verify(old)
        provider.rotate(kind="EC")
        new = provider.token()
        with pytest.raises(Unavailable) as caught:
            tokens.verify(new)
        assert 0 < (caught.value.retry_after_s or 0) <= REFETCH_S + 1
        clock.now_s += REFETCH_S + 30  # a token issued since 30 s before the reading may be of a newer key
        await until(lambda: provider.requests.count("/jwks") == 2 and verified(tokens, new))
        with pytest.raises(Unauthenticated, match="does not publish"):
            tokens.verify(old)  # though it was verified before


def verified(tokens: ProviderTokens, text: str) -> bool:
    try:
        return bool(tokens.verify(text))
    except FairwayError:
        return False


async def test_keys_that_are_published_before_their_use_are_read_in_time(provider: OidcProvider) -> None:
    async with reading(provider) as (tokens, clock):
        before = provider.keys[0]
        provider.rotate(keep=1)
        clock.now_s += 300
        await until(lambda: provider.requests.count("/jwks") == 2 and not tokens.problem())
        await until(lambda: verified(tokens, provider.token()))
        assert verified(tokens, provider.token(key=before))


async def test_tokens_of_unknown_keys_cause_one_reading_per_interval(provider: OidcProvider) -> None:
    async with reading(provider) as (tokens, clock):
        stranger = provider.token(key=RSAKey.generate_key(2048, {"kid": "k"}))
        # Tokens of other keys differ by their header alone.
        heads = [
            base64.urlsafe_b64encode(json.dumps({"alg": "RS256", "kid": f"u{number}"}).encode())
            .decode()
            .rstrip("=")
            for number in range(1000)
        ]
        body = ".".join(stranger.split(".")[1:])
        began_s = time.perf_counter()
        for head in heads:
            with pytest.raises(Unavailable):
                tokens.verify(f"{head}.{body}")
        print(f"{(time.perf_counter() - began_s) * 1e3:.0f} us per refusal of an unknown key")
        await asyncio.sleep(0.05)
        assert provider.requests.count("/jwks") == 1
        clock.now_s += REFETCH_S
        await until(lambda: provider.requests.count("/jwks") == 2)
        for head in heads:
            with pytest.raises((Unavailable, Unauthenticated)):
                tokens.verify(f"{head}.{body}")
        await asyncio.sleep(0.05)
        assert provider.requests.count("/jwks") == 2
        assert len(tokens) == 0


async def test_an_unreachable_provider_is_tolerated_for_the_stated_time(provider: OidcProvider) -> None:
    async with reading(provider, keys_max_age_s=3600) as (tokens, clock):
        provider.lifetime_s = 100_000
        known, fresh = provider.token(), provider.token(sub="bob")
        tokens.verify(known)
        provider.down = True
        clock.now_s += 3500
        await until(tokens.problem)
        assert "3500 s ago" in tokens.problem()
        tokens.verify(known)
        tokens.verify(fresh)
        clock.now_s += 200
        for text in (known, fresh, provider.token()):
            with pytest.raises(Unavailable, match="API keys work"):
                tokens.verify(text)
        assert tokens.problem().startswith("tokens are refused")
        provider.down = False
        clock.now_s += REFETCH_S
        await until(lambda: not tokens.problem())
        tokens.verify(known)


async def test_without_keys_tokens_are_refused_for_now(provider: OidcProvider) -> None:
    provider.down = True
    async with reading(provider) as (tokens, _):
        with pytest.raises(Unavailable) as caught:
            tokens.verify(provider.token())
        assert caught.value.retry_after_s
        await until(lambda: "503" in tokens.problem())


@cache
def silent() -> OidcProvider:
    return OidcProvider("http://127.0.0.1:1")


@settings(max_examples=200, deadline=None)
@given(
    header=st.dictionaries(
        st.sampled_from(["alg", "kid", "typ", "crit", "b64", "jku", "jwk", "x5c"]),
        st.sampled_from(["RS256", "none", "", 0, None, True, [], ["exp"], {}, {"kty": "oct", "k": "AA"}]),
    ),
    payload=st.binary(max_size=40),
    tail=st.text(max_size=20),
)
def test_no_token_raises_anything_but_a_refusal(header: Any, payload: bytes, tail: str) -> None:
    tokens = ProviderTokens(settings_of(silent()), QuickClock(time.time()))
    tokens._keys = {"k": silent().keys[0]}
    parts = [base64.urlsafe_b64encode(each).decode() for each in (json.dumps(header).encode(), payload)]
    tokens._read_s = tokens._clock.monotonic_s()
    with pytest.raises((Unauthenticated, Unavailable)):
        tokens.verify(".".join((*parts, tail)))
    with pytest.raises((Unauthenticated, Unavailable)):
        tokens.verify(tail)


def described(folder: Path, **changes: Any) -> Path:
    values = {
        "issuer": "https://id.example.com",
        "audience": "fairway",
        "jwks": "https://id.example.com/keys",
        "roles": {"admins": "admin"},
        **changes,
    }
    path = folder / "oidc.yaml"
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return path


def test_a_provider_is_described_in_a_file(tmp_path: Path) -> None:
    found = read_provider(described(tmp_path, algorithms=["ES256"]))
    assert (found.audience, found.algorithms) == (("fairway",), ("ES256",))
    assert found.roles == {"admins": KeyRole.ADMIN}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"algorithms": ["RS256", "none"]}, "algorithms"),
        ({"algorithms": "HS256"}, "algorithms"),
        ({"algorithms": []}, "algorithms"),
        ({"issuer": "http://id.example.com"}, "https"),
        ({"issuer": "https://user:word@id.example.com"}, "credentials"),
        ({"jwks": "http://id.example.com/keys"}, "https"),
        ({"jwks": "file:///etc/keys"}, "https"),
        ({"jwks": "missing.json"}, "missing.json"),
        ({"roles": {}}, "roles"),
        ({"roles": {"admins": "root"}}, "roles.admins"),
        ({"audience": []}, "audience"),
        ({"audience": None}, "audience"),
        ({"clock_skew_s": 3600}, "clock_skew_s"),
        ({"jwks_uri": "x"}, "jwks_uri"),
    ],
)
def test_a_wrong_description_stops_the_start(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match="FAIRWAY_OIDC_FILE") as caught:
        read_provider(described(tmp_path, **changes))
    assert named in str(caught.value)


async def test_keys_in_a_file_rotate_with_it(tmp_path: Path, provider: OidcProvider) -> None:
    file = tmp_path / "keys.json"

    def publish() -> None:
        status, found = provider.answer("/jwks", {})
        assert status == 200
        found["keys"] += [{"kty": "oct", "k": "AAAA"}, {"kty": "new"}, {"kty": "EC"}, "x"]
        file.write_text(json.dumps(found))

    publish()
    path = described(tmp_path, issuer=provider.issuer, jwks="keys.json")
    clock = QuickClock(time.time())
    tokens = ProviderTokens(read_provider(path), clock)
    task = asyncio.create_task(tokens.run())
    await until(lambda: verified(tokens, provider.token()))
    provider.rotate()
    publish()
    clock.now_s += 300
    await until(lambda: verified(tokens, provider.token()))
    task.cancel()
    await asyncio.wait({task})
