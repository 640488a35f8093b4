"""Sign-in by an OpenID provider: only for the browser that began it, and renewed while it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from joserfc import jwt

from console import sign_ins
from console.provider import BACK_PATH, MAX_REDEEMING, METADATA_S, RETRY_S, WebProvider
from fairway.v1 import controlplane_pb2 as cp
from services.core.errors import FairwayError, PermissionDenied, StoreUnavailable, Unauthenticated
from tests.support.clocks import HandClock
from tests.support.console import URL, Browser, FilledApi
from tests.support.oidc_provider import OidcProvider, oidc_provider


class TokenApi(FilledApi):
    """Takes tokens of a provider, as the control plane verifies them."""

    def __init__(self, provider: OidcProvider, clock: HandClock) -> None:
        super().__init__()
        self._provider, self._clock = provider, clock

    def caller(self, credential: str) -> cp.GetCallerResponse:
        if not credential.startswith("ey"):
            return super().caller(credential)
        claims: dict[str, Any] = jwt.decode(credential, self._provider.keys[0]).claims
        end_s = self._clock.now_s + claims["exp"] - claims["iat"]
        if credential in self.revoked:
            raise Unauthenticated("the token has expired")
        found = cp.GetCallerResponse(key="token:ann", subject="ann", role=cp.KEY_ROLE_ADMIN)
        found.expire_time.seconds = int(end_s)
        return found


@pytest.fixture
def provider() -> Iterator[OidcProvider]:
    with oidc_provider() as found:
        yield found


@pytest.fixture
def person(provider: OidcProvider) -> Browser:
    clock = HandClock(1_800_000_000.0)
    numbers = iter(range(1000))
    client = WebProvider(
        provider.issuer, "console", "openid", URL + BACK_PATH, lambda: f"random-{next(numbers)}", clock
    )
    return Browser(TokenApi(provider, clock), clock, client)


def begun(browser: Browser) -> str:
    """Return the address of the provider that the browser is sent to."""
    answer = browser.get("/sign-in/provider")
    assert answer.status_code == 303
    header = answer.headers["set-cookie"]
    assert "HttpOnly" in header
    assert "SameSite=lax" in header
    assert "Path=/sign-in" in header
    return str(answer.headers["location"])


def test_a_person_signs_in_by_the_provider(person: Browser, provider: OidcProvider) -> None:
    assert provider.issuer in person.get("/sign-in").text
    url = begun(person)
    assert url.startswith(f"{provider.issuer}/authorize?response_type=code&client_id=console&")
    answer = person.get(provider.consent(url).removeprefix(URL))
    assert answer.status_code == 200
    assert 'content="0; url=/"' in answer.text
    assert "SameSite=strict" in answer.headers["set-cookie"]
    page = person.get("/")
    assert page.status_code == 200
    assert "<b>ann</b>" in page.text


def test_an_answer_for_another_browser_signs_nobody_in(person: Browser, provider: OidcProvider) -> None:
    back = provider.consent(begun(person)).removeprefix(URL)
    other = person.other()
    assert other.get(back).status_code == 401
    assert other.get("/").status_code == 303
    begun(other)
    assert other.get(back).status_code == 401
    assert "/token" not in provider.requests, "the code is not even redeemed"
    assert len(person.parts.sign_ins) == 0


def test_a_code_is_good_for_one_sign_in(person: Browser, provider: OidcProvider) -> None:
    url = begun(person)
    back = provider.consent(url).removeprefix(URL)
    cookie = person.http.cookies["fairway-provider"]
    assert person.get(back).status_code == 200
    person.http.cookies.set("fairway-provider", cookie, path="/sign-in")
    answer = person.get(back)
    assert answer.status_code == 401
    assert "invalid_grant" in answer.text


def test_a_refusal_at_the_provider_is_shown_as_text(person: Browser) -> None:
    url = begun(person)
    state = url.partition("state=")[2].partition("&")[0]
    answer = person.get(f"{BACK_PATH}?state={state}&error=%3Cevil-tag%3E")
    assert answer.status_code == 401
    assert "&lt;evil-tag&gt;" in answer.text


def test_a_provider_that_is_away_is_said(person: Browser, provider: OidcProvider) -> None:
    provider.down = True
    answer = person.get("/sign-in/provider")
    assert answer.status_code == 503
    assert "provider" in answer.text


def test_a_sign_in_by_the_provider_costs_no_attempt(person: Browser, provider: OidcProvider) -> None:
    for _ in range(sign_ins.ATTEMPTS + 1):
        assert person.get(provider.consent(begun(person)).removeprefix(URL)).status_code == 200


def test_strangers_flood_no_provider(person: Browser, provider: OidcProvider) -> None:
    for _ in range(30):
        begun(person)
    assert len(provider.requests) == 1, "its metadata is kept"
    stranger = person.other()
    stranger.http.cookies.set("fairway-provider", "made.up", path="/sign-in")
    answers = [stranger.get(f"{BACK_PATH}?state=made&code=x") for _ in range(30)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 30 - sign_ins.ATTEMPTS
    assert int(refused[0].headers["retry-after"]) > 0
    assert provider.requests.count("/token") == sign_ins.ATTEMPTS
    person.clock.now_s += METADATA_S
    provider.down = True
    assert [person.get("/sign-in/provider").status_code for _ in range(5)] == [503] * 5
    assert len(provider.requests) == 1 + sign_ins.ATTEMPTS + 1, "nor is one that is away tried for each"
    provider.down = False
    person.clock.now_s += RETRY_S
    begun(person)


async def test_calls_of_the_provider_at_once_are_bounded(
    person: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = dict.fromkeys(("discovered", "request_json"), 0), dict[str, int]()

    async def fetched(fetch: Any, *arguments: Any) -> Any:
        name = fetch.__name__
        running[name] += 1
        most[name] = max(most.get(name, 0), running[name])
        await asyncio.sleep(0.001)
        running[name] -= 1
        answer = {"authorization_endpoint": "a", "token_endpoint": "t", "access_token": "token"}
        return answer if name == "discovered" else (200, answer)

    monkeypatch.setattr("console.provider._fetched", fetched)
    client = person.parts.provider
    assert client is not None
    await asyncio.gather(*(client.begin() for _ in range(9)))
    await asyncio.gather(*(client.finish({"state": "made", "code": "x"}, "made.up") for _ in range(9)))
    assert most == {"discovered": 1, "request_json": MAX_REDEEMING}


def test_without_a_provider_there_is_no_such_sign_in(browser: Browser) -> None:
    assert "/sign-in/provider" not in browser.get("/sign-in").text
    assert browser.get("/sign-in/provider").status_code == 303


def test_a_token_is_renewed_before_it_ends_and_ends_with_its_login(
    person: Browser, provider: OidcProvider
) -> None:
    person.get(provider.consent(begun(person)).removeprefix(URL))
    for _ in range(5):
        person.clock.now_s += provider.lifetime_s - 30
        assert person.get("/").status_code == 200
    assert provider.requests.count("/token") == 6
    provider.refreshes.clear()
    person.clock.now_s += provider.lifetime_s - 30
    assert person.get("/").status_code == 200, "the token itself is still valid"
    person.clock.now_s += 31
    assert person.get("/").status_code == 303


def test_a_renewed_token_is_kept_while_the_api_is_away(person: Browser, provider: OidcProvider) -> None:
    """The provider accepts a refresh token once: one that is lost with the API's answer ends the login."""
    person.get(provider.consent(begun(person)).removeprefix(URL))
    person.api.down = StoreUnavailable("etcd does not answer")
    for passed_s in (provider.lifetime_s - 30, 20, 20):
        person.clock.now_s += passed_s
        assert person.get("/").status_code == 200
    assert provider.requests.count("/token") == 2, "the sign-in, and the first request near the end"
    provider.down = True
    assert person.get("/").status_code == 200, "the renewed token is valid"
    person.clock.now_s += provider.lifetime_s
    assert person.get("/").status_code == 303, "nobody renewed it"


@pytest.mark.parametrize("refusal", [Unauthenticated, PermissionDenied])
def test_a_renewed_token_that_the_api_refuses_ends_the_sign_in(
    person: Browser, provider: OidcProvider, refusal: type[FairwayError]
) -> None:
    person.get(provider.consent(begun(person)).removeprefix(URL))
    person.clock.now_s += provider.lifetime_s - 30
    person.api.down = refusal("the token gives no role")
    assert person.get("/").status_code == 303
    person.api.down = None
    assert person.get("/").status_code == 303
    assert len(person.parts.sign_ins) == 0
