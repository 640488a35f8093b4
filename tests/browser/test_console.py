"""The console in headless Chromium over a whole installation: `make console-test`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs

import pytest
from playwright.sync_api import Page, Route, expect

from fairway.v1 import controlplane_pb2 as cp
from tests.browser.conftest import ROLLED, Console, Visitor, pictures
from tests.browser.watched import PATIENCE_MS, Watched, focused, has_visible_focus
from tests.support.updating import admin_of

OPERATED = ("/", "/rollouts", "/objectives", "/events")
PAGES = {
    "viewer": OPERATED,
    "operator": (*OPERATED, "/requests"),
    "auditor": (*OPERATED, "/requests", "/tenants", "/tenants/acme"),
    "admin": (*OPERATED, "/requests", "/tenants", "/tenants/acme"),
    "tenant": ("/tenants/acme", "/playground"),
    "tenant-admin": ("/tenants/acme", "/playground"),
}
ALL = sorted({path for paths in PAGES.values() for path in paths})

pytestmark = pytest.mark.usefixtures("installations")
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
expect.set_options(timeout=PATIENCE_MS)


def on_admin(console: Console, change: Any) -> Any:
    """Return what a change by the API returns."""

    async def run() -> Any:
        async with admin_of(console.stack) as admin:
            return await change(admin)

    # The loop of the browser's driver runs in this thread.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, run()).result()


@pytest.fixture
def rollout(console: Console, request: pytest.FixtureRequest) -> Iterator[str]:
    """A canary of ROLLED that waits in its first step."""
    name = re.sub("[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:60] + f"-{time.time_ns() % 10**6}"
    made = cp.Rollout(metadata=cp.Metadata(name=name), deployment=ROLLED, by_worker=False)
    made.arms.add(name="next", version="next")
    for ratio in (0.05, 0.5, 1.0):
        made.steps.add(weight_ratio=ratio).hold.FromSeconds(3600)
    made.soak.FromSeconds(3600)
    made.strategy = cp.ROLLOUT_STRATEGY_CANARY
    on_admin(console, lambda admin: admin.rollouts.create(made))
    yield name

    async def end(admin: Any) -> None:
        found = await admin.rollouts.get(name)
        if found.phase in (cp.ROLLOUT_PHASE_LOADING, cp.ROLLOUT_PHASE_RUNNING, cp.ROLLOUT_PHASE_SOAKING):
            await admin.rollouts.abort(name)
        for _ in range(600):
            if (await admin.rollouts.get(name)).phase >= cp.ROLLOUT_PHASE_COMPLETED and (
                await admin.rollouts.get(name)
            ).phase != cp.ROLLOUT_PHASE_ROLLING_BACK:
                return
            await asyncio.sleep(0.2)

    on_admin(console, end)


def test_a_stranger_sees_the_sign_in_page_alone(visitor: Visitor) -> None:
    stranger = visitor("")
    loaded: set[str] = set()
    stranger.page.on(
        "response", lambda answer: loaded.add(answer.url.removeprefix(stranger.url).partition("?")[0])
    )
    for path in (*ALL, "/requests/x", "/rollouts/x", "/anything"):
        stranger.goto(path)
        assert "/sign-in" in stranger.page.url
        assert stranger.page.title() == "Sign in · Fairway"
        assert stranger.page.get_by_role("navigation").count() == 0
    assert {path for path in loaded if path.startswith("/static")} == {
        "/static/console.css",
        "/static/icon.svg",
    }
    stranger.check()
    stranger.page.get_by_label("API key").fill("fw_ops_wrong")
    stranger.page.get_by_role("button", name="Sign in").click()
    expect(stranger.page.get_by_role("alert")).to_have_text("the API key is not valid")
    stranger.check()


@pytest.mark.parametrize("role", PAGES)
def test_every_page_can_be_used_by_its_role(console: Console, visitor: Visitor, role: str) -> None:
    person = visitor(role)
    for path in ALL:
        page = person.goto(path, 200 if path in PAGES[role] or path == "/playground" else _denied(role, path))
        if path in PAGES[role]:
            person.check()
            expect(page.get_by_role("navigation", name="Pages").locator("[aria-current]")).to_have_count(1)
    assert console.keys[role] not in person.page.content()
    assert person.page.evaluate("document.cookie") == ""
    assert person.page.evaluate("localStorage.length + sessionStorage.length") == 0
    person.page.get_by_role("button", name="Sign out").click()
    person.page.wait_for_url("**/sign-in")
    person.page.go_back()
    person.goto(PAGES[role][0])
    assert "/sign-in" in person.page.url


def _denied(role: str, path: str) -> int:
    """Return the status of a page that is not for the role: `/` leads people of a tenant to theirs."""
    has_list = path == "/tenants" and role == "tenant-admin"
    return 200 if has_list or (path == "/" and role.startswith("tenant")) else 403


POST = """async ([name, csrf]) => {
  const body = new URLSearchParams({name, csrf});
  const answer = await fetch("/change/abort", {method: "POST", body});
  return [answer.status, answer.redirected, (await answer.text()).includes("(PERMISSION_DENIED)")];
}"""


def test_a_viewer_has_no_buttons_and_its_forms_are_refused(
    console: Console, visitor: Visitor, rollout: str
) -> None:
    viewer = visitor("viewer")
    page = viewer.page
    for path in ("/", f"/rollouts/{rollout}"):
        viewer.goto(path)
        assert page.locator('form[action^="/change/"]').count() == 0
    token = page.locator('input[name="csrf"]').first.get_attribute("value") or ""
    assert page.evaluate(POST, [rollout, token]) == [200, True, True], "the next page reports the refusal"
    found = on_admin(console, lambda admin: admin.rollouts.get(rollout))
    assert found.phase in (cp.ROLLOUT_PHASE_LOADING, cp.ROLLOUT_PHASE_RUNNING)
    viewer.check()


def test_nodes_are_cordoned_and_drained_and_the_page_follows(console: Console, visitor: Visitor) -> None:
    admin = visitor("admin")
    page = admin.goto("/")
    row = page.get_by_role("row").filter(has_text="worker-1")
    row.get_by_role("button", name="Cordon worker-1", exact=True).click()
    expect(page.get_by_role("status").filter(has_text="worker-1 is cordoned")).to_be_visible()
    expect(row.get_by_text("cordoned", exact=True)).to_be_visible()
    on_admin(console, lambda admin: admin.nodes.uncordon("worker-1"))
    expect(row.get_by_text("cordoned", exact=True)).to_have_count(0)  # by an update of the open page
    row.locator("summary").click()
    row.get_by_role("button", name="Drain worker-1").click()
    expect(row.get_by_text(re.compile("drained|draining"))).to_be_visible()
    row.get_by_role("button", name="Uncordon worker-1").click()
    expect(row.get_by_role("button", name="Cordon worker-1", exact=True)).to_be_visible()
    admin.check()


def test_a_rollout_is_paused_resumed_promoted_and_aborted(
    visitor: Visitor, rollout: str, request: pytest.FixtureRequest
) -> None:
    operator = visitor("operator")
    page = operator.goto("/rollouts")
    page.get_by_role("link", name=rollout).click()
    expect(page.locator(".lead .badge").first).to_have_text("running")
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator(".lead").get_by_text("paused", exact=True)).to_be_visible()
    page.get_by_role("button", name="Resume", exact=True).click()
    expect(page.locator(".lead").get_by_text("paused", exact=True)).to_have_count(0)
    page.locator("#promote > summary").click()
    page.get_by_role("button", name="Promote", exact=True).click()
    expect(page.locator("[aria-current=step]")).to_contain_text("50 %")
    operator.check()
    _picture(operator, request, "rollout")
    page.locator("#abort > summary").click()
    page.locator("#abort").get_by_label("Reason").fill("it was slow <b>")
    page.get_by_role("button", name="Abort", exact=True).click()
    expect(page.locator(".lead .badge").first).to_have_text(re.compile("rolling back|aborted"))
    expect(page.locator(".history")).to_contain_text("it was slow <b>")
    operator.check()


def test_a_rollout_is_promoted_to_the_end_and_reverted(visitor: Visitor, rollout: str) -> None:
    admin = visitor("admin")
    page = admin.goto(f"/rollouts/{rollout}")
    expect(page.locator(".lead .badge").first).to_have_text("running")
    page.locator("#promote > summary").click()
    page.get_by_label("To all traffic").check()
    page.get_by_role("button", name="Promote", exact=True).click()
    expect(page.locator(".lead .badge").first).to_have_text("soaking")
    page.locator("#revert > summary").click()
    page.get_by_role("button", name="Revert", exact=True).click()
    expect(page.locator(".lead .badge").first).to_have_text(re.compile("rolling back|reverted|aborted"))
    admin.check()


def test_keys_are_created_rotated_and_deleted(console: Console, visitor: Visitor) -> None:
    lead = visitor("tenant-admin")
    page = lead.goto("/tenants/acme")
    page.get_by_label("New key").fill("acme.ci")
    page.get_by_label("Expires after hours").fill("24")
    page.get_by_role("button", name="Create", exact=True).click()
    secret = page.get_by_label("Secret").input_value()
    assert secret.startswith("fw_acme.ci_")
    lead.check()
    page.get_by_role("link", name="Done").click()
    row = page.get_by_role("row").filter(has_text="acme.ci")
    assert secret not in page.content()
    row.locator("summary", has_text="Rotate").click()
    row.get_by_role("button", name="Rotate acme.ci").click()
    assert page.get_by_label("Secret").input_value() not in ("", secret)
    page.get_by_role("link", name="Done").click()
    row.locator("summary", has_text="Delete").click()
    row.get_by_role("button", name="Delete acme.ci").click()
    expect(page.get_by_role("status").filter(has_text="acme.ci was deleted")).to_be_visible()
    expect(row).to_have_count(0)
    page.get_by_label("New key").fill("other.ci")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("other.ci")
    lead.check()
    assert "other.ci" not in [key.metadata.name for key in on_admin(console, lambda admin: admin.keys.list())]


def test_a_request_is_found_and_explained(visitor: Visitor, request: pytest.FixtureRequest) -> None:
    operator = visitor("operator")
    page = operator.goto("/requests")
    links = page.locator('th a[href^="/requests/"]')
    expect(links).not_to_have_count(0)
    page.get_by_label("Show").select_option("failed")
    page.get_by_role("button", name="Show").click()
    assert "kind=failed" in page.url
    operator.check()
    operator.goto("/requests?kind=last")
    name = links.first.inner_text()
    links.first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    expect(page.get_by_role("heading", name="Stages")).to_be_visible()
    expect(page.get_by_text("granted").first).to_be_visible()
    operator.check()
    _picture(operator, request, "request")
    operator.goto("/requests/no-such-request")
    expect(page.get_by_text("No ended request")).to_be_visible()
    operator.check()


def test_the_playground_streams_and_stops(
    visitor: Visitor, console: Console, request: pytest.FixtureRequest
) -> None:
    person = visitor("tenant")
    page = person.goto("/playground")
    page.get_by_label("Model").select_option(console.stack.model)
    page.get_by_label("Input").select_option("text")
    page.get_by_label("Message", exact=True).fill("def fibonacci(n):\n")
    page.get_by_label("Most tokens").fill("48")
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#run-status")).to_contain_text("48 out")
    assert len(page.locator(".turns .answer").last.inner_text()) > 20
    person.check()
    _picture(person, request, "playground")
    page.get_by_text("Schema of the answer").click()
    page.get_by_label("JSON schema").fill("{")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#run-status")).to_contain_text("schema is no JSON")
    page.get_by_label("JSON schema").fill(SCHEMA)
    page.get_by_label("Most tokens").fill("64")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#run-status")).to_contain_text(re.compile("out, first after"))
    assert page.locator(".turns .answer").last.inner_text().lstrip().startswith("{")
    page.get_by_label("JSON schema").fill("")
    page.get_by_label("Most tokens").fill("900")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#run-status")).to_have_text("Stopped")
    person.check()


def test_a_turn_that_did_not_finish_is_not_sent_twice_with_the_next(visitor: Visitor) -> None:
    person = visitor("tenant")
    page = person.goto("/playground")
    sent: list[Any] = []

    def fail(route: Route) -> None:
        sent.append(json.loads(parse_qs(route.request.post_data or "")["messages"][0]))
        error = json.dumps({"error": {"reason": "QUEUE_FULL", "message": "the queue is full"}})
        route.fulfill(content_type="application/x-ndjson", body=error + "\n")

    page.route("**/playground/run", fail)
    page.get_by_label("Message", exact=True).fill("hello")
    for count in (1, 2):
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#turns").get_by_text("Did not finish")).to_have_count(count)
    assert sent == [[{"role": "user", "content": "hello"}]] * 2
    person.check()


def test_the_keyboard_is_enough(visitor: Visitor, rollout: str) -> None:
    operator = visitor("operator")
    page = operator.goto(f"/rollouts/{rollout}")
    page.evaluate("document.getElementById('live-toggle').click()")
    page.keyboard.press("Tab")
    assert focused(page) == "Skip to the content"
    page.keyboard.press("Enter")
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(focused(page))
        assert has_visible_focus(page), seen
        if seen[-1].startswith("Abort"):
            break
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.type("by keyboard")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".history")).to_contain_text("by keyboard")
    operator.check()


def test_an_open_form_is_not_replaced(visitor: Visitor, rollout: str) -> None:
    operator = visitor("operator")
    page = operator.goto(f"/rollouts/{rollout}")
    page.locator("#abort > summary").click()
    page.locator("#abort").get_by_label("Reason").fill("half a sentence")
    page.wait_for_timeout(7000)
    assert page.locator("#abort").get_by_label("Reason").input_value() == "half a sentence"
    expect(page.locator("#live-status")).to_have_text("Updates wait for what you do here")
    page.locator("#abort > summary").click()
    page.get_by_role("button", name="Pause updates").click()
    expect(page.locator("#live-status")).to_have_text("Updates are paused")
    operator.check()


@contextmanager
def frozen(console: Console, *fragments: str) -> Iterator[None]:
    pids = console.stack.pids(*fragments)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_without_etcd_pages_show_what_they_had_and_its_age(console: Console, visitor: Visitor) -> None:
    admin = visitor("admin")
    paths = ("/", "/rollouts", "/tenants", "/tenants/acme", "/objectives", "/events")
    for path in paths:
        admin.goto(path)
    with frozen(console, "etcd", "unix://etcd:0"):
        admin.page.wait_for_timeout(4000)
        for path in paths:
            page = admin.goto(path)
            expect(page.locator(".notice.stale").first).to_contain_text(re.compile(r"as of \S+ .*ago"))
        page = admin.goto("/")
        expect(page.get_by_role("rowheader", name="worker-0")).to_be_visible()
        admin.check()
    page = admin.goto("/")
    expect(page.locator(".notice.stale")).to_have_count(0)


def test_without_redis_budgets_are_unknown_and_the_rest_is_there(console: Console, visitor: Visitor) -> None:
    admin = visitor("admin")
    with frozen(console, "redis-server"):
        page = admin.goto("/tenants/acme")
        expect(page.get_by_role("rowheader", name="acme", exact=True)).to_be_visible()
        expect(page.get_by_text(re.compile("unknown|as of")).first).to_be_visible()
        expect(page.get_by_role("rowheader", name="acme.tenant", exact=True)).to_be_visible()
        admin.check()


def test_pictures_of_the_documentation(
    console: Console, visitor: Visitor, request: pytest.FixtureRequest
) -> None:
    admin = visitor("admin")
    for path, name in (("/", "fleet"), ("/tenants/acme", "tenant")):
        page = admin.goto(path)
        expect(page.locator(".u-wrap")).to_be_visible()
        _picture(admin, request, name)
    admin.check()


def _picture(person: Watched, request: pytest.FixtureRequest, name: str) -> None:
    """Write a picture of the page, where pictures are wanted."""
    folder = pictures(request.config)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        _settled(person.page).screenshot(path=str(folder / f"{name}.png"), full_page=False)


def _settled(page: Page) -> Page:
    page.evaluate("document.fonts.ready")
    page.evaluate("scrollTo(0, 0)")
    return page
