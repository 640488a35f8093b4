"""What every ``WorkerStream`` does, without a wire: as servicer and in-process client drive it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.core.errors import InvalidInput
from services.core.generation import (
    GenerationSpec,
    Grant,
    NotAdmittedReason,
    OutputLimits,
    Prompt,
    Sampling,
    StartSpec,
)
from services.ports.streams import StepFrame, WorkerStream
from services.runtime.clock import SystemClock
from services.worker import engine_protocol as wire
from services.worker.streams.host import SequenceHost
from services.worker.streams.sequences import SequenceTable
from tests.contract.test_worker_client import DIGEST, new_host


@dataclass
class Rig:
    host: SequenceHost
    table: SequenceTable
    sent: list[wire.Command]
    woken: list[int] = field(default_factory=list)
    numbers: int = 0

    def open(self) -> WorkerStream:
        return self.host.open(lambda: self.woken.append(1))

    def spec(self, *, credit: int = 100, blocks: int = 1, digest: str = DIGEST) -> StartSpec:
        self.numbers += 1
        grant = Grant("w1", "", 5, 3, self.numbers, blocks, 5.0, digest)
        generation = GenerationSpec("r1", "m", digest, 1, Prompt((1, 2, 3)), Sampling(1), OutputLimits(50))
        return StartSpec(generation, 0, "t1", grant, credit)

    def step(self, tokens: dict[int, int], finished: dict[int, str] | None = None) -> None:
        values: dict[str, Any] = {
            "step": 1,
            "step_s": 0.0,
            "handles": list(tokens),
            "tokens": list(tokens.values()),
            "finished": finished or {},
            "prefill_tokens": 0,
            "kv_blocks_used": 0,
            "running": 1,
            "waiting": 0,
        }
        self.table.on_stepped(wire.Stepped(**values))

    def engine_handles(self) -> list[int]:
        return [command.handle for command in self.sent if isinstance(command, wire.Submit)]


@pytest.fixture
def rig() -> Iterator[Rig]:
    sent: list[wire.Command] = []
    host, table = new_host(SystemClock(), sent)
    yield Rig(host, table, sent)
    host.check_integrity()


def drain(stream: WorkerStream) -> list[StepFrame]:
    frames = []
    while (frame := stream.take()) is not None:
        frames.append(frame)
        assert len(frames) < 100, "it never says None"
    return frames


def test_nothing_is_pending_at_first_and_nothing_twice(rig: Rig) -> None:
    stream = rig.open()
    assert stream.take() is None
    stream.start(7, rig.spec())
    assert rig.woken
    (frame,) = drain(stream)
    assert (frame.accepted, frame.not_admitted, frame.handles) == ([7], [], [])
    assert drain(stream) == []


def test_a_reader_that_lags_gets_one_frame_of_all(rig: Rig) -> None:
    stream = rig.open()
    stream.start(7, rig.spec())
    stream.start(8, rig.spec())
    one, two = rig.engine_handles()
    for token in (0x61, 0x62, 0x63):
        rig.step({one: token, two: token + 3})
    frames = drain(stream)
    tokens: dict[int, list[int]] = {}
    for frame in frames:
        start = 0
        for handle, offset, count in zip(frame.handles, frame.offsets, frame.counts, strict=True):
            assert offset == len(tokens.setdefault(handle, []))
            tokens[handle] += frame.ids[start : start + count]
            start += count
        assert start == len(frame.ids)
    assert tokens == {7: [0x61, 0x62, 0x63], 8: [0x64, 0x65, 0x66]}
    assert len(frames) == 1


def test_the_end_comes_once_and_last(rig: Rig) -> None:
    stream = rig.open()
    stream.start(7, rig.spec())
    (handle,) = rig.engine_handles()
    rig.step({handle: 0x61}, {handle: "length"})
    frames = drain(stream)
    assert [handle for frame in frames for handle, _ in frame.finished] == [7]
    assert frames[-1].finished
    stream.cancel([7])
    stream.credit([7], [5])
    assert drain(stream) == []
    assert rig.table.kv.blocks == 0


def test_a_handle_in_use_is_refused_and_one_that_ended_is_free(rig: Rig) -> None:
    stream = rig.open()
    stream.start(7, rig.spec())
    with pytest.raises(InvalidInput):
        stream.start(7, rig.spec())
    (handle,) = rig.engine_handles()[:1]
    rig.step({handle: 0x61}, {handle: "length"})
    drain(stream)
    stream.start(7, rig.spec())
    assert drain(stream)[0].accepted == [7]
    stream.close()


@pytest.mark.parametrize(
    "change", [{"digest": "sha256:" + "d" * 64}, {"blocks": 65}], ids=["unknown version", "no room"]
)
def test_what_is_not_admitted_is_said_in_a_frame(rig: Rig, change: dict[str, Any]) -> None:
    stream = rig.open()
    stream.start(7, rig.spec(**change))
    (frame,) = drain(stream)
    assert frame.accepted == []
    ((handle, reason),) = frame.not_admitted
    assert handle == 7
    assert isinstance(reason, NotAdmittedReason)
    assert rig.table.kv.blocks == 0


def test_a_cancelled_sequence_is_named_no_more(rig: Rig) -> None:
    stream = rig.open()
    stream.start(7, rig.spec())
    stream.start(8, rig.spec())
    one, two = rig.engine_handles()
    drain(stream)
    stream.cancel([7, 99])
    rig.step({one: 0x61, two: 0x62}, {one: "length"})
    frames = drain(stream)
    assert {handle for frame in frames for handle in frame.handles} == {8}
    assert not any(frame.finished for frame in frames)
    stream.close()


def test_two_streams_use_the_same_numbers_for_different_sequences(rig: Rig) -> None:
    first, second = rig.open(), rig.open()
    first.start(1, rig.spec())
    second.start(1, rig.spec())
    one, two = rig.engine_handles()
    drain(first), drain(second)
    rig.step({two: 0x62})
    assert drain(first) == []
    assert [frame.ids for frame in drain(second)] == [[0x62]]
    first.close()
    rig.step({two: 0x63}, {two: "length"})
    assert drain(second)[-1].finished
    assert one != two


def test_closing_cancels_everything_and_can_be_repeated(rig: Rig) -> None:
    stream = rig.open()
    for number in range(3):
        stream.start(number, rig.spec())
    stream.close()
    stream.close()
    cancelled = {handle for each in rig.sent if isinstance(each, wire.Cancel) for handle in each.handles}
    assert cancelled == set(rig.engine_handles())
    rig.step({}, dict.fromkeys(rig.engine_handles(), "cancelled"))
    assert rig.table.kv.blocks == 0
