"""A mirror pairs every field of a value, and refuses a message that lacks one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fairway.v1 import common_pb2
from services.rpc.convert.mirror import Mirror, Pair


@dataclass(frozen=True)
class Seen:
    sampled: float
    ids: tuple[int, ...] = ()
    token: str = ""


PAIRS = {"ids": Pair("top_ids"), "token": Pair("token", str.upper, str.lower)}


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
