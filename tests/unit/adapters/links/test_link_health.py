"""When a stream to a worker is over. The gRPC stream and the simulated one both ask this."""

from __future__ import annotations

from services.adapters.links.muxed_workers import ANSWER_S, CHECK_S, LinkHealth, SinkTable
from tests.unit.adapters.links.test_frame_dispatch import Deaf

SILENCE_S = 8.0
IDLE_S = 20.0


class Stream:
    """A stream opened at 100 s whose owner looks at it every second, while the worker beats as told."""

    def __init__(self, *, sequences: int) -> None:
        self.sinks = SinkTable()
        self.handles = [self.sinks.add(Deaf()) for _ in range(sequences)]
        self.now_s = 100.0
        self.health = LinkHealth(self.sinks, self.now_s, silence_s=SILENCE_S, idle_s=IDLE_S)

    def look(self, *, after_s: float = CHECK_S) -> str | None:
        checked_s, self.now_s = self.now_s, self.now_s + after_s
        return self.health.reason_to_end(self.now_s, checked_s=checked_s)

    def passes(self, seconds: float, *, beats: bool) -> str | None:
        """Return why it was over within the time, None if it went on."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            if beats:
                self.health.received(self.now_s)
            if (why := self.look()) is not None:
                return why
        return None


def test_a_worker_that_says_nothing_is_lost_after_the_silence() -> None:
    stream = Stream(sequences=1)
    assert stream.passes(SILENCE_S, beats=False) is None
    assert stream.look() == "the worker sent nothing for 8 s"


def test_a_worker_that_beats_stays_for_as_long_as_there_are_sequences() -> None:
    stream = Stream(sequences=1)
    assert stream.passes(10 * IDLE_S, beats=True) is None
    stream.sinks.drop(stream.handles[0])
    assert stream.passes(IDLE_S, beats=True) is None
    assert stream.passes(1.0, beats=True) == "the stream was idle"


def test_a_worker_that_beats_and_leaves_a_start_unanswered_does_not_hear() -> None:
    stream = Stream(sequences=2)
    assert stream.passes(3.0, beats=True) is None
    stream.sinks.sent(stream.handles[:1], stream.now_s)
    assert stream.passes(ANSWER_S, beats=True) is None
    assert stream.passes(1.0, beats=True) == "the worker sends heartbeats but answered no start for 6 s"


def test_an_owner_that_stood_still_blames_nobody() -> None:
    stream = Stream(sequences=1)
    stream.sinks.sent(stream.handles, stream.now_s)
    assert stream.look(after_s=60.0) is None, "what was said meanwhile waits unread"
    assert stream.passes(ANSWER_S, beats=False) is None, "the answer's time begins anew"
    stream.sinks.drop(stream.handles[0])
    assert stream.passes(SILENCE_S - ANSWER_S, beats=False) is None, "and so does the silence"
    assert stream.look() == "the worker sent nothing for 8 s"


def test_an_owner_that_is_a_little_late_did_not_stand_still() -> None:
    stream = Stream(sequences=1)
    for _ in range(4):
        assert stream.look(after_s=2 * CHECK_S) is None
    assert stream.look() == "the worker sent nothing for 8 s"
