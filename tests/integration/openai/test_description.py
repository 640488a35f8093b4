"""The OpenAPI document against the server: requests that are built from it, and those that it excludes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.openai.face import CHAT, Answer, Face, serving

Operation = tuple[str, str, dict[str, Any]]
MEDIA = ("application/json", "multipart/form-data; boundary=x", "application/octet-stream")
FORM = (
    b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nline\r\n--x--\r\n'
)
# Values of fields that their schemas alone do not decide.
VALUES: dict[str, Any] = {
    "model": "m",
    "messages": CHAT["messages"],
    "input": "hi",
    "prompt": "hi",
    "tokens": [104],
    "max_tokens": 9,
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
    "documents": ["a"],
}
# What a body has beside its required fields.
ALSO: dict[str, Any] = {
    "classify": {"input": "hi"},
    "tokenize": {"prompt": "hi"},
    "score": {"text_1": "a", "text_2": "b"},
    "infer": {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]},
}
# Routes that the scripted service does not serve.
UNSERVED = (
    "/v1/classify",
    "/classify",
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/v1/score",
    "/score",
    "/v2/models",
)


async def operations(face: Face) -> list[Operation]:
    document = (await face.ask("GET", "/openapi.json")).json
    return [
        (method.upper(), path, _resolved(operation, document))
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]


def _resolved(value: Any, document: Any) -> Any:
    if isinstance(value, list):
        return [_resolved(each, document) for each in value]
    if not isinstance(value, dict):
        return value
    if "$ref" not in value:
        return {name: _resolved(each, document) for name, each in value.items()}
    kind, name = value["$ref"].removeprefix("#/components/").split("/")
    found = document["components"][kind][name]
    return found if kind == "schemas" else _resolved(found, document)


def body_of(path: str, operation: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return a body with the required fields; empty for a route without a body."""
    if "requestBody" not in operation:
        return {}
    schema = operation["requestBody"]["content"].get("application/json", {}).get("schema", {})
    values = {**VALUES, "input_file_id": names["file_id"]}
    required = {name: values.get(name, "x") for name in schema.get("required", ())}
    return {**required, **ALSO.get(path.rpartition("/")[2], {})}


def parameters(operation: dict[str, Any], kind: str) -> dict[str, Any]:
    return {each["name"]: each["schema"] for each in operation["parameters"] if each["in"] == kind}


async def stored(face: Face) -> dict[str, str]:
    """Return the names of things that exist, by the parameter of a path."""
    made = (await face.ask("POST", "/v1/responses", {"model": "m", "input": "hi"})).json
    headers = (("content-type", MEDIA[1]),)
    file = (await face.ask("POST", "/v1/files", FORM, headers=headers)).json
    batch = {"input_file_id": file["id"], "endpoint": VALUES["endpoint"], "completion_window": "24h"}
    found = (await face.ask("POST", "/v1/batches", batch)).json
    return {"response_id": made["id"], "file_id": file["id"], "batch_id": found["id"], "model": "m"}


def at(path: str, names: dict[str, str]) -> str:
    for name, value in {**names, "version": "1"}.items():
        path = path.replace("{" + name + "}", value)
    assert "{" not in path
    return path


async def test_bodies_are_of_the_described_kinds(face: Face) -> None:
    """Of three media types a route takes those it describes; one without a body takes a request without."""
    names, seen = await stored(face), set()
    for method, path, operation in await operations(face):
        if method != "POST":
            assert "requestBody" not in operation, path
            continue
        taken = {kind.partition(";")[0] for kind in operation.get("requestBody", {}).get("content", {})}
        empty = await face.ask("POST", at(path, names))
        assert (empty.status in (400, 415) and "response in the background" not in str(empty.body)) is bool(
            taken
        ), (path, empty)
        seen.add(frozenset(taken))
        for kind in MEDIA:
            data = FORM if "form" in kind else json.dumps(body_of(path, operation, names)).encode()
            answer = await face.ask("POST", at(path, names), data, headers=(("content-type", kind),))
            if taken:
                assert (answer.status != 415) is (kind.partition(";")[0] in taken), (path, kind, answer)
            else:
                assert answer.status == empty.status, (path, kind)
    assert len(seen) == 4, "JSON, a form, JSON or bytes, and none"


def queries(name: str, schema: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield values of a parameter, each with whether its schema has it."""
    if "anyOf" in schema:
        (schema,) = (each for each in schema["anyOf"] if each["type"] != "null")
    if "enum" in schema:
        yield from ((value, True) for value in schema["enum"])
        yield "other", False
    elif schema["type"] == "integer":
        yield str(schema["minimum"]), True
        yield str(schema["minimum"] - 1), False
        yield str(schema["maximum"]), True
        yield str(schema["maximum"] + 1), False
        yield "x", False
    elif schema["type"] == "boolean":
        yield "true", True
        yield "false", True
        yield "x", False
    else:
        yield "", True


async def test_query_strings_are_those_described(face: Face) -> None:
    names, found = await stored(face), {}
    listed = await operations(face)
    every = {name for _, _, operation in listed for name in parameters(operation, "query")}
    for method, path, operation in listed:
        described = parameters(operation, "query")
        if not described:
            continue
        found[method, path] = set(described)
        for name in every - set(described):
            answer = await face.ask(method, f"{at(path, names)}?{name}=1")
            assert (answer.status, answer.error["param"]) == (400, name), (path, name)
        for name, schema in described.items():
            for value, is_valid in queries(name, schema):
                other = "&stream=true" if name == "starting_after" else ""
                answer = await face.ask(method, f"{at(path, names)}?{name}={value}{other}")
                assert (answer.status == 200) is is_valid, (path, name, value, answer)
    page = {"limit", "after"}
    assert found == {
        ("GET", "/v1/files"): {*page, "order", "purpose"},
        ("GET", "/v1/batches"): page,
        ("GET", "/v1/responses/{response_id}/input_items"): {*page, "order", "include", "include[]"},
        ("GET", "/v1/responses/{response_id}"): {
            "stream",
            "starting_after",
            "include",
            "include[]",
            "include_obfuscation",
        },
    }


async def test_headers_are_those_described(face: Face) -> None:
    """A route that reads a header refuses it where it is there twice."""
    names = await stored(face)
    listed = await operations(face)
    every = {name for _, _, operation in listed for name in parameters(operation, "header")}
    common = {"x-request-id", "traceparent", "x-fairway-attempt"}
    for method, path, operation in listed:
        described = set(parameters(operation, "header"))
        assert common <= described, path
        for name in sorted(every - common - {"anthropic-version"}):
            headers: tuple[tuple[str, str], ...] = ((name, "1"), (name, "1"))
            body: Any = None
            if "requestBody" in operation:
                body = body_of(path, operation, names)
                if "multipart/form-data" in operation["requestBody"]["content"]:
                    body, headers = FORM, (*headers, ("content-type", MEDIA[1]))
            answer = await face.ask(method, at(path, names), body, headers=headers)
            is_read = f"the header {name} is there more than once" in str(answer.body)
            assert is_read is (name in described), (method, path, name, answer)


async def test_answers_are_of_the_described_kinds(face: Face) -> None:
    """Each route that is served answers with each kind that it describes, and with no other."""
    driven = 0
    for method, path, operation in await operations(face):
        if path.startswith(UNSERVED) or path == "/v1/stream":
            continue
        names = await stored(face)
        described = set(operation["responses"]["200"]["content"])
        body: Any = body_of(path, operation, names) if "requestBody" in operation else None
        headers: tuple[tuple[str, str], ...] = ()
        if "multipart/form-data" in operation.get("requestBody", {}).get("content", {}):
            body, headers = FORM, (("content-type", MEDIA[1]),)
        if path.endswith("responses/{response_id}/cancel"):
            background = {"model": "m", "input": "hi", "background": True}
            names["response_id"] = (await face.ask("POST", "/v1/responses", background)).json["id"]
        plain = await face.ask(method, at(path, names), body, headers=headers)
        kinds = {_kind(plain)}
        streamed = {**body, "stream": True} if isinstance(body, dict) else body
        if "stream" in parameters(operation, "query"):
            kinds.add(_kind(await face.ask(method, at(path, names) + "?stream=true")))
        elif "text/event-stream" in described:
            kinds.add(_kind(await face.ask(method, at(path, names), streamed)))
        assert kinds == described, (method, path)
        driven += 1
    assert driven > 25


def _kind(answer: Answer) -> str:
    assert answer.status == 200, answer
    return answer.headers["content-type"].partition(";")[0]


@pytest.mark.parametrize("field", ["file", "purpose", "color"])
async def test_the_form_of_an_upload_is_as_described(field: str) -> None:
    async with serving() as face:
        listed = await operations(face)
        (operation,) = (found for *route, found in listed if route == ["POST", "/v1/files"])
        schema = operation["requestBody"]["content"]["multipart/form-data"]["schema"]
        assert set(schema["required"]) == set(schema["properties"])
        parts = [part for part in FORM.split(b"--x\r\n")[1:] if f'name="{field}"'.encode() not in part]
        if field not in schema["properties"]:
            parts.insert(0, f'content-disposition: form-data; name="{field}"\r\n\r\nred\r\n'.encode())
        data = b"".join(b"--x\r\n" + part for part in parts)
        if not data.endswith(b"--x--\r\n"):
            data += b"--x--\r\n"
        answer = await face.ask("POST", "/v1/files", data, headers=(("content-type", MEDIA[1]),))
        assert (answer.status, answer.error["param"]) == (400, field)
