"""Pictures of /v1/classify bodies: their number and size are checked before any of them is decoded."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import pytest

from fairway.v1 import inference_pb2 as pb
from services.core.errors import InvalidInput, UnsupportedFeature
from services.gateway.faces.openai.rows import classify_request
from services.rpc import bounds

LARGEST = 4 * 1024 * 1024
DATA_URL = "data:image/jpeg;base64,"


def classified(image: Any) -> pb.InferRequest:
    return classify_request(json.dumps({"model": "m", "image": image}).encode())


@pytest.mark.parametrize(
    ("image", "field", "text"),
    [
        # Each is no base64 either, which only decoding finds.
        (["!"] * 65, "image", "65 elements; at most 64"),
        ("!" * 7_000_000, "image[0]", "7000000 characters"),
        (["AAAA", DATA_URL + "!" * 7_000_000], "image[1]", "4194304 bytes"),
        ("a" * 1000 + ":", "image[0]", "not base64"),
    ],
)
def test_too_many_and_too_long_ones_are_refused_undecoded(image: Any, field: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=text) as caught:
        classified(image)
    assert caught.value.metadata["field"] == field


@pytest.mark.parametrize("scheme", ["http", " FILE", "view-source", "git+ssh", "a" * 32])
def test_a_scheme_is_that_of_a_url(scheme: str) -> None:
    with pytest.raises(UnsupportedFeature, match="fetches nothing"):
        classified(f"{scheme}://example.com/a.png")


@pytest.mark.parametrize("start", ["", DATA_URL])
@pytest.mark.parametrize("size", [LARGEST - 1, LARGEST])
def test_the_largest_file_is_taken(size: int, start: str) -> None:
    data = bytes(size)
    found = classified(start + b64encode(data).decode())
    bounds.check(found)
    assert list(found.images) == [data]


def test_a_byte_more_is_refused() -> None:
    with pytest.raises(InvalidInput, match="4194304"):
        bounds.check(classified(b64encode(bytes(LARGEST + 1)).decode()))
