"""Pages in headless Chromium that fail on what no page of the console may do, and checks of any page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Browser, BrowserContext, Page, Playwright

CHROMIUM: Final = Path("/usr/bin/chromium")
WIDE: Final = {"width": 1280, "height": 860}
NARROW: Final = {"width": 400, "height": 860}
PATIENCE_MS: Final = 60_000
_ARGS: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
_LOW_CONTRAST: Final = Path(__file__).with_name("contrast.js").read_text()
_NAMED_ROLES: Final = frozenset(
    ("button", "link", "textbox", "combobox", "checkbox", "region", "navigation", "meter", "img")
)


class Watched:
    """One person's browser. Collects requests to other hosts, messages of errors, and failed requests."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.url = url
        self.context = context
        self.faults: list[str] = []
        self.page = self.opened()

    def opened(self) -> Page:
        page = self.context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("request", lambda request: self._check_host(request.url))
        page.on("websocket", lambda socket: self.faults.append(f"a socket to {socket.url}"))
        page.on("pageerror", lambda error: self.faults.append(f"a script failed: {error}"))
        page.on("console", lambda message: self._check_message(message.type, message.text))
        return page

    def goto(self, path: str, status: int = 200) -> Page:
        """Return the page once it is loaded, with the expected status."""
        answer = self.page.goto(self.url + path)
        assert answer is not None
        assert answer.status == status, (path, answer.status)
        return self.page

    def sign_in(self, key: str) -> None:
        self.goto("/sign-in")
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(lambda url: "/sign-in" not in url)

    def check(self) -> None:
        """Assert that nothing was collected, and that people can read and use the page by any means."""
        assert self.faults == [], self.faults
        page = self.page
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(250)  # the transition of colours
            assert (found := page.evaluate(_LOW_CONTRAST)) == [], (page.url, scheme, found)
        page.emulate_media(color_scheme="light")
        assert (found := unnamed(page)) == [], found
        assert page.locator("h1:visible").count() == 1, page.url
        assert page.get_by_role("main").count() == 1
        assert page.evaluate("document.documentElement.lang") == "en"
        ids = page.locator("[id]").evaluate_all("all => all.map(each => each.id)")
        assert len(ids) == len(set(ids)), page.url
        for size in (NARROW, WIDE):
            page.set_viewport_size(size)
            width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            over = page.evaluate(width)
            assert over <= 0, (page.url, size, over)

    def _check_host(self, url: str) -> None:
        if not url.startswith((self.url + "/", "data:", "blob:")):
            self.faults.append(f"a request to {url}")

    def _check_message(self, kind: str, text: str) -> None:
        # Chromium reports each status from 400 on, which tests expect by status.
        if kind in ("error", "warning") and not text.startswith(
            "Failed to load resource: the server responded"
        ):
            self.faults.append(f"{kind}: {text}")


def unnamed(page: Page) -> list[str]:
    """Return the controls, regions and pictures that a screen reader has no name for."""
    session = page.context.new_cdp_session(page)
    tree: list[dict[str, Any]] = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    found = []
    for node in tree:
        role = node.get("role", {}).get("value", "")
        is_control = role in _NAMED_ROLES
        if is_control and not node.get("ignored") and not str(node.get("name", {}).get("value", "")).strip():
            found.append(f"{role} on {page.url}: {html_of(page, node)}")
    return found


def html_of(page: Page, node: dict[str, Any]) -> str:
    """Return the beginning of the element of a node of the accessibility tree."""
    session = page.context.new_cdp_session(page)
    session.send("DOM.getDocument")
    found = session.send("DOM.getOuterHTML", {"backendNodeId": node["backendDOMNodeId"]})
    session.detach()
    return str(found["outerHTML"])[:200]


def focused(page: Page) -> str:
    """Return the name of what has the focus."""
    text = "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent.trim()"
    return str(page.evaluate(text))


def has_visible_focus(page: Page) -> bool:
    return bool(page.evaluate("getComputedStyle(document.activeElement).outlineStyle !== 'none'"))


@contextmanager
def chromium(playwright: Playwright) -> Iterator[Browser]:
    browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(_ARGS))
    try:
        yield browser
    finally:
        browser.close()
