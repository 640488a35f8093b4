"""Files and batches: lists refuse what they do not serve, and an upload under a key is one file."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.openai.face import Face


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
async def test_a_list_has_pages_and_refuses_other_queries(face: Face, path: str) -> None:
    found = await face.ask("GET", f"{path}?limit=1")
    assert (found.status, found.json["data"], found.json["has_more"]) == (200, [], False)
    for query in ("limit=0", "limit=", "limit=1001", "after=nothing", "color=red"):
        found = await face.ask("GET", f"{path}?{query}")
        assert (found.status, found.error["param"]) == (400, query.partition("=")[0]), query


async def test_files_have_an_order(face: Face) -> None:
    assert (await face.ask("GET", "/v1/files?order=asc")).status == 200
    assert (await face.ask("GET", "/v1/files?order=up")).status == 400


async def test_an_upload_under_a_key_is_one_file(face: Face) -> None:
    async def upload(data: str, boundary: str, key: str = "k-1") -> Any:
        form = f'--{boundary}\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        form += f'--{boundary}\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n{data}\r\n'
        headers = (
            ("content-type", f"multipart/form-data; boundary={boundary}"),
            ("idempotency-key", key),
        )
        return await face.ask("POST", "/v1/files", f"{form}--{boundary}--\r\n".encode(), headers=headers)

    first = await upload("{}", "first")
    assert first.status == 200
    again = await upload("{}", "second")
    assert (again.status, again.json) == (200, first.json)
    other = await upload("[]", "third")
    assert (other.status, other.error["code"]) == (409, "idempotency_conflict")
    bad = await upload("{}", "fourth", "k k")
    assert (bad.status, bad.error["param"]) == (400, "idempotency-key")
