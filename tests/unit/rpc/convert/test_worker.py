"""What is sent is what arrives; what does not add up is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairway.v1 import common_pb2, worker_pb2
from services.core.errors import InvalidInput
from services.core.generation import (
    Constraint,
    ConstraintKind,
    FallbackGrant,
    FinishReason,
    GenerationSpec,
    Grant,
    NotAdmittedReason,
    OutputLimits,
    Prompt,
    Sampling,
    SequenceEnd,
    StartSpec,
    TokenLogprobs,
)
from services.core.records import Priority
from services.core.rollouts.routes import Withdrawal
from services.ports.streams import StepFrame
from services.rpc.convert.worker import (
    frame_from_proto,
    frame_to_proto,
    start_from_proto,
    start_to_proto,
)

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
float32 = st.floats(0, 2, width=32)
ids = st.lists(uint32, max_size=5)
short = st.text(st.characters(codec="utf-8"), max_size=8)

samplings = st.builds(
    Sampling,
    seed=uint64,
    temperature=float32,
    top_p=float32,
    top_k=uint32,
    min_p=float32,
    presence_penalty=float32,
    frequency_penalty=float32,
    repetition_penalty=float32,
    logit_bias=st.dictionaries(uint32, float32, max_size=3).map(lambda bias: tuple(sorted(bias.items()))),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    constraint=st.none()
    | st.builds(
        Constraint,
        st.sampled_from([kind for kind in ConstraintKind if kind is not ConstraintKind.CHOICE]),
        short.filter(bool),
        st.booleans(),
    )
    | st.lists(short, min_size=1, max_size=3).map(
        lambda texts: Constraint(ConstraintKind.CHOICE, json.dumps(texts, ensure_ascii=False))
    ),
)
generations = st.builds(
    GenerationSpec,
    request_id=short,
    model=st.just(""),
    version_digest=st.just("sha256:x"),
    route_revision=uint64,
    prompt=st.builds(Prompt, ids, st.lists(uint64, max_size=3).map(tuple), uint64),
    sampling=samplings,
    limits=st.builds(
        OutputLimits,
        max_tokens=uint32,
        min_tokens=uint32,
        stop=st.lists(short, max_size=3).map(tuple),
        stop_token_ids=ids.map(tuple),
        ignore_eos=st.booleans(),
        spelled_ids=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
    ),
    priority=st.sampled_from(Priority),
    continues_prompt=st.booleans(),
)
grants = st.builds(
    Grant,
    worker_id=short,
    address=short,
    incarnation=uint64,
    epoch=uint64,
    sequence=uint64,
    kv_blocks=uint32,
    ttl_s=st.integers(0, 600_000).map(lambda ms: ms / 1000),
    version_digest=st.just("sha256:x"),
    route_revision=uint64,
)
starts = st.builds(
    StartSpec,
    generation=generations,
    choice=st.integers(0, 15),
    tenant_id=short,
    grant=grants,
    initial_credit_tokens=uint32,
    produced_ids=ids.map(tuple),
    scored_tokens=uint32,
    delivered_chars=uint64,
    time_left_s=st.none() | st.integers(0, 86_400_000).map(lambda ms: ms / 1000),
    traceparent=short,
    probe=st.booleans(),
)
ends = st.builds(
    SequenceEnd,
    reason=st.sampled_from(FinishReason),
    stop=short,
    output_tokens=uint32,
    cached_tokens=uint32,
    engine_wait_us=uint64,
    prefill_us=uint64,
    error_reason=short,
    error_message=short,
    device_us=uint64,
)
logprobs = st.builds(
    TokenLogprobs,
    sampled=float32,
    top_ids=ids.map(tuple),
    top_logprobs=st.lists(float32, max_size=3).map(tuple),
    top_tokens=st.lists(short, max_size=3).map(tuple),
    token=short,
    text=short,
    rank=uint32,
)


@st.composite
def frames(draw: st.DrawFn) -> StepFrame:
    frame = StepFrame(
        accepted=draw(st.lists(uint64, max_size=3)),
        withdrawn=draw(st.lists(st.builds(Withdrawal, short, uint64, short), max_size=2)),
        not_admitted=draw(st.lists(st.tuples(uint64, st.sampled_from(NotAdmittedReason)), max_size=3)),
        finished=draw(st.lists(st.tuples(uint64, ends), max_size=3)),
    )
    for entry in range(draw(st.integers(0, 4))):
        tokens = draw(ids)
        frame.handles.append(draw(uint64))
        frame.offsets.append(draw(uint32))
        frame.counts.append(len(tokens))
        frame.ids += tokens
        frame.texts.append(draw(short))
        if draw(st.booleans()):
            frame.logprobs[entry] = draw(st.lists(logprobs, max_size=2))
    if draw(st.booleans()):
        frame.probe_scores = [draw(float32) for _ in frame.ids]
    return frame


@settings(deadline=None)
@given(uint64, starts)
def test_a_start_arrives_as_it_was_sent(handle: int, spec: StartSpec) -> None:
    message = worker_pb2.StartSequence.FromString(start_to_proto(handle, spec).SerializeToString())
    assert message.handle == handle
    assert start_from_proto(message) == spec


@settings(deadline=None)
@given(frames())
def test_a_frame_arrives_as_it_was_sent(frame: StepFrame) -> None:
    message = worker_pb2.ExecuteResponse.FromString(frame_to_proto(frame).SerializeToString())
    assert frame_from_proto(message) == frame


def test_a_start_needs_a_grant() -> None:
    with pytest.raises(InvalidInput):
        start_from_proto(worker_pb2.StartSequence(handle=1))


@settings(deadline=None)
@given(starts, uint64, uint64, uint32)
def test_a_start_without_a_leader_arrives_as_it_was_sent(
    spec: StartSpec, incarnation: int, epoch: int, blocks: int
) -> None:
    digest = spec.generation.version_digest
    grant = FallbackGrant("w1", "a:1", incarnation, epoch, blocks, digest)
    sent = start_to_proto(3, replace(spec, grant=grant))
    message = worker_pb2.StartSequence.FromString(sent.SerializeToString())
    found = start_from_proto(message)
    assert found == replace(spec, grant=replace(grant, worker_id="", address=""))


@pytest.mark.parametrize(
    "tokens",
    [
        {"handles": [1], "offsets": [0], "counts": [1], "ids": [7, 8], "texts": [""]},
        {"handles": [1], "offsets": [0], "counts": [2], "ids": [7], "texts": [""]},
        {"handles": [1], "offsets": [], "counts": [1], "ids": [7], "texts": [""]},
        {"handles": [1], "offsets": [0], "counts": [1], "ids": [7], "texts": []},
        {"handles": [], "offsets": [], "counts": [], "ids": [7], "texts": []},
        {"handles": [1], "offsets": [0], "counts": [2], "ids": [7, 8], "texts": [""], "probe_scores": [0.5]},
    ],
)
def test_columns_that_do_not_fit_are_refused(tokens: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        frame_from_proto(worker_pb2.ExecuteResponse(tokens=common_pb2.TokenFrame(**tokens)))


def test_unknown_reasons_are_refused() -> None:
    with pytest.raises(InvalidInput):
        frame_from_proto(worker_pb2.ExecuteResponse(finished=[worker_pb2.SequenceFinished(handle=1)]))
    with pytest.raises(InvalidInput):
        frame_from_proto(worker_pb2.ExecuteResponse(not_admitted=[worker_pb2.NotAdmitted(handle=1)]))
