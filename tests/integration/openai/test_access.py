"""Who may come in to the OpenAI face: each route has a rule, and no spelling of a URL gets around it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
from starlette.routing import Route, WebSocketRoute

from services.adapters.memory.store import MemoryStore
from services.core.audit import PENDING, AuditEntry
from services.core.records import load
from services.gateway.faces.openai.exchange import Access
from services.runtime.audit import AuditRecorder
from services.runtime.clock import SystemClock
from tests.integration.openai.face import ADMIN_KEY, CHAT, KEY, STREAM, Face, serving
from tests.support.credentials import Credentials
from tests.support.oidc_provider import oidc_provider
from tests.support.waiting import until


def routes(face: Face) -> list[tuple[str, str]]:
    found = []
    for route in face.app.routes:
        if isinstance(route, WebSocketRoute):  # in test_sockets.py
            assert route.path == "/v1/stream"
            continue
        assert isinstance(route, Route)
        found += [(method, route.path) for method in sorted(route.methods or ())]
    return found


@pytest.fixture
async def guarded() -> AsyncIterator[tuple[Face, Credentials]]:
    """The face with credentials of every kind."""
    with oidc_provider() as provider:
        credentials = Credentials(provider)
        reading = asyncio.create_task(credentials.tokens.run())
        await until(lambda: not credentials.tokens.problem())
        async with serving(identity=credentials.directory) as face:
            yield face, credentials
        reading.cancel()
        await asyncio.wait({reading})


async def test_every_route_has_a_rule_and_keeps_it(guarded: tuple[Face, Credentials]) -> None:
    face, credentials = guarded
    rules = {(e.method, e.path): e.access for e in face.app.state.endpoints}
    assert {pair for pair in routes(face) if pair[0] != "HEAD"} == set(rules)
    public = {path for (_, path), access in rules.items() if access is Access.PUBLIC}
    assert public == {"/healthz", "/readyz", "/health", "/v2/health/live", "/v2/health/ready"}
    refused: dict[str | None, int] = {None: 401, **dict.fromkeys(credentials.bad.values(), 401)}
    refused |= dict.fromkeys(credentials.without_role.values(), 403)
    refused |= {text: 403 for text, role in credentials.good.values() if not role.of_tenant}
    for (method, path), access in rules.items():
        target = path.replace("{model:path}", "m")
        for key, status in refused.items():
            answer = await face.ask(method, target, CHAT if method == "POST" else None, key=key)
            assert answer.status == (200 if access is Access.PUBLIC else status), (method, path, key)
            if answer.status == 401:
                assert answer.headers["www-authenticate"] == "Bearer"
        assert face.service.calls == []
        for text in (text for text, role in credentials.good.values() if role.of_tenant):
            answer = await face.ask(method, target, CHAT if method == "POST" else None, key=text)
            assert answer.status not in (401, 403), (method, path)
        face.service.calls.clear()


async def test_a_token_of_a_newer_key_is_asked_for_again(guarded: tuple[Face, Credentials]) -> None:
    face, credentials = guarded
    credentials.provider.rotate()
    token = credentials.provider.token(groups=["tenants"], tenant="acme")
    answer = await face.ask("GET", "/v1/models", key=token)
    assert (answer.status, answer.error["code"]) == (503, "unavailable")
    assert 1 <= int(answer.headers["retry-after"]) <= 11


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/models", (("host", "localhost/healthz"),)),
        ("/v1/models", (("host", "x?"),)),
        ("/v1/models", (("host", "x/healthz?a="), ("x-forwarded-host", "localhost"))),
        ("/v1/models", (("x-original-url", "/healthz"), ("x-rewrite-url", "/healthz"))),
        ("/v1/models?path=/healthz", ()),
        ("/healthz/../v1/models", ()),
        ("/v1/models/../../healthz", ()),
        ("//v1/models", ()),
        ("/v1//models", ()),
        ("/v1/models/", ()),
        ("/healthz//", ()),
        ("/metrics", ()),
        ("/version/", ()),
        ("/v1/chat/completions/", ()),
        ("/%761/models", ()),
        ("/v1/models%00", ()),
        ("/v1/models;x=/healthz", ()),
        ("http://localhost/healthz/../v1/models", ()),
        ("/docs", ()),
        ("/openapi.json", ()),
        ("/", ()),
    ],
)
async def test_no_spelling_of_a_url_opens_anything(
    face: Face, path: str, headers: tuple[tuple[str, str], ...]
) -> None:
    answer = await face.ask("GET", path, key=None, headers=headers)
    assert answer.status in (400, 401, 404, 405)
    assert "location" not in answer.headers
    assert b"org/m" not in answer.body


async def test_a_key_without_a_scheme_has_a_header_of_its_own(face: Face) -> None:
    for value, status in ((KEY, 200), (KEY[:-1] + "x", 401), (ADMIN_KEY, 403)):
        answer = await face.ask("GET", "/v1/models", key=None, headers=(("x-api-key", value),))
        assert answer.status == status
    both = (("x-api-key", KEY),)
    assert (await face.ask("GET", "/v1/models", key="wrong", headers=both)).status == 401


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/models/", 200), ("/v1/models/org/m/", 200), ("/v1/", 404)]
)
async def test_one_trailing_slash_does_not_matter(face: Face, path: str, status: int) -> None:
    assert (await face.ask("GET", path)).status == status
    assert (await face.ask("GET", path + "/")).status == 404
    assert (await face.ask("GET", path, key=None)).status == (401 if status == 200 else 404)
    assert (await face.chat(CHAT)).status == 200


@pytest.mark.parametrize("slash", ["%2F", "%2f"])
async def test_an_encoded_slash_is_part_of_a_models_name_alone(face: Face, slash: str) -> None:
    assert (await face.ask("GET", f"/v1/models/org{slash}m")).status == 200
    for each in face.app.state.endpoints:
        path = re.sub(r"{.*?}", "m", each.path)
        for at in (place for place, letter in enumerate(path) if letter == "/"):
            spelled = path[:at] + slash + path[at + 1 :]
            if spelled.startswith("/v2/models/"):
                continue  # the rest is a name
            answer = await face.ask(each.method, spelled, CHAT if each.method == "POST" else None)
            assert answer.status in (400, 404, 405), (each.method, spelled)
    for path in (f"/v1/models{slash}", f"/v1/models/org{slash}m{slash}", f"/healthz{slash}"):
        assert (await face.ask("GET", path)).status == 404
    assert face.service.calls == []


async def test_pages_of_other_origins_need_a_setting(face: Face) -> None:
    page = (("origin", "https://app.example"), ("access-control-request-method", "POST"))
    refused = await face.ask("OPTIONS", "/v1/chat/completions", key=None, headers=page)
    assert refused.status == 405
    plain = await face.chat(CHAT, headers=page[:1])
    assert not any(name.startswith("access-control") for name in plain.headers)


async def test_pages_of_the_origins_in_the_setting_may_call() -> None:
    async with serving(cors_origins=["https://app.example"]) as face:
        page = (("origin", "https://app.example"), ("access-control-request-method", "POST"))
        asked = (*page, ("access-control-request-headers", "authorization, content-type"))
        allowed = await face.ask("OPTIONS", "/v1/chat/completions", key=None, headers=asked)
        assert allowed.status == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        streamed = await face.chat(STREAM, headers=page[:1])
        assert streamed.headers["access-control-allow-origin"] == "https://app.example"
        assert "access-control-allow-credentials" not in streamed.headers
        assert "x-request-id" in streamed.headers["access-control-expose-headers"]
        assert streamed.events[-1] == "[DONE]"
        other = await face.ask(
            "OPTIONS", "/v1/models", key=None, headers=(("origin", "https://x"), *page[1:])
        )
        assert "access-control-allow-origin" not in other.headers
        # The rule of the route holds for every origin.
        assert (await face.ask("GET", "/v1/models", key=None, headers=page[:1])).status == 401


async def test_two_authorization_headers_are_none(face: Face) -> None:
    answer = await face.ask("GET", "/v1/models", headers=(("authorization", "Bearer x"),))
    assert answer.status == 400


async def test_the_wrong_method_or_path_has_the_error_shape(face: Face) -> None:
    answer = await face.ask("GET", "/v1/chat/completions")
    assert (answer.status, answer.error["code"]) == (405, None)
    assert answer.headers["x-request-id"].startswith("req_")
    assert "GET" in answer.error["message"]
    missing = await face.ask("POST", "/v1/audio/%E2%80%A8speech?x=1")
    assert missing.status == 404
    assert missing.error["message"] == "there is nothing at the path /v1/audio/?speech"


async def test_an_unauthenticated_body_is_not_read(face: Face) -> None:
    reader, writer = await face.connect()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10000\r\n\r\n{")
    assert b" 401 " in await asyncio.wait_for(reader.readline(), 30)
    writer.close()


async def test_refused_callers_are_in_the_audit_log() -> None:
    store = MemoryStore(SystemClock())
    recorder = AuditRecorder(store, SystemClock(), source="gateway", process="src-1")
    async with serving(audit=recorder) as face:
        for key in (None, KEY[:-1] + "x", KEY[:-1] + "x", ADMIN_KEY, KEY):
            await face.ask("GET", "/v1/models", None, key=key)
    await recorder.flush()
    entries = [load(entry.value, AuditEntry) for entry in (await store.list(PENDING)).entries]
    assert [(each.method, each.outcome, each.count, each.actor.address) for each in entries] == [
        ("GET /v1/models", "UNAUTHENTICATED", 1, "127.0.0.1"),
        ("GET /v1/models", "UNAUTHENTICATED", 2, "127.0.0.1"),
        ("GET /v1/models", "PERMISSION_DENIED", 1, "127.0.0.1"),
    ]
    names = [key.split("_")[1] for key in (KEY, ADMIN_KEY)]
    assert [each.actor.key for each in entries] == ["", *names]
