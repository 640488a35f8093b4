"""Lists of files and batches refuse what they do not serve."""

from __future__ import annotations

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
