"""The ASGI application: sign-in, pages, changes and the playground behind one guard.

Without a sign-in there is the sign-in page and the files that it is made of; every other path leads there.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from console import playground
from console.calls import Api, RecentAnswers, may_call
from console.changes import CHANGES
from console.pages import PAGES, Page, PageRule, Visit
from console.provider import BACK_PATH, WebProvider, WebTokens
from console.sign_ins import SignIn, SignInAttempts, SignIns, csrf_matches, end_of
from console.view import FOLDER, View
from fairway.v1 import controlplane_pb2 as cp
from services.core.errors import (
    FairwayError,
    InvalidInput,
    NotFound,
    OverQuota,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from services.ports.clock import Clock
from services.rpc.status import http_status
from services.runtime.connections import source_of

log = structlog.get_logger()

MAX_FORM_BYTES: Final = 512 * 1024
MAX_FIELDS: Final = 64
MAX_CREDENTIAL_CHARS: Final = 8192
MAX_CHECKS: Final = 8  # credentials of strangers that are checked at once
FORM_S: Final = 20.0
_RENEW_S: Final = 60.0  # time before a token's end at which it is renewed
_BACK_S: Final = 600  # lifetime of the cookie that a provider's answer needs
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    # A stricter policy would make browsers hide the origin of forms, which is checked.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)
_TYPES: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".txt": "text/plain"}


@dataclass(slots=True)
class ConsoleParts:
    """What the console acts through."""

    api: Api
    clock: Clock
    new_secret: Callable[[], str]
    url: str  # the address by which browsers reach it; https makes the cookies secure
    provider: WebProvider | None = None
    recent: RecentAnswers = field(init=False)
    sign_ins: SignIns = field(init=False)
    attempts: SignInAttempts = field(init=False)
    checks: asyncio.Semaphore = field(init=False)
    view: View = field(init=False)

    def __post_init__(self) -> None:
        self.recent = RecentAnswers(self.api, self.clock)
        self.sign_ins = SignIns(self.clock, self.new_secret, self.recent.forget)
        self.attempts = SignInAttempts(self.clock)
        self.checks = asyncio.Semaphore(MAX_CHECKS)
        self.view = View(self.clock.unix_s)

    @property
    def is_secure(self) -> bool:
        return self.url.startswith("https://")

    @property
    def cookie(self) -> str:
        """Name of the cookie: browsers share cookies between the ports of a host."""
        return "__Host-fairway" if self.is_secure else f"fairway-{urlsplit(self.url).port or 80}"


def build_app(parts: ConsoleParts) -> ASGIApp:
    """Return the console as an ASGI application."""
    routes = [
        Route("/sign-in", partial(_sign_in_page, parts)),
        Route("/sign-in", partial(_sign_in, parts), methods=["POST"]),
        Route("/sign-out", partial(_changing, parts, _sign_out), methods=["POST"]),
        Route("/change/{change}", partial(_changing, parts, _change), methods=["POST"]),
        Route("/playground/run", partial(_changing, parts, _run), methods=["POST"]),
        *(Route(f"/static/{name}", partial(_static, file)) for name, file in _files().items()),
        *(Route(rule.path, partial(_page, parts, rule)) for rule in PAGES),
        Route("/{path:path}", partial(_missing, parts)),
    ]
    if parts.provider is not None:
        routes[:0] = [
            Route("/sign-in/provider", partial(_begin_provider, parts, parts.provider)),
            Route(BACK_PATH, partial(_finish_provider, parts, parts.provider)),
        ]
    return _Guard(Router(routes), is_secure=parts.is_secure)


class _Guard:
    """Adds the headers of every answer, and turns a bug into an answer without details."""

    def __init__(self, app: ASGIApp, *, is_secure: bool) -> None:
        self._app = app
        more = ((b"strict-transport-security", b"max-age=31536000"),) if is_secure else ()
        self._headers = (*_HEADERS, *more)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        begun = False

        async def send_guarded(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = list(message["headers"])
                if not any(name == b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-store"))
                message = {**message, "headers": [*headers, *self._headers]}
            await send(message)

        try:
            await self._app(scope, receive, send_guarded)
        except ClientDisconnect:
            return
        except Exception:
            incident = token_hex(8)
            log.exception("console.request_failed", path=scope["path"], incident=incident)
            if not begun:
                text = f"The console failed; the log of the control plane has the incident {incident}.\n"
                await Response(text, 500, media_type="text/plain")(scope, receive, send_guarded)


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    kind: str
    etag: str


def _files() -> dict[str, _File]:
    """Return the static files by their path, read once."""
    found = {}
    for path in sorted((FOLDER / "static").rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(FOLDER / "static").as_posix()] = _File(content, _TYPES[path.suffix], etag)
    return found


async def _static(file: _File, request: Request) -> Response:
    headers = {"cache-control": "no-cache", "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.kind, headers=headers)


async def _page(parts: ConsoleParts, rule: PageRule, request: Request) -> Response:
    """Answer with a page, or with the block of it that an open page replaces."""
    sign_in = await _signed_in(parts, request)
    if sign_in is None:
        return _to_sign_in(request)
    if not may_call(sign_in.role, rule.method):
        if rule.path == "/" and sign_in.caller.tenant:
            return RedirectResponse(f"/tenants/{quote(sign_in.caller.tenant)}", 303)
        return _error_page(parts, sign_in, PermissionDenied("your role may not see this page"))
    visit = Visit(
        sign_in,
        parts.recent,
        parts.api,
        parts.clock.unix_s(),
        {name: str(value) for name, value in request.path_params.items()},
        dict(request.query_params),
    )
    try:
        page = await rule.make(visit)
    except Unauthenticated as error:
        return _ended(parts, sign_in, request, error)
    except FairwayError as error:
        return _error_page(parts, sign_in, error)
    if request.headers.get("x-part") == "live" and page.live_s:
        context = _context(sign_in, rule.path, page)
        return Response(parts.view.part(page.template, context), media_type="text/html")
    return _rendered(parts, sign_in, rule.path, page)


def _rendered(parts: ConsoleParts, sign_in: SignIn | None, path: str, page: Page) -> Response:
    context = _context(sign_in, path, page)
    text = parts.view.page(page.template, context)
    if sign_in is not None:
        sign_in.notice = None
    return Response(text, page.status, media_type="text/html")


def _context(sign_in: SignIn | None, path: str, page: Page) -> dict[str, Any]:
    nav: list[tuple[str, str, bool]] = []
    role = ""
    if sign_in is not None:
        role = cp.KeyRole.Name(sign_in.role).removeprefix("KEY_ROLE_").lower().replace("_", " ")
        nav = [
            (rule.path, rule.label, rule.path == "/" + path.split("/")[1])
            for rule in PAGES
            if rule.label and may_call(sign_in.role, rule.method) and _is_for(sign_in, rule)
        ]
        if own := sign_in.caller.tenant:
            nav.insert(0, (f"/tenants/{quote(own)}", "Tenant", path.startswith("/tenants")))
    may = partial(may_call, sign_in.role) if sign_in is not None else (lambda method: False)
    return {
        "title": page.title,
        "live_s": page.live_s,
        "me": sign_in,
        "role": role,
        "nav": nav,
        "may": may,
        "notice": sign_in.notice if sign_in is not None else None,
        **page.values,
    }


def _is_for(sign_in: SignIn, rule: PageRule) -> bool:
    """Return whether the navigation has a page: people of a tenant have their own in place of the list."""
    if rule.path == "/playground":
        return bool(sign_in.caller.tenant)
    return not (sign_in.caller.tenant and rule.path == "/tenants")


def _error_page(parts: ConsoleParts, sign_in: SignIn | None, error: FairwayError) -> Response:
    match error:
        case NotFound():
            title = "Not found"
        case PermissionDenied():
            title = "Not for your role"
        case Unavailable():
            title = "Not available"
        case _:
            title = "This did not work"
    page = Page("error.html", title, {"error": error}, status=http_status(error))
    return _rendered(parts, sign_in, "/", page)


async def _missing(parts: ConsoleParts, request: Request) -> Response:
    sign_in = await _signed_in(parts, request)
    if sign_in is None:
        return _to_sign_in(request)
    return _error_page(parts, sign_in, NotFound("there is no such page"))


async def _signed_in(parts: ConsoleParts, request: Request) -> SignIn | None:
    """Return the sign-in of a request, its token renewed in time; None without a valid one."""
    cookie = request.cookies.get(parts.cookie, "")
    # A page that is left open asks for its updates by itself. Whoever forges the header has less time.
    is_use = "x-part" not in request.headers
    found = parts.sign_ins.find(cookie, is_use=is_use) if cookie else None
    if found is None:
        return None
    if not await _renewed(parts, found):
        parts.sign_ins.end(found)
    if not found.is_open:  # it may have been signed out meanwhile
        return None
    connection = request.scope.get("extensions", {}).get("fairway.connection")
    if connection is not None:
        connection["authenticated"]()  # It is not among those that are closed first.
    return found


async def _renewed(parts: ConsoleParts, found: SignIn) -> bool:
    """Return whether the credential is valid, after its token was renewed where it ends soon."""
    async with found.renewal:  # Providers accept each refresh token once.
        left_s = found.end_unix_s - parts.clock.unix_s()
        if parts.provider is None or not found.refresh_token or left_s > _RENEW_S:
            return left_s > 0
        try:
            tokens = await parts.provider.renew(found.refresh_token)
        except FairwayError as error:
            log.info("console.token_not_renewed", who=found.who, reason=error.reason)
            return left_s > 0
        # Stored before the API verifies them, which may be away: the earlier refresh token is used up.
        found.credential, found.refresh_token = tokens.access_token, tokens.refresh_token
        found.end_unix_s = parts.clock.unix_s() + tokens.lifetime_s
        try:
            found.caller = await _caller_of(parts, tokens.access_token)
        except FairwayError as error:
            log.info("console.renewed_token_not_verified", who=found.who, reason=error.reason)
            # The provider has just confirmed the login, and the API verifies the token at each later call.
            return not isinstance(error, Unauthenticated | PermissionDenied)
        found.end_unix_s = end_of(found.caller)
        return True


def _to_sign_in(request: Request, why: str = "") -> Response:
    if request.headers.get("x-part"):
        return Response(status_code=401)  # The open page reloads itself.
    path = request.scope["path"]  # A URL would include the Host header, which may be invalid.
    query = {"to": path} if request.method == "GET" and path != "/" else {}
    if why:
        query["why"] = why
    return RedirectResponse("/sign-in" + (f"?{urlencode(query)}" if query else ""), 303)


def _ended(parts: ConsoleParts, sign_in: SignIn, request: Request, error: Unauthenticated) -> Response:
    """End a sign-in whose credential the API refuses."""
    log.info("console.sign_in_ended", who=sign_in.who, reason=error.reason)
    parts.sign_ins.end(sign_in)
    return _to_sign_in(request, "ended")


async def _sign_in_page(parts: ConsoleParts, request: Request) -> Response:
    why = request.query_params.get("why") == "ended"
    text = "You were signed out: the API does not accept this key or token any more." if why else ""
    return _sign_in_form(parts, _local(request.query_params.get("to", "")), text)


def _sign_in_form(parts: ConsoleParts, to: str, problem: str = "", status: int = 200) -> Response:
    values = {"to": to, "problem": problem, "provider": parts.provider}
    return _rendered(parts, None, "", Page("sign_in.html", "Sign in", values, status=status))


async def _sign_in(parts: ConsoleParts, request: Request) -> Response:
    try:
        _check_origin(parts, request)
        form = await _form(request)
    except FairwayError as error:
        return _sign_in_form(parts, "/", error.message, http_status(error))
    to, credential = _local(form.get("to", "")), form.get("key", "").strip()
    try:
        cookie = await _admitted(parts, _source(parts, request), credential)
    except FairwayError as error:
        return _refused(parts, to, error)
    response = RedirectResponse(to, 303)
    _set_cookie(parts, response, cookie)
    return response


def _refused(parts: ConsoleParts, to: str, error: FairwayError) -> Response:
    response = _sign_in_form(parts, to, error.message, http_status(error))
    if isinstance(error, OverQuota):
        response.headers["retry-after"] = str(round(error.retry_after_s or 1))
    return response


def _source(parts: ConsoleParts, request: Request) -> str:
    """Return what is limited as one source; behind a proxy that ends TLS, the client that it appends."""
    host = request.client.host if request.client else ""
    if parts.is_secure and request.scope["scheme"] == "http":
        named = request.headers.getlist("x-forwarded-for")
        host = named[-1].rpartition(",")[2].strip()[:64] if named else host
    return source_of((host,))


def _count_attempt(parts: ConsoleParts, source: str) -> None:
    """Count an attempt. Raises OverQuota for a source with too many."""
    if wait_s := parts.attempts.begin(source):
        log.warning("console.sign_ins_limited", source=source)
        text = f"too many attempts to sign in: try again in {max(1, round(wait_s))} s"
        raise OverQuota(text, retry_after_s=max(1.0, wait_s))


async def _admitted(parts: ConsoleParts, source: str, credential: str, refresh_token: str = "") -> str:
    """Return the cookie's value of a new sign-in. Raises Unauthenticated, OverQuota or Unavailable.

    Failures alone are counted: those of others at the same proxy refuse no valid credential.
    """
    try:
        async with parts.checks:
            caller = await _caller_of(parts, credential)
    except Unauthenticated:
        _count_attempt(parts, source)
        raise
    log.info("console.signed_in", who=caller.subject or caller.key, source=source)
    return parts.sign_ins.begin(credential, caller, refresh_token=refresh_token)


async def _caller_of(parts: ConsoleParts, credential: str) -> cp.GetCallerResponse:
    is_text = credential.isascii() and credential.isprintable() and " " not in credential
    if not (0 < len(credential) <= MAX_CREDENTIAL_CHARS and is_text):
        raise Unauthenticated("the API key is not valid")
    caller: cp.GetCallerResponse = await parts.api.call(credential, "GetCaller", cp.GetCallerRequest())
    return caller


async def _begin_provider(parts: ConsoleParts, provider: WebProvider, request: Request) -> Response:
    try:
        url, cookie = await provider.begin()
    except FairwayError as error:
        return _sign_in_form(parts, "/", error.message, http_status(error))
    response = RedirectResponse(url, 303)
    # The way back begins at the provider, so that a strict cookie would not arrive.
    response.set_cookie(
        "fairway-provider",
        cookie,
        max_age=_BACK_S,
        path="/sign-in",
        secure=parts.is_secure,
        httponly=True,
        samesite="lax",
    )
    return response


async def _finish_provider(parts: ConsoleParts, provider: WebProvider, request: Request) -> Response:
    try:
        cookie, source = request.cookies.get("fairway-provider", ""), _source(parts, request)
        _count_attempt(parts, source)  # before the provider is called
        tokens: WebTokens = await provider.finish(dict(request.query_params), cookie)
        value = await _admitted(parts, source, tokens.access_token, tokens.refresh_token)
        parts.attempts.succeeded(source)
    except FairwayError as error:
        return _refused(parts, "/", error)
    # A redirect in a chain from the provider would carry no strict cookie: the page moves on itself.
    response = _rendered(parts, None, "", Page("signed_in.html", "Signed in"))
    response.delete_cookie("fairway-provider", path="/sign-in")
    _set_cookie(parts, response, value)
    return response


def _set_cookie(parts: ConsoleParts, response: Response, value: str) -> None:
    response.set_cookie(
        parts.cookie, value, path="/", secure=parts.is_secure, httponly=True, samesite="strict"
    )


Changing = Callable[[ConsoleParts, SignIn, Request, Mapping[str, str]], Any]


async def _changing(parts: ConsoleParts, handle: Changing, request: Request) -> Response:
    """Answer a POST of a person who is signed in, once its origin and its token are those of our own page."""
    sign_in = await _signed_in(parts, request)
    if sign_in is None:
        return _to_sign_in(request)
    try:
        _check_origin(parts, request)
        form = await _form(request)
        if not csrf_matches(sign_in, form.get("csrf", "")):
            raise PermissionDenied("this form is of an earlier sign-in: reload the page and try again")
        response: Response = await handle(parts, sign_in, request, form)
    except Unauthenticated as error:
        return _ended(parts, sign_in, request, error)
    except FairwayError as error:
        return _error_page(parts, sign_in, error)
    return response


async def _sign_out(
    parts: ConsoleParts, sign_in: SignIn, request: Request, form: Mapping[str, str]
) -> Response:
    parts.sign_ins.end(sign_in)
    response = RedirectResponse("/sign-in", 303)
    response.delete_cookie(parts.cookie, path="/", secure=parts.is_secure, httponly=True, samesite="strict")
    return response


async def _change(
    parts: ConsoleParts, sign_in: SignIn, request: Request, form: Mapping[str, str]
) -> Response:
    change = CHANGES.get(request.path_params["change"])
    if change is None:
        raise NotFound("there is no such change")
    name = form.get("name", "")
    try:
        fields = change.fields(form, parts.clock.unix_s())
        asked = getattr(cp, f"{change.method}Request")(request_id=token_hex(16), **fields)
        answer = await parts.api.call(sign_in.credential, change.method, asked)
    except Unauthenticated:
        raise
    except FairwayError as error:
        sign_in.notice = "problem", f"{name}: {error.message} ({error.reason})"
        return RedirectResponse(change.back(form), 303)
    log.info("console.changed", method=change.method, resource=name, who=sign_in.who)
    if secret := getattr(answer, "secret", ""):
        values = {"secret": secret, "name": name, "done": change.done, "back": change.back(form)}
        return _rendered(parts, sign_in, "/tenants", Page("secret.html", f"Key {name}", values))
    sign_in.notice = "done", f"{name} {change.done}"
    return RedirectResponse(change.back(form), 303)


async def _run(parts: ConsoleParts, sign_in: SignIn, request: Request, form: Mapping[str, str]) -> Response:
    generation = playground.generation_of(form)
    playground.check_room(sign_in)
    return _Lines(playground.run(parts.api, sign_in, generation))


class _Lines(StreamingResponse):
    """Lines of JSON. Their source is closed with the answer, also when the browser leaves."""

    media_type = "application/x-ndjson"

    def __init__(self, lines: AsyncGenerator[bytes, None]) -> None:
        super().__init__(lines)
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._lines):
            await super().__call__(scope, receive, send)


def _check_origin(parts: ConsoleParts, request: Request) -> None:
    """Return for a POST of a page of this host. Raises PermissionDenied, InvalidInput."""
    origin = request.headers.get("origin")
    site = request.headers.get("sec-fetch-site", "same-origin")
    own = urlsplit(parts.url).netloc, request.headers.get("host", "")
    try:
        is_own = site == "same-origin" and (origin is None or urlsplit(origin).netloc in own)
    except ValueError:
        raise InvalidInput("the Origin header is no URL") from None
    if not is_own:
        raise PermissionDenied("the form was sent from another site")


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form; of several values of one the last. Raises InvalidInput."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip()
    if kind != "application/x-www-form-urlencoded":
        raise InvalidInput("the body is no form")
    body = bytearray()
    try:
        async with asyncio.timeout(FORM_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_FORM_BYTES:
                    raise InvalidInput(f"the form has over {MAX_FORM_BYTES // 1024} KiB")
        pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict")
    except TimeoutError:
        raise InvalidInput(f"the form did not arrive within {FORM_S:g} s") from None
    except ValueError:
        raise InvalidInput("the form is not in UTF-8, or has too many fields") from None
    return dict(pairs)


def _local(path: str) -> str:
    """Return a path of this host, `/` for anything else."""
    is_path = path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()
    return path if is_path and "\\" not in path else "/"
