"""A mirror pairs every field of a value, refuses a message that lacks one, and carries what clients send."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from fairway.mirror import Mirror, Pair
from fairway.v1 import common_pb2
from services.controlplane.diagnosis import store as samples
from services.controlplane.objectives.policy.gates import MetricEvidence
from services.controlplane.rollouts import convert as rollouts
from services.controlplane.rollouts.fit import ArmFit
from services.controlplane.rollouts.records import RolloutEvent
from services.controlplane.usage import codec as ledger
from services.core.decisions import ClassWait, QueueShare, RankedWorker, WorkerPool
from services.core.errors import InvalidInput
from services.core.estimates.finished import FinishedRequest
from services.core.generation import FallbackGrant, GenerationSpec, Sampling, StageClock, StartSpec
from services.core.records import ApiKey, Deployment, LatencyTarget, Worker
from services.rpc.convert import controlplane, inference, registry, rows, scheduler, slis, usage, worker
from tests.support.drawn_messages import messages


@dataclass(frozen=True)
class Seen:
    sampled: float
    ids: tuple[int, ...] = ()
    token: str = ""


PAIRS: Final[dict[str, Any]] = {"ids": Pair("top_ids"), "token": Pair("token", str.upper, str.lower)}
_MODULES: Final = (
    *(controlplane, inference, ledger, registry, samples),
    *(rollouts, rows, scheduler, slis, usage, worker),
)
_WRITTEN: Final = (
    *(ArmFit, MetricEvidence, RolloutEvent),
    *(ClassWait, QueueShare, RankedWorker, WorkerPool),
)
MIRRORS: Final = {
    f"{module.__name__.removeprefix('services.')}.{name}": found
    for module in _MODULES
    for name, found in vars(module).items()
    if isinstance(found, Mirror) and found.value not in _WRITTEN
}
# What callers give of values whose messages lack it.
GIVEN: Final[dict[type, dict[str, Any]]] = {
    ApiKey: {"secret_hash": ""},
    Deployment: {"version_digest": ""},
    FallbackGrant: {"worker_id": "", "address": ""},
    FinishedRequest: {"clock": StageClock(0)},
    GenerationSpec: {"model": "", "version_digest": "", "sampling": Sampling(0)},
    StartSpec: {"generation": None, "grant": None},
    Worker: {"worker_id": ""},
}


def _sent(mirror: Mirror[Any, Any], message: Message) -> Message:
    """Return the message of the value of a message, off the wire."""
    found = mirror.to_proto(mirror.from_proto(message, **GIVEN.get(mirror.value, {})))
    return mirror.message.FromString(found.SerializeToString())  # type: ignore[no-any-return]


def _carried(mirror: Mirror[Any, Any]) -> set[str]:
    """Return the fields of the message that are written and read."""
    unread = {pair.name for pair in mirror.pairs.values() if isinstance(pair, Pair) and pair.unread}
    return {to for to, _ in mirror.writes} - unread


# Where a text has to be one of a few names, most of what is drawn is refused.
UNHURRIED = (HealthCheck.too_slow, HealthCheck.filter_too_much)


@pytest.mark.parametrize("mirror", MIRRORS.values(), ids=MIRRORS.keys())
@settings(deadline=None, max_examples=25, suppress_health_check=UNHURRIED)
@given(data=st.data())
def test_every_field_of_every_message_survives(mirror: Mirror[Any, Any], data: st.DataObject) -> None:
    message = data.draw(messages(mirror.message))
    try:
        sent = _sent(mirror, message)
    except (InvalidInput, KeyError):  # a number that only clients read, or a name that no tool may have
        assume(False)
    assert _sent(mirror, sent) == sent
    carried = _carried(mirror)
    for each, content in message.ListFields():
        if each.name in carried and each.type != FieldDescriptor.TYPE_MESSAGE:
            assert getattr(sent, each.name) == content, each.name


def test_fields_pair_by_name_or_as_stated_both_ways() -> None:
    mirror = Mirror(Seen, common_pb2.TokenLogprobs, PAIRS)
    message = mirror.to_proto(Seen(-0.5, (3, 4), "a"))
    assert (message.sampled, list(message.top_ids), message.token) == (-0.5, [3, 4], "A")
    assert mirror.from_proto(message) == Seen(-0.5, (3, 4), "a")


def test_a_message_takes_more_fields_than_the_value_has() -> None:
    message = Mirror(Seen, common_pb2.TokenLogprobs, PAIRS).to_proto(Seen(1.0), top_tokens=["x"])
    assert list(message.top_tokens) == ["x"]


def test_values_of_a_tuple_are_written_and_read_in_order() -> None:
    pair = Mirror(Seen, common_pb2.TokenLogprobs, PAIRS).each("entries")
    assert pair.write is not None
    assert pair.read is not None
    values = (Seen(1.0, (1, 2), "a"), Seen(2.0))
    assert pair.name == "entries"
    assert pair.read(pair.write(values)) == values


def test_a_field_without_a_counterpart_fails_at_construction() -> None:
    with pytest.raises(TypeError, match="Usage has no sampled, ids, token of Seen"):
        Mirror(Seen, common_pb2.Usage)


def test_a_rule_for_a_field_that_the_value_lacks_fails_at_construction() -> None:
    with pytest.raises(TypeError, match="Seen has no rank, top"):
        Mirror(Seen, common_pb2.TokenLogprobs, {**PAIRS, "top": Pair("top_ids")}, apart=("rank",))


def test_what_is_apart_is_given_by_the_caller_or_has_its_default() -> None:
    mirror = Mirror(Seen, common_pb2.TokenLogprobs, {"ids": Pair("top_ids")}, apart=("sampled", "token"))
    message = mirror.to_proto(Seen(2.0, (3,), "a"))
    assert message == common_pb2.TokenLogprobs(top_ids=[3])
    assert mirror.from_proto(message, sampled=1.0) == Seen(1.0, (3,), "")


@dataclass(frozen=True)
class Around:
    seen: Seen
    rank: int


def test_a_mirror_of_the_same_message_lays_its_fields_beside_the_others() -> None:
    seen = Mirror(Seen, common_pb2.TokenLogprobs, PAIRS)
    mirror = Mirror(Around, common_pb2.TokenLogprobs, {"seen": seen})
    message = mirror.to_proto(Around(Seen(1.5, (2,), "a"), 3))
    assert message == common_pb2.TokenLogprobs(sampled=1.5, top_ids=[2], token="A", rank=3)
    assert mirror.from_proto(message) == Around(Seen(1.5, (2,), "a"), 3)
    assert mirror.as_fields(Around(Seen(1.5), 3)) == {"sampled": 1.5, "top_ids": (), "token": "", "rank": 3}


@dataclass(frozen=True)
class Defaults:
    temperature: float = 0.5
    seed: int | None = None
    constraint: LatencyTarget | None = None
    top_k: int = 40
    logit_bias: dict[int, float] = field(default_factory=dict)


def test_an_absent_field_is_the_default_and_the_default_of_a_message_is_absent() -> None:
    pairs: dict[str, Any] = {"constraint": Pair("constraint", unset=True), "top_k": Pair("top_k", zero=True)}
    mirror = Mirror(Defaults, common_pb2.Sampling, pairs)
    assert mirror.from_proto(common_pb2.Sampling()) == Defaults()
    assert mirror.from_proto(common_pb2.Sampling(temperature=0, top_k=0)) == Defaults(temperature=0.0)
    message = mirror.to_proto(Defaults())
    assert (message.HasField("temperature"), message.HasField("constraint")) == (True, False)
    assert mirror.from_proto(common_pb2.Sampling(logit_bias={1: 2.0})).logit_bias == {1: 2.0}


def test_what_is_unread_is_written_alone() -> None:
    mirror = Mirror(Seen, common_pb2.TokenLogprobs, {**PAIRS, "token": Pair("token", unread=True)})
    message = mirror.to_proto(Seen(1.0, (), "a"))
    assert message.token == "a"
    assert mirror.from_proto(message) == Seen(1.0)
