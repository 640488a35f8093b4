"""The OpenAPI document of the HTTP API, from the declarations by which bodies are read and answers written.

A field that is not offered has the values at which it is accepted. So a client that is generated from the
document sends what the server takes. The document describes its own route, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, get_args

import msgspec
from msgspec import Raw, Struct, structs

from services.gateway.faces.openai.exchange import BYTES, JSON, Access, ApiEndpoint, Exchange
from services.gateway.faces.openai.types import HINTS, neutral_values
from services.runtime.process.product import product_version

OPENAPI: Final = "3.1.0"
NOT_OFFERED: Final = "Not offered: accepted at these values only."
NO_EFFECT: Final = "A hint, no effect."
_REFERENCE: Final = "#/components/schemas/{name}"
_PARAMETER: Final = re.compile(r"\{([a-z_]+)(?::path)?\}")
# Headers that every route reads.
_COMMON: Final = ("x-request-id", "x-fairway-attempt", "traceparent")
# Headers that OpenAPI describes otherwise, or that every HTTP client sets itself.
_UNLISTED: Final = ("authorization", "x-api-key", "content-encoding")


def document_of(
    endpoints: Sequence[ApiEndpoint], headers: Mapping[str, str], *, version: str, title: str = "Fairway"
) -> dict[str, Any]:
    """Return the document of these routes. ``headers``: the request headers with their meaning."""
    kinds = list(
        dict.fromkeys(kind for each in endpoints for kind in (each.body, each.answer, each.error) if kind)
    )
    listed = {name: text for name, text in headers.items() if name not in _UNLISTED}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        found = paths.setdefault(path_of(endpoint), {})
        found[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": OPENAPI,
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas_of(kinds),
            "parameters": {
                name: {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}
                for name, text in listed.items()
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def path_of(endpoint: ApiEndpoint) -> str:
    return _PARAMETER.sub(r"{\1}", endpoint.path)


def schemas_of(kinds: Sequence[type[Struct]]) -> dict[str, Any]:
    """Return the schema of each type, and of those within them, by name."""
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    for kind in _structs_within(kinds):
        properties = schemas[kind.__name__]["properties"]
        for field in structs.fields(kind):
            shown = properties[field.encode_name]
            if _is_unserved(field.type):
                values = [*neutral_values(kind, field.name), None]
                properties[field.encode_name] = {"enum": values, "description": NOT_OFFERED}
            elif field.name in HINTS:
                shown["description"] = NO_EFFECT
    return schemas


def _is_unserved(kind: Any) -> bool:
    return kind is Raw or Raw in get_args(kind)


def _structs_within(kinds: Iterable[Any]) -> Iterator[type[Struct]]:
    """Yield every Struct among these types and within them, once."""
    seen: dict[Any, None] = {}
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, type) and issubclass(kind, Struct) and kind not in seen:
            seen[kind] = None
            waiting += [field.type for field in structs.fields(kind)]
            yield kind
        waiting += [inner for inner in get_args(kind) if inner not in seen]


def _operation(endpoint: ApiEndpoint) -> dict[str, Any]:
    path = path_of(endpoint)
    name = re.sub(r"[^a-z0-9]+", "_", f"{endpoint.method} {path}".lower()).strip("_")
    operation: dict[str, Any] = {"operationId": name, "summary": endpoint.accepts, "security": []}
    if endpoint.access is Access.TENANT:
        operation["security"] = [{"bearer": []}, {"key": []}]
    if endpoint.takes:
        operation["requestBody"] = {"required": True, "content": _content(endpoint.takes, endpoint.body)}
    operation["parameters"] = [
        *(
            {"name": found, "in": "path", "required": True, "schema": {"type": "string"}}
            for found in _PARAMETER.findall(endpoint.path)
        ),
        *_query(endpoint.query),
        *({"$ref": f"#/components/parameters/{header}"} for header in (*endpoint.headers, *_COMMON)),
    ]
    content = _content(endpoint.returns, endpoint.answer)
    if endpoint.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    answer = {"description": "The answer.", "content": content}
    operation["responses"] = {
        **({"200": answer} if content else {"101": {"description": "The WebSocket."}}),
        "default": {"description": "An error.", "content": _content((JSON,), endpoint.error)},
    }
    return operation


def _query(kind: type[Struct] | None) -> Iterator[dict[str, Any]]:
    """Yield the parameters of a query string."""
    if kind is None:
        return
    properties = schemas_of([kind])[kind.__name__]["properties"]
    for name, found in properties.items():
        schema = {key: value for key, value in found.items() if key != "description"}
        about = {"description": found["description"]} if "description" in found else {}
        yield {"name": name, "in": "query", "required": False, **about, "schema": schema}


def _content(kinds: Sequence[str], described: type[Struct] | None) -> dict[str, Any]:
    """Return the content of these media types; a type describes what is no plain bytes."""
    schema = {"type": "object"} if described is None else {"$ref": _REFERENCE.format(name=described.__name__)}
    return {kind: {"schema": {} if kind == BYTES else schema} for kind in kinds}


def with_description(endpoints: Sequence[ApiEndpoint], headers: Mapping[str, str]) -> tuple[ApiEndpoint, ...]:
    """Return the endpoints and that of their document. It is built once."""
    data = b""

    async def answer(exchange: Exchange) -> None:
        await exchange.reply.json(200, data)

    own = ApiEndpoint(
        "GET", "/openapi.json", Access.TENANT, answer, "no body; the OpenAPI document of this API"
    )
    described = (*endpoints, own)
    data = msgspec.json.encode(document_of(described, headers, version=product_version()))
    return described
