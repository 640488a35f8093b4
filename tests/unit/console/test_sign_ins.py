"""Sign-ins end, are bounded, and cannot be guessed at."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.message import Message
from starlette.testclient import TestClient

from console import sign_ins
from console.app import MAX_CHECKS, _admitted
from console.sign_ins import SignInAttempts
from fairway.v1 import controlplane_pb2 as cp
from services.core.errors import StoreUnavailable
from tests.support.clocks import HandClock
from tests.support.console import URL, Browser, FilledApi


def test_a_key_signs_in_and_leads_to_the_wanted_page(browser: Browser) -> None:
    answer = browser.sign_in("admin", to="/rollouts")
    assert (answer.status_code, answer.headers["location"]) == (303, "/rollouts")
    assert browser.get("/rollouts").status_code == 200


@pytest.mark.parametrize(
    "to", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:1", "/a\nb", ""]
)
def test_a_sign_in_leads_to_no_other_host(browser: Browser, to: str) -> None:
    assert browser.sign_in("admin", to=to).headers["location"] == "/"


@pytest.mark.parametrize("key", ["", "wrong", "é", "a b", "x" * 9000, "a\nb"])
def test_a_wrong_key_is_refused_with_one_text(browser: Browser, key: str) -> None:
    answer = browser.sign_in(key)
    assert answer.status_code == 401
    assert "the API key is not valid" in answer.text
    assert "set-cookie" not in answer.headers


def test_an_api_that_is_away_is_said_and_not_a_wrong_key(browser: Browser) -> None:
    browser.api.down = StoreUnavailable("the store does not answer")
    answer = browser.sign_in("admin")
    assert answer.status_code == 503
    assert "the store does not answer" in answer.text


def test_a_sign_out_ends_the_sign_in_and_drops_what_it_received(browser: Browser) -> None:
    browser.sign_in("admin")
    assert browser.get("/").status_code == 200
    value = browser.http.cookies[browser.parts.cookie]
    assert browser.post("/sign-out").headers["location"] == "/sign-in"
    browser.http.cookies.set(browser.parts.cookie, value)
    assert browser.get("/").status_code == 303
    assert not browser.parts.recent._recent


@pytest.mark.parametrize(("step_s", "steps"), [(sign_ins.IDLE_S + 1, 1), (sign_ins.IDLE_S / 2, 25)])
def test_a_sign_in_ends_when_idle_and_after_a_working_day(
    browser: Browser, step_s: float, steps: int
) -> None:
    browser.sign_in("admin")
    last = 0
    for step in range(steps):
        browser.clock.now_s += step_s
        last = browser.get("/").status_code
        assert last == 200 or step == steps - 1
    assert last == 303
    assert len(browser.parts.sign_ins) == 0


def test_an_open_page_that_nobody_uses_keeps_no_sign_in_open(browser: Browser) -> None:
    browser.sign_in("admin")
    for _ in range(2):
        browser.clock.now_s += sign_ins.IDLE_S / 2
        assert browser.get("/", **{"x-part": "live"}).status_code == 200
    browser.clock.now_s += 1
    assert browser.get("/", **{"x-part": "live"}).status_code == 401
    assert len(browser.parts.sign_ins) == 0


def test_a_token_ends_its_sign_in(browser: Browser) -> None:
    caller = browser.api.caller("admin")
    caller.expire_time.seconds = int(browser.clock.now_s) + 300
    browser.api.caller = lambda credential: caller  # type: ignore[method-assign]
    browser.sign_in("token")
    browser.clock.now_s += 299
    assert browser.get("/").status_code == 200
    browser.clock.now_s += 2
    assert browser.get("/").status_code == 303


def test_a_caller_has_a_bounded_number_of_sign_ins(browser: Browser) -> None:
    others = [browser.other() for _ in range(sign_ins.MAX_OF_CALLER + 3)]
    for other in others:
        assert other.sign_in("admin").status_code == 303
    assert [other.get("/").status_code for other in others] == [303] * 3 + [200] * sign_ins.MAX_OF_CALLER


def test_all_sign_ins_are_bounded(browser: Browser) -> None:
    open_ = browser.parts.sign_ins
    for number in range(sign_ins.MAX_SIGN_INS + 5):
        open_.begin("key", cp.GetCallerResponse(key=f"key-{number}", role=cp.KEY_ROLE_VIEWER))
    assert len(open_) == sign_ins.MAX_SIGN_INS


def test_attempts_are_bounded_and_come_back(browser: Browser) -> None:
    for _ in range(sign_ins.ATTEMPTS):
        assert browser.sign_in("wrong").status_code == 401
    refused = browser.sign_in("wrong")
    assert refused.status_code == 429
    assert 0 < int(refused.headers["retry-after"]) <= sign_ins.REFILL_S
    for _ in range(2):
        assert browser.other().sign_in("admin").status_code == 303, "others at the proxy are not locked out"
    browser.clock.now_s += sign_ins.REFILL_S
    assert [browser.sign_in("wrong").status_code for _ in range(2)] == [401, 429]


async def test_keys_that_are_checked_at_once_are_bounded(browser: Browser) -> None:
    running, most = 0, 0

    async def call(credential: str, method: str, request: Message) -> cp.GetCallerResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return browser.api.caller(credential)

    browser.api.call = call  # type: ignore[method-assign]
    found = await asyncio.gather(*(_admitted(browser.parts, "source", "admin") for _ in range(30)))
    assert (len(set(found)), most) == (30, MAX_CHECKS)


@pytest.mark.parametrize(("url", "third"), [("https://console.example", 401), (URL, 429)])
def test_a_proxy_that_ends_tls_names_the_source(url: str, third: int) -> None:
    console = Browser(FilledApi(), HandClock(), url=url)
    proxy = TestClient(console.http.app, base_url=url.replace("https", "http"))

    def status(forwarded: str) -> int:
        return proxy.post("/sign-in", data={"key": "x"}, headers={"x-forwarded-for": forwarded}).status_code

    found = [status(f"10.0.0.{number}, 192.0.2.1") for number in range(sign_ins.ATTEMPTS + 1)]
    assert found == [401] * sign_ins.ATTEMPTS + [429], "what the client wrote does not count"
    assert status("10.0.0.1, 192.0.2.2") == third


def test_attempts_of_many_sources_are_bounded_together() -> None:
    clock = HandClock()
    attempts = SignInAttempts(clock)
    admitted = sum(not attempts.begin(f"10.0.{number // 250}.{number % 250}") for number in range(5000))
    assert admitted == sign_ins.ALL_ATTEMPTS
    assert len(attempts._sources) <= sign_ins.MAX_SOURCES
    clock.now_s += 10
    assert not attempts.begin("10.9.9.9")


def test_a_sign_in_shows_no_credential() -> None:
    found = sign_ins.SignIn("n", cp.GetCallerResponse(), "fw_secret", "csrf", 0.0, 0.0, 0.0, "refresh")
    assert "fw_secret" not in repr(found)
    assert "csrf" not in repr(found).replace("csrf=", "")
    assert "refresh" not in repr(found)


def test_a_body_that_is_no_form_or_too_large_is_refused(browser: Browser) -> None:
    assert browser.http.post("/sign-in", json={"key": "admin"}).status_code == 400
    assert browser.http.post("/sign-in", data={"key": "x" * 600_000}).status_code == 400
    many = {f"f{number}": "1" for number in range(100)}
    assert browser.http.post("/sign-in", data=many).status_code == 400
    kind = {"content-type": "application/x-www-form-urlencoded"}
    assert browser.http.post("/sign-in", content=b"key=%ff", headers=kind).status_code == 400
