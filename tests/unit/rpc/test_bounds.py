"""Bounds of the protos are enforced, each kind of them."""

import hashlib
import json
import math
import time
from collections.abc import Iterable

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from fairway.v1 import inference_pb2, options_pb2, scheduler_pb2
from services.core.errors import InvalidInput
from services.rpc import bounds
from tests.support.rpc_services import rpc_methods

REQUESTS = [method.input_type for method in rpc_methods()]


def unbounded_fields(roots: Iterable[Descriptor]) -> list[str]:
    """Return the full names of the fields reachable from ``roots`` that lack the bounds their type needs."""
    found: list[str] = []
    seen: set[str] = set()
    queue = list(roots)
    while queue:
        descriptor = queue.pop()
        if descriptor.full_name in seen or descriptor.full_name in bounds._WELL_KNOWN:
            continue
        seen.add(descriptor.full_name)
        for field in descriptor.fields:
            if not _is_bounded(field):
                found.append(field.full_name)
            element = bounds._value_field(field)
            if element.message_type is not None:
                queue.append(element.message_type)
    return sorted(found)


def _is_bounded(field: FieldDescriptor) -> bool:
    given, element = bounds._bounds(field), bounds._value_field(field)
    if field.is_repeated and not given.max_items:
        return False
    if element.cpp_type in bounds._STRINGS:
        return given.max_bytes > 0
    if element.cpp_type in (*bounds.INTEGERS, *bounds.REALS):
        return given.any or (given.HasField("min") and given.HasField("max"))
    if element.message_type is not None and element.message_type.full_name == bounds.DURATION:
        return given.HasField("max")
    return True


def generate(**values: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        generation=inference_pb2.Generation(**{"model": "m", "prompt": "hi", **values})  # type: ignore[arg-type]
    )


def rejected_field(message: inference_pb2.GenerateRequest) -> str:
    with pytest.raises(InvalidInput) as caught:
        bounds.check(message)
    return caught.value.metadata["field"]


def test_every_request_field_has_bounds() -> None:
    assert unbounded_fields(REQUESTS) == []


def test_a_field_without_bounds_is_found() -> None:
    # Responses are ours and carry no bounds: the finder must name their fields.
    found = unbounded_fields([inference_pb2.Accepted.DESCRIPTOR])
    assert "fairway.v1.Accepted.request_id" in found
    assert "fairway.v1.Accepted.seed" in found


def test_a_plain_request_passes() -> None:
    bounds.check(generate())


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"model": ""}, "generation.model"),
        ({"model": "m" * 129}, "generation.model"),
        ({"choices": 10**9}, "generation.choices"),
        ({"choices": 0}, "generation.choices"),
        ({"max_output_tokens": 2**20 + 1}, "generation.max_output_tokens"),
        ({"prompt_logprobs": 21}, "generation.prompt_logprobs"),
        ({"min_output_tokens": 2**32 - 1}, "generation.min_output_tokens"),
        ({"stop": ["x"] * 17}, "generation.stop"),
        ({"stop": ["x", "y" * 257]}, "generation.stop[1]"),
        ({"logprobs": 21}, "generation.logprobs"),
        ({"priority": 99}, "generation.priority"),
        ({"sampling": {"temperature": math.nan}}, "generation.sampling.temperature"),
        ({"sampling": {"temperature": math.inf}}, "generation.sampling.temperature"),
        ({"sampling": {"top_p": 1.5}}, "generation.sampling.top_p"),
        ({"sampling": {"repetition_penalty": 0.0}}, "generation.sampling.repetition_penalty"),
        ({"sampling": {"logit_bias": {7: 101.0}}}, "generation.sampling.logit_bias[7]"),
        ({"sampling": {"logit_bias": {7: math.nan}}}, "generation.sampling.logit_bias[7]"),
        ({"chat": {"messages": [{"role": "root"}]}}, "generation.chat.messages[0].role"),
        ({"chat": {"messages": [{"role": "user"}] * 2049}}, "generation.chat.messages"),
        ({"timeout": {"seconds": -1}}, "generation.timeout"),
        ({"timeout": {"seconds": 10**11}}, "generation.timeout"),
    ],
)
def test_a_value_out_of_bounds_is_named(values: dict[str, object], field: str) -> None:
    assert rejected_field(generate(**values)) == field


def test_bytes_are_counted_not_characters() -> None:
    assert rejected_field(generate(model="é" * 65)) == "generation.model"
    bounds.check(generate(model="é" * 64))


@pytest.mark.parametrize("value", ["s" * 129, "é" * 65, json.dumps({"device": "0" * 200}), "x" * 10**6])
def test_a_longer_name_of_a_clients_is_hashed(value: str) -> None:
    digest = hashlib.sha256(value.encode()).hexdigest()
    call = inference_pb2.ToolCall(id=value, name="f")
    turn = inference_pb2.ChatMessage(role="tool", tool_call_id=value, name=value, tool_calls=[call])
    chat = inference_pb2.Chat(messages=[turn])
    asked = inference_pb2.Generation(model="m", chat=chat, user=value, session_key=value)
    bounds.check(asked)
    turn = asked.chat.messages[0]
    assert {asked.user, asked.session_key, turn.name, turn.tool_call_id, turn.tool_calls[0].id} == {digest}
    for rows in (
        inference_pb2.EmbedRequest(model="m", inputs=["x"], user=value, session_key=value),
        inference_pb2.RerankRequest(model="m", query="q", documents=["x"], user=value, session_key=value),
    ):
        bounds.check(rows)
        assert (rows.user, rows.session_key) == (digest, digest)
    kept = generate(user="s" * 128)
    bounds.check(kept)
    assert kept.generation.user == "s" * 128


def test_the_hash_of_a_name_is_within_its_bound() -> None:
    for descriptor in (inference_pb2.Generation, inference_pb2.ChatMessage, inference_pb2.ToolCall):
        for field in descriptor.DESCRIPTOR.fields:
            found = field.GetOptions().Extensions[options_pb2.bounds]
            assert not found.hashed or found.max_bytes >= 64, field.full_name


def test_a_missing_message_is_required() -> None:
    assert rejected_field(inference_pb2.GenerateRequest()) == "generation"


def test_a_million_token_ids_are_checked_without_a_loop() -> None:
    message = generate(token_ids={"ids": list(range(1_000_000))})
    took_s = []
    for _ in range(5):
        started = time.perf_counter()
        bounds.check(message)
        took_s.append(time.perf_counter() - started)
    assert min(took_s) < 0.05


def test_a_bound_is_inside_the_range_in_four_bytes_too() -> None:
    for value in (0.01, 10.0):
        bounds.check(generate(sampling={"repetition_penalty": value}))
    for value in (0.0099, 10.001):
        rejected = rejected_field(generate(sampling={"repetition_penalty": value}))
        assert rejected == "generation.sampling.repetition_penalty"


def test_entries_can_be_left_to_their_reader() -> None:
    good = scheduler_pb2.PlaceRequest(
        request_id="r", tenant_id="t", model="m", version_digest="d", max_output_tokens=1, ticket=b"t"
    )
    bad = scheduler_pb2.PlaceRequest(request_id="r" * 65)
    message = scheduler_pb2.ConnectRequest(places=[good, bad])
    bounds.check_but(message, "places")
    bounds.check(good)
    with pytest.raises(InvalidInput):
        bounds.check(message)
    message.cancel.placement_ids.extend(range(70_000))
    with pytest.raises(InvalidInput) as caught:
        bounds.check_but(message, "places")
    assert caught.value.metadata["field"] == "cancel.placement_ids"
    crowd = scheduler_pb2.ConnectRequest(places=[good] * 65_537)
    with pytest.raises(InvalidInput):
        bounds.check_but(crowd, "places")
