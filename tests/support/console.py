"""A console over an API that a test fills, which applies the access rules of the protos."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import count
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from starlette.testclient import TestClient

from console.app import ConsoleParts, build_app
from console.calls import may_call
from console.provider import WebProvider
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import inference_pb2 as inference
from services.core.errors import FairwayError, PermissionDenied, Unauthenticated
from tests.support.clocks import HandClock

URL: Final = "http://127.0.0.1:8090"
ROLES: Final = ("viewer", "operator", "auditor", "admin", "tenant", "tenant-admin")
MARKUP: Final = "\"'><evil-tag onload=alert(1)>{{7*7}}&amp;"
_MAX_DEPTH: Final = 6


class FilledApi:
    """Implements ``console.calls.Api``. The key of each role is its name."""

    def __init__(self) -> None:
        self.answers: dict[str, Message | FairwayError] = {}
        self.calls: list[tuple[str, str, Message]] = []
        self.revoked: set[str] = set()
        self.down: FairwayError | None = None
        self.events: list[inference.GenerateResponse | FairwayError] = []
        self.generations: list[inference.Generation] = []
        self.ended = 0
        self.hold: Callable[[], Any] | None = None  # awaited before each event of a generation
        self.who = MARKUP

    def caller(self, credential: str) -> cp.GetCallerResponse:
        if credential not in ROLES or credential in self.revoked:
            raise Unauthenticated("the API key is not valid")
        role = cp.KeyRole.Value("KEY_ROLE_" + credential.upper().replace("-", "_"))
        tenant = "acme" if credential.startswith("tenant") else ""
        return cp.GetCallerResponse(key=self.who, role=role, tenant=tenant)

    async def call(self, credential: str, method: str, request: Message) -> Any:
        if self.down is not None:
            raise self.down
        caller = self.caller(credential)
        if method == "GetCaller":
            return caller
        if not may_call(caller.role, method):
            raise PermissionDenied("the role may not call this method")
        self.calls.append((credential, method, request))
        found = self.answers.get(method)
        if isinstance(found, FairwayError):
            raise found
        return getattr(cp, f"{method}Response")() if found is None else found

    async def models(self, credential: str) -> Sequence[str]:
        if not self.caller(credential).tenant:
            raise PermissionDenied("models are run with a tenant's key")
        return ["tiny", MARKUP]

    async def generate(
        self, credential: str, generation: inference.Generation
    ) -> AsyncGenerator[inference.GenerateResponse, None]:
        self.caller(credential)
        self.generations.append(generation)
        try:
            for event in self.events:
                if self.hold is not None:
                    await self.hold()
                if isinstance(event, FairwayError):
                    raise event
                yield event
        finally:
            self.ended += 1

    def fill(self, text: str = MARKUP) -> None:
        """Let every method of the control plane answer with a value in every field."""
        for method in cp.DESCRIPTOR.services_by_name["ControlPlaneService"].methods:
            if not method.server_streaming and method.name != "GetCaller":
                answer = getattr(cp, f"{method.name}Response")()
                filled(answer, text)
                if hasattr(answer, "next_page_token"):
                    answer.next_page_token = ""
                self.answers[method.name] = answer


def filled(message: Message, text: str, depth: int = 0) -> None:
    """Set every field: texts to ``text``, numbers to 2, lists and maps to one element."""
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated and field.message_type and field.message_type.GetOptions().map_entry:
            _fill_map(message, field, text)
        elif field.message_type is not None:
            if depth < _MAX_DEPTH:
                held = getattr(message, field.name)
                filled(held.add() if field.is_repeated else held, text, depth + 1)
                if not field.is_repeated:
                    held.SetInParent()
        elif field.is_repeated:
            getattr(message, field.name).append(_value(field, text))
        else:
            setattr(message, field.name, _value(field, text))


def _fill_map(message: Message, field: Any, text: str) -> None:
    entry = field.message_type.fields_by_name
    if entry["value"].message_type is None:
        key, value = _value(entry["key"], text), _value(entry["value"], text)
        getattr(message, field.name)[key] = value


def _value(field: Any, text: str) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return 0.5
    return 2


class Browser:
    """A person at the console: a client with cookies, without scripts."""

    def __init__(
        self, api: FilledApi, clock: HandClock, provider: WebProvider | None = None, url: str = URL
    ) -> None:
        numbers = count(1)
        self.api = api
        self.clock = clock
        self.parts = ConsoleParts(api, clock, lambda: f"secret-{next(numbers)}", url, provider)
        self.http = TestClient(build_app(self.parts), base_url=url, follow_redirects=False)

    def other(self) -> Browser:
        """Return another browser at the same console."""
        found = object.__new__(Browser)
        found.api, found.clock, found.parts = self.api, self.clock, self.parts
        found.http = TestClient(self.http.app, base_url=str(self.http.base_url), follow_redirects=False)
        return found

    def get(self, path: str, **headers: str) -> Any:
        return self.http.get(path, headers=headers)

    def sign_in(self, key: str, to: str = "/") -> Any:
        return self.http.post("/sign-in", data={"key": key, "to": to})

    @property
    def csrf(self) -> str:
        """The token of the forms of a page."""
        found = re.search(r'name="csrf" value="([^"]*)"', self.get("/playground").text)
        assert found is not None
        return found[1]

    def post(self, path: str, *, csrf: Any = None, headers: Any = None, **fields: Any) -> Any:
        token = self.csrf if csrf is None else csrf
        return self.http.post(path, data={"csrf": token, **fields}, headers=headers or {})
