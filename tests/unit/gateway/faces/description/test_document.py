"""The OpenAPI document states what the server does: routes, access, and the values that it takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import pytest

from services.core.errors import UnsupportedFeature
from services.gateway.faces.description.document import NOT_OFFERED, document_of, path_of
from services.gateway.faces.openai.exchange import REQUEST_HEADERS, Access, BodyReader, HttpLimits
from services.gateway.faces.openai.requests import chat_request, completion_request
from services.gateway.faces.openai.routes import endpoints_of
from services.gateway.faces.openai.types import HINTS
from services.gateway.faces.responses.background import ResponseParts

NOTHING = cast(Any, None)
RESPONSES = ResponseParts(NOTHING, NOTHING, NOTHING, 0.0)
ENDPOINTS = endpoints_of(
    NOTHING, NOTHING, NOTHING, NOTHING, HttpLimits(0), str, b"", RESPONSES, bodies=BodyReader(0)
)
DOCUMENT = document_of(ENDPOINTS, REQUEST_HEADERS, version="1")
SCHEMAS = DOCUMENT["components"]["schemas"]
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ChatBody": (chat_request, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
    "CompletionBody": (completion_request, {"model": "m", "prompt": "x"}),
}


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from [value["$ref"]] if "$ref" in value else []
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)


def test_every_route_is_described_with_its_rule() -> None:
    described = {
        (method.upper(), path): operation
        for path, item in DOCUMENT["paths"].items()
        for method, operation in item.items()
    }
    assert set(described) == {(each.method, path_of(each)) for each in ENDPOINTS}
    for each in ENDPOINTS:
        operation = described[each.method, path_of(each)]
        assert bool(operation["security"]) is (each.access is Access.TENANT)
    names = [operation["operationId"] for operation in described.values()]
    assert len(set(names)) == len(names)


def test_every_reference_leads_somewhere() -> None:
    found = set(references(DOCUMENT))
    assert len(found) > 20
    for reference in found:
        place: Any = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]
    assert json.loads(json.dumps(DOCUMENT)) == DOCUMENT


@pytest.mark.parametrize("name", BODIES)
def test_fields_that_are_not_offered_are_accepted_at_the_values_of_the_document(name: str) -> None:
    parse, body = BODIES[name]
    for field, schema in SCHEMAS[name]["properties"].items():
        if schema.get("description") != NOT_OFFERED:
            continue
        for value in schema["enum"]:
            parse(json.dumps({**body, field: value}).encode())
        with pytest.raises(UnsupportedFeature) as caught:
            parse(json.dumps({**body, field: {"other": 1}}).encode())
        assert caught.value.metadata["field"] == field


@pytest.mark.parametrize("name", BODIES)
def test_required_and_unknown_fields_are_those_of_the_document(name: str) -> None:
    _, body = BODIES[name]
    assert set(SCHEMAS[name]["required"]) == set(body)
    assert SCHEMAS[name]["additionalProperties"] is False


def test_hints_are_described_as_such() -> None:
    properties = SCHEMAS["ChatBody"]["properties"]
    assert all("hint" in properties[name]["description"] for name in HINTS if name in properties)
    assert "hint" not in properties["n"].get("description", "")
