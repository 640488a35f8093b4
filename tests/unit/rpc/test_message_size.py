"""Limits come from the bounds of the protos; what passes them decodes cheaply, and nothing valid is over."""

from __future__ import annotations

from contextlib import suppress

import pytest
from google.protobuf.descriptor import MethodDescriptor
from hypothesis import given
from hypothesis import strategies as st

from fairway.v1 import controlplane_pb2, inference_pb2, registry_pb2, scheduler_pb2, worker_pb2
from services.core.errors import InvalidInput, OverQuota
from services.rpc import message_size
from services.rpc.channel import MAX_MESSAGE_BYTES
from services.rpc.message_size import MessageLimits, check_raw, limits_of

MODULES = (inference_pb2, scheduler_pb2, worker_pb2, registry_pb2, controlplane_pb2)


def method(module: object, service: str, name: str) -> MethodDescriptor:
    found: MethodDescriptor = module.DESCRIPTOR.services_by_name[service].methods_by_name[name]  # type: ignore[attr-defined]
    return found


def limits(name: str) -> MessageLimits:
    return limits_of(method(inference_pb2, "InferenceService", name))


def test_most_methods_take_little_and_none_more_than_the_transport() -> None:
    found = [
        limits_of(each)
        for module in MODULES
        for service in module.DESCRIPTOR.services_by_name.values()
        for each in service.methods
    ]
    assert all(each.max_bytes <= MAX_MESSAGE_BYTES for each in found)
    assert sum(each.max_bytes == 64 * 1024 for each in found) > 0.7 * len(found)


def test_a_chunk_fits_and_twice_a_chunk_does_not() -> None:
    upload = limits_of(method(registry_pb2, "RegistryService", "UploadChunk"))
    request = registry_pb2.UploadChunkRequest
    check_raw(request(data=b"x" * 1048576).SerializeToString(), upload)
    with pytest.raises(OverQuota):
        check_raw(request(data=b"x" * 2097152).SerializeToString(), upload)


def test_the_largest_valid_request_passes() -> None:
    chat = inference_pb2.Chat(
        messages=[inference_pb2.ChatMessage(role="user", content="x" * 500, name="n") for _ in range(2048)]
    )
    count = inference_pb2.CountTokensRequest(model="m", chat=chat)
    check_raw(count.SerializeToString(), limits("CountTokens"))
    ids = inference_pb2.Generation(model="m", token_ids=inference_pb2.TokenIds(ids=range(1_000_000)))
    check_raw(inference_pb2.CompleteRequest(generation=ids).SerializeToString(), limits("Complete"))


@pytest.mark.parametrize(
    "raw",
    [
        b"\x12\x00" * 100_000,
        b"\x80\x7d\x00" * 100_000,  # a field that nobody has, as a number
        b"\xfa\x7d\x00" * 100_000,
        b"\x0a\x80\xf1\x04" + b"\x1a\x00" * 40_000,  # inside one submessage
    ],
)
def test_many_fields_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidInput):
        check_raw(raw, limits("Complete"))


@given(st.binary(min_size=1, max_size=60), st.integers(1, 4000))
def test_whatever_it_is_given_it_ends_with_an_answer(piece: bytes, times: int) -> None:
    with suppress(InvalidInput):
        check_raw(piece * times + b"\0" * 40_000, limits("Complete"))


@given(st.lists(st.tuples(st.text(max_size=40), st.text(max_size=20)), max_size=30))
def test_counting_agrees_with_the_decoder(said: list[tuple[str, str]]) -> None:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(content=c, name=n) for c, n in said])
    request = inference_pb2.CountTokensRequest(model="m", chat=chat)
    tags = 2 + sum(1 + bool(content) + bool(name) for content, name in said)
    raw = request.SerializeToString()
    message_size._count_fields(raw, inference_pb2.CountTokensRequest.DESCRIPTOR, tags)
    with pytest.raises(InvalidInput, match="more than"):
        message_size._count_fields(raw, inference_pb2.CountTokensRequest.DESCRIPTOR, tags - 1)
