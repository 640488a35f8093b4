"""Who sees and changes what: strangers nothing, others what the access rules of the API permit."""

from __future__ import annotations

import pytest

from console.changes import CHANGES
from console.pages import PAGES
from fairway.v1 import controlplane_pb2 as cp
from services.core.errors import Unauthenticated
from tests.support.clocks import HandClock
from tests.support.console import ROLES, Browser, FilledApi

PATHS = [rule.path.replace("{name}", "acme") for rule in PAGES]
FLEET = {"/", "/rollouts", "/rollouts/acme", "/objectives", "/events", "/playground"}
SEEN = {
    "viewer": FLEET,
    "operator": {*FLEET, "/requests", "/requests/acme"},
    "auditor": set(PATHS),
    "admin": set(PATHS),
    "tenant": {"/tenants/acme", "/playground"},
    "tenant-admin": {"/tenants", "/tenants/acme", "/playground"},
}
FOR_ALL = {"/diagnosis"}
CHANGING = {
    "viewer": set(),
    "operator": {"promote", "pause", "resume", "abort", "revert", "cordon", "uncordon", "drain"},
    "auditor": set(),
    "admin": set(CHANGES),
    "tenant": set(),
    "tenant-admin": {"create-key", "rotate-key", "delete-key"},
}


@pytest.mark.parametrize(
    "path", [*PATHS, "/nothing", "/static/", "/change/abort", "/sign-out", "/playground/run"]
)
def test_a_stranger_is_sent_to_the_sign_in_page(browser: Browser, path: str) -> None:
    browser.api.fill()
    answer = browser.get(path)
    assert answer.status_code == 303
    assert answer.headers["location"].partition("?")[0] == "/sign-in"
    assert browser.api.calls == []


@pytest.mark.parametrize("path", ["/change/abort", "/sign-out", "/playground/run"])
def test_a_stranger_changes_nothing(browser: Browser, path: str) -> None:
    assert browser.http.post(path, data={"name": "acme", "csrf": ""}).headers["location"] == "/sign-in"
    assert browser.api.calls == []
    assert browser.api.generations == []


def test_a_stranger_with_a_made_up_cookie_is_a_stranger(browser: Browser) -> None:
    browser.http.cookies.set(browser.parts.cookie, "secret-1")
    assert browser.get("/").status_code == 303


@pytest.mark.parametrize("role", ROLES)
def test_pages_are_those_of_the_role(browser: Browser, role: str) -> None:
    browser.api.fill("acme")
    browser.sign_in(role)
    found = {path for path in PATHS if browser.get(path).status_code == 200}
    assert found == SEEN[role] | FOR_ALL


@pytest.mark.parametrize("role", ROLES)
def test_the_navigation_leads_to_pages_of_the_role(browser: Browser, role: str) -> None:
    browser.api.fill("acme")
    browser.sign_in(role)
    page = browser.get("/playground").text
    for path in PATHS:
        if f'<li><a href="{path}"' in page:
            assert browser.get(path).status_code == 200, path


@pytest.mark.parametrize("role", ROLES)
def test_changes_are_those_of_the_role(browser: Browser, role: str) -> None:
    browser.sign_in(role)
    token = browser.csrf
    fields = {"name": "acme", "tenant": "acme", "role": "tenant"}
    for change in CHANGES:
        browser.post(f"/change/{change}", csrf=token, **fields)
    methods = {method for _, method, _ in browser.api.calls}
    assert methods & {each.method for each in CHANGES.values()} == {
        CHANGES[name].method for name in CHANGING[role]
    }


@pytest.mark.parametrize("role", ROLES)
def test_buttons_are_shown_to_those_who_may_press_them(browser: Browser, role: str) -> None:
    browser.api.fill("acme")
    browser.api.answers["GetRollout"].rollout.phase = cp.ROLLOUT_PHASE_RUNNING  # type: ignore[union-attr]
    browser.sign_in(role)
    text = "".join(browser.get(path).text for path in ("/", "/rollouts/acme", "/tenants/acme"))
    shown = {name for name in CHANGES if f'action="/change/{name}"' in text}
    hidden = {"pause", "cordon"}  # The rollout is paused and the node cordoned.
    assert shown - hidden == CHANGING[role] - hidden - {"drain"}


def test_a_tenants_people_see_no_other_tenant(browser: Browser) -> None:
    browser.sign_in("tenant-admin")
    assert browser.get("/tenants/other").status_code == 404
    assert browser.api.calls == []


@pytest.mark.parametrize("csrf", ["", "secret-1", "secret-2x"])
def test_a_form_without_the_token_of_the_page_changes_nothing(browser: Browser, csrf: str) -> None:
    browser.sign_in("admin")
    for path in ("/change/abort", "/playground/run", "/sign-out"):
        assert browser.post(path, csrf=csrf, name="acme").status_code == 403
    assert browser.api.calls == []
    assert browser.get("/playground").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_form_of_another_site_changes_nothing(browser: Browser, headers: dict[str, str]) -> None:
    browser.sign_in("admin")
    assert browser.post("/change/abort", headers=headers, name="acme").status_code == 403
    assert browser.http.post("/sign-in", data={"key": "admin"}, headers=headers).status_code == 403
    assert browser.api.calls == []


def test_an_origin_that_is_no_url_is_refused_with_a_text(browser: Browser) -> None:
    headers = {"origin": "http://["}
    answer = browser.http.post("/sign-in", data={"key": "admin"}, headers=headers)
    assert (answer.status_code, "the Origin header is no URL" in answer.text) == (400, True)
    browser.sign_in("admin")
    assert browser.post("/change/abort", headers=headers, name="acme").status_code == 400
    assert browser.other().get("/events", host="[:.:]").headers["location"] == "/sign-in?to=%2Fevents"
    assert browser.api.calls == []


def test_what_reads_changes_nothing(browser: Browser) -> None:
    browser.sign_in("admin")
    for change in CHANGES:
        assert browser.get(f"/change/{change}?name=acme&csrf={browser.csrf}").status_code == 404
    assert browser.api.calls == []


def test_a_revoked_key_ends_its_sign_in_with_the_next_request(browser: Browser) -> None:
    browser.api.fill("acme")
    browser.sign_in("admin")
    assert browser.get("/").status_code == 200
    browser.api.revoked.add("admin")
    answer = browser.get("/")
    assert answer.headers["location"] == "/sign-in?why=ended"
    assert "does not accept this key" in browser.get("/sign-in?why=ended").text
    browser.api.revoked.clear()
    assert browser.get("/").status_code == 303
    assert len(browser.parts.sign_ins) == 0


def test_a_change_with_a_revoked_key_ends_the_sign_in(browser: Browser) -> None:
    browser.sign_in("admin")
    token = browser.csrf
    browser.api.answers["AbortRollout"] = Unauthenticated("the API key has expired")
    assert browser.post("/change/abort", csrf=token, name="acme").headers["location"] == "/sign-in?why=ended"
    assert len(browser.parts.sign_ins) == 0


def test_every_answer_has_the_headers(browser: Browser) -> None:
    browser.sign_in("admin")
    answers = [browser.get(path) for path in (*PATHS, "/nothing", "/sign-in", "/static/live.js")]
    answers.append(browser.post("/change/abort", csrf=""))
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        is_file = answer.url.path.startswith("/static")
        assert answer.headers["cache-control"] == ("no-cache" if is_file else "no-store")


def test_pages_have_no_inline_script_or_style_and_name_no_other_host(browser: Browser) -> None:
    browser.api.fill("acme")
    browser.sign_in("admin")
    for path in (*PATHS, "/sign-in"):
        text = browser.get(path).text
        assert " style=" not in text
        assert "<style" not in text
        assert " onclick=" not in text
        assert "<script>" not in text
        assert "//" not in text.replace("http://www.w3.org", ""), path


def test_the_cookie_is_for_this_host_and_no_script(browser: Browser) -> None:
    header = browser.sign_in("admin").headers["set-cookie"]
    assert "HttpOnly" in header
    assert "SameSite=strict" in header
    assert "Path=/" in header
    assert "Secure" not in header
    assert "admin" not in header
    secure = Browser(FilledApi(), HandClock(), url="https://console.example")
    header = secure.sign_in("admin").headers["set-cookie"]
    assert header.startswith("__Host-fairway=")
    assert "Secure" in header
    assert "max-age=31536000" in secure.get("/sign-in").headers["strict-transport-security"]


def test_no_page_contains_the_key(browser: Browser) -> None:
    browser.api.fill("acme")
    browser.api.who = "ops"
    browser.sign_in("tenant-admin")
    for path in ("/tenants/acme", "/playground", "/tenants"):
        assert "tenant-admin" not in browser.get(path).text.replace('value="tenant-admin"', "")
