"""Pages show what the API answers as text, and what it answered last while it is away."""

from __future__ import annotations

import asyncio
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from google.protobuf.message import Message

from console import calls, pages
from console.changes import CHANGES
from console.pages import PAGES, Visit, fleet
from fairway.v1 import controlplane_pb2 as cp
from services.core.errors import (
    DeadlineExceeded,
    EtagMismatch,
    FailedPrecondition,
    NoLeader,
    NotFound,
    StoreUnavailable,
    Unauthenticated,
)
from tests.support.console import MARKUP, ROLES, Browser, filled

QUERIES = {"/diagnosis": "?metric=ttft&minutes=10"}
PATHS = [rule.path.replace("{name}", "acme") + QUERIES.get(rule.path, "") for rule in PAGES]
LIVE = ("/", "/requests", "/rollouts", "/rollouts/acme", "/objectives", "/events")


class Checked(HTMLParser):
    """Fails on an element that the markup of a name would make, and on one that is not closed."""

    VOID = frozenset(("meta", "link", "img", "input"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "evil-tag"
        assert not any(name.startswith("on") for name, _ in attrs), (tag, attrs)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "evil-tag"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def checked(text: str) -> Checked:
    found = Checked()
    found.feed(text)
    found.close()
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    return found


def cells(text: str) -> list[str]:
    """Return the text of each tile and each cell of a table."""
    found = re.findall(r"<(?:dd|td)\b[^>]*>(.*?)</(?:dd|td)>", text, re.DOTALL)
    return [" ".join(re.sub("<[^>]*>", "", each).split()) for each in found]


@pytest.mark.parametrize(
    "path", [*PATHS, "/requests?id=%3Cevil-tag%3E&tenant=%3Cevil-tag%3E", "/events?resource=%3Cevil-tag%3E"]
)
def test_markup_in_every_name_is_text(browser: Browser, path: str) -> None:
    browser.api.fill()
    for phase in (cp.ROLLOUT_PHASE_RUNNING, cp.ROLLOUT_PHASE_COMPLETED):
        browser.api.answers["GetRollout"].rollout.phase = phase  # type: ignore[union-attr]
        for role in ("admin", "tenant-admin"):
            browser.sign_in(role)
            answer = browser.get(path)
            if answer.status_code == 200:
                checked(answer.text)
                assert "49" not in answer.text or "{{7*7}}" in answer.text


def test_markup_is_really_on_the_pages(browser: Browser) -> None:
    browser.api.fill()
    browser.sign_in("admin")
    escaped = "&lt;evil-tag onload=alert(1)&gt;"
    for path in PATHS:
        assert browser.get(path).text.count(escaped) > (path != "/playground"), path


def test_markup_in_errors_is_text(browser: Browser) -> None:
    browser.sign_in("admin")
    browser.api.answers = dict.fromkeys((rule.method for rule in PAGES), NotFound(MARKUP))
    for path in PATHS:
        checked(browser.get(path).text)
    browser.api.answers["AbortRollout"] = FailedPrecondition(MARKUP)
    browser.post("/change/abort", name=MARKUP)
    text = browser.get("/playground").text
    checked(text)
    assert "FAILED_PRECONDITION" in text
    checked(browser.sign_in(MARKUP, to=MARKUP).text)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("role", ROLES)
def test_pages_of_an_empty_fleet(browser: Browser, path: str, role: str) -> None:
    browser.sign_in(role)
    answer = browser.get(path)
    assert answer.status_code in (200, 303, 403, 404)
    checked(answer.text)


@pytest.mark.parametrize("path", LIVE)
def test_an_open_page_gets_its_block_alone(browser: Browser, path: str) -> None:
    browser.api.fill()
    browser.sign_in("admin")
    part = browser.get(path, **{"x-part": "live"})
    assert part.status_code == 200
    assert "<html" not in part.text
    checked(part.text)
    assert part.text.strip() in browser.get(path).text
    assert browser.other().get(path, **{"x-part": "live"}).status_code == 401


def test_what_was_seen_is_shown_with_its_age_while_nothing_answers(browser: Browser) -> None:
    browser.api.fill("acme")
    browser.sign_in("admin")
    on_demand = "/playground", "/diagnosis"  # run when they are opened, so no answer is kept
    before = {path: browser.get(path).text for path in PATHS if not path.startswith(on_demand)}
    for error in (StoreUnavailable("etcd does not answer"), DeadlineExceeded("late"), NoLeader("none leads")):
        browser.api.down = error
        browser.clock.now_s += 90
        for path, text in before.items():
            after = browser.get(path)
            assert after.status_code == 200
            assert error.message in after.text
            assert after.text.count("acme") >= text.count("acme") - 1, path
    assert "as of 4m 30s ago" in browser.get("/").text
    browser.api.down = None
    assert "as of" not in browser.get("/").text


def test_what_was_never_seen_is_unknown(browser: Browser) -> None:
    browser.sign_in("admin")
    browser.api.down = StoreUnavailable("etcd does not answer")
    for path in PATHS:
        answer = browser.get(path)
        assert answer.status_code == 200
        if path != "/playground":
            assert "unknown" in answer.text, path
        assert set(cells(answer.text)) <= {"unknown"}, path
        checked(answer.text)
    assert len(cells(browser.get("/").text)) == 6


def test_what_one_read_did_not_answer_is_unknown_beside_the_rest(browser: Browser) -> None:
    browser.api.fill("acme")
    browser.sign_in("admin")
    assert "unknown" not in browser.get("/").text
    for path, method, what, cell in (
        ("/", "ListWorkers", "Health of workers", "0 of 0"),
        ("/", "ListNodes", "Nodes", "0 of 0"),
        ("/tenants", "ListBudgets", "Budgets", "none"),
    ):
        browser.sign_in("admin")
        browser.api.answers[method] = StoreUnavailable("it does not answer")
        page = browser.get(path).text
        assert f"{what}: unknown." in page
        assert cell not in cells(page)
        assert ("unknown" in cells(page)) == (method != "ListWorkers")


@pytest.mark.parametrize("most", [1, 5])
def test_a_list_that_is_cut_is_not_complete(
    browser: Browser, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAX_LISTED", most)
    keys, budgets = cp.ListKeysResponse(), cp.ListBudgetsResponse()
    for number in range(2):
        keys.keys.add(tenant="other").metadata.name = f"other.{number}"
        budgets.budgets.add(tenant="other").metadata.name = f"other.{number}"
    keys.next_page_token = budgets.next_page_token = "next"
    whole = cp.ListKeysResponse(keys=keys.keys), cp.ListBudgetsResponse(budgets=budgets.budgets)
    answer_at_once = browser.api.call

    async def call(credential: str, method: str, request: Any) -> Any:
        if method in ("ListKeys", "ListBudgets"):
            first = keys, budgets
            return (whole if request.page_token else first)[method == "ListBudgets"]
        return await answer_at_once(credential, method, request)

    browser.api.call = call  # type: ignore[method-assign]
    browser.api.answers["ListTenants"] = cp.ListTenantsResponse()
    browser.api.answers["ListTenants"].tenants.add().metadata.name = "acme"  # type: ignore[union-attr]
    browser.sign_in("admin")
    page, listed = browser.get("/tenants/acme").text, browser.get("/tenants").text
    is_cut = most == 1
    for what in ("It has no key.", "It has no budget."):
        assert (what in page) == (not is_cut)
    for what in ("Keys", "Budgets"):
        assert (f"{what}: not all are listed." in page) == is_cut
    assert cells(listed)[-1] == ("unknown" if is_cut else "none")


def test_another_person_is_shown_nothing_of_what_the_first_saw(browser: Browser) -> None:
    browser.api.fill("acme")
    browser.sign_in("admin")
    browser.get("/tenants/acme")
    other = browser.other()
    other.sign_in("auditor")
    browser.api.down = StoreUnavailable("etcd does not answer")
    assert "acme.key" not in other.get("/tenants/acme").text
    assert "as of" not in other.get("/tenants/acme").text


async def test_an_answer_that_comes_after_the_end_of_its_sign_in_is_not_kept(browser: Browser) -> None:
    parts, answered = browser.parts, asyncio.Event()
    sign_in = parts.sign_ins.find(parts.sign_ins.begin("admin", browser.api.caller("admin")))
    assert sign_in is not None
    answer_at_once = browser.api.call

    async def call(credential: str, method: str, request: Message) -> Any:
        if method == "ListNodes":
            raise Unauthenticated("the API key has expired")
        await answered.wait()
        return await answer_at_once(credential, method, request)

    browser.api.call = call  # type: ignore[method-assign]
    with pytest.raises(Unauthenticated):
        await fleet(Visit(sign_in, parts.recent, parts.api, parts.clock.unix_s()))
    parts.sign_ins.end(sign_in)
    reads = asyncio.all_tasks() - {asyncio.current_task()}
    answered.set()
    await asyncio.wait(reads)
    assert not parts.recent._recent


def test_recent_answers_are_bounded(browser: Browser) -> None:
    browser.sign_in("admin")
    large = cp.ListNodesResponse()
    for number in range(400):
        node = large.nodes.add()
        filled(node, f"{number}" + "x" * 300)
    browser.api.answers["ListNodes"] = large
    for number in range(60):
        browser.get(f"/?page={number}")
        browser.parts.recent.check_integrity()


def test_empty_answers_are_bounded_too(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_RECENT_BYTES", 32 * 1024)
    browser.sign_in("admin")
    for number in range(40):
        browser.get(f"/rollouts?page={number}")
    assert 16 < len(browser.parts.recent._recent) <= 32
    browser.parts.recent.check_integrity()


def test_a_change_is_sent_once_and_reported_on_the_next_page(browser: Browser) -> None:
    browser.sign_in("operator")
    answer = browser.post("/change/abort", name="canary-1", reason="it is slow")
    assert (answer.status_code, answer.headers["location"]) == (303, "/rollouts/canary-1")
    ((_, method, request),) = browser.api.calls
    assert method == "AbortRollout"
    assert isinstance(request, cp.AbortRolloutRequest)
    assert (request.name, request.reason) == ("canary-1", "it is slow")
    assert len(request.request_id) == 32
    assert "canary-1 is being aborted" in browser.get("/rollouts/canary-1").text
    assert "is being aborted" not in browser.get("/rollouts/canary-1").text


def test_a_refused_change_is_reported_with_its_reason(browser: Browser) -> None:
    browser.sign_in("operator")
    browser.api.answers["CordonNode"] = EtagMismatch("it was changed meanwhile")
    browser.post("/change/cordon", name="worker-1")
    text = browser.get("/").text
    assert "worker-1: it was changed meanwhile (ETAG_MISMATCH)" in text
    assert 'role="alert"' in text


def test_a_promotion_has_its_target(browser: Browser) -> None:
    browser.sign_in("operator")
    browser.post("/change/promote", name="r", to_end="on", arm="blue")
    request = browser.api.calls[-1][2]
    assert isinstance(request, cp.PromoteRolloutRequest)
    assert (request.to_end, request.arm) == (True, "blue")


def test_a_new_secret_is_shown_once_and_stored_nowhere(browser: Browser) -> None:
    browser.sign_in("tenant-admin")
    browser.api.answers["CreateKey"] = cp.CreateKeyResponse(secret="fw_acme.ci_s3cret")
    fields = {"name": "acme.ci", "tenant": "acme", "role": "tenant", "expire_h": "24"}
    answer = browser.post("/change/create-key", **fields)
    assert answer.status_code == 200
    assert "fw_acme.ci_s3cret" in answer.text
    assert answer.headers["cache-control"] == "no-store"
    request = browser.api.calls[-1][2]
    assert isinstance(request, cp.CreateKeyRequest)
    assert request.key.role == cp.KEY_ROLE_TENANT
    assert request.key.expire_time.seconds == int(browser.clock.now_s) + 86_400
    assert "s3cret" not in browser.get("/tenants/acme").text


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "root"},
        {"role": "tenant", "expire_h": "soon"},
        {"role": "tenant", "expire_h": "-1"},
        {"role": "tenant", "expire_h": "nan"},
    ],
)
def test_a_form_with_a_wrong_value_changes_nothing(browser: Browser, fields: dict[str, str]) -> None:
    browser.sign_in("admin")
    browser.post("/change/create-key", name="acme.ci", tenant="acme", **fields)
    assert browser.api.calls == []
    assert "role of a tenant" in (text := browser.get("/playground").text) or "number of hours" in text


def test_a_rotation_has_its_grace(browser: Browser) -> None:
    browser.sign_in("admin")
    browser.post("/change/rotate-key", name="acme.ci", tenant="acme", grace_h="1.5")
    request = browser.api.calls[-1][2]
    assert isinstance(request, cp.RotateKeyRequest)
    assert request.grace.seconds == 5400


def test_an_unknown_change_is_no_change(browser: Browser) -> None:
    browser.sign_in("admin")
    assert browser.post("/change/erase-tenant", name="acme").status_code == 404
    assert "erase-tenant" not in CHANGES


def test_a_bug_shows_no_details(browser: Browser) -> None:
    browser.sign_in("admin")
    browser.api.answers["ListNodes"] = cp.ListTenantsResponse()  # It has no nodes.
    answer = browser.get("/")
    assert answer.status_code == 500
    assert re.search(r"incident [0-9a-f]{16}", answer.text)
    assert "Traceback" not in answer.text
    assert answer.headers["cache-control"] == "no-store"


def test_files_are_not_sent_twice(browser: Browser) -> None:
    first = browser.get("/static/console.css")
    assert first.headers["content-type"].startswith("text/css")
    assert browser.get("/static/console.css", **{"if-none-match": first.headers["etag"]}).status_code == 304
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/vendor"):
        assert browser.get(path).status_code == 303


def test_an_ordinary_request_is_shown_by_its_timeline(browser: Browser) -> None:
    browser.sign_in("admin")
    assert "No ended request" in browser.get("/requests/req_1").text
    timeline = cp.GetTimelineResponse(request_id="req_1")
    timeline.finished.request_id, timeline.finished.model = "req_1", "of-the-samples"
    browser.api.answers["GetTimeline"] = timeline
    page = browser.get("/requests/req_1").text
    assert "of-the-samples" in page
    assert "No ended request" not in page
