"""How long a worker leaves a start unanswered, as the reading end of its stream sees it."""

from __future__ import annotations

from collections.abc import Sequence

from services.adapters.links.muxed_workers import SinkTable
from services.core.generation import NotAdmittedReason, SequenceEnd, TokenLogprobs
from services.ports.streams import StepFrame


class Deaf:
    """A sink that nobody listens to."""

    def on_accepted(self) -> None: ...

    def on_not_admitted(self, reason: NotAdmittedReason) -> None: ...

    def on_scores(self, offset: int, scores: Sequence[float]) -> None:
        raise AssertionError("nobody asked for scores")

    def on_tokens(
        self, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None: ...

    def on_finished(self, end: SequenceEnd) -> None: ...

    def on_lost(self, message: str) -> None: ...


def test_the_earliest_start_without_an_answer_counts() -> None:
    table = SinkTable()
    first, second, third = (table.add(Deaf()) for _ in range(3))
    table.sent([first, second], 10.0)
    table.sent([third], 12.0)
    assert table.unanswered_s(13.0) == 3.0
    frame = StepFrame()
    frame.accepted.append(first)
    frame.not_admitted.append((second, NotAdmittedReason.NO_ROOM))
    table.dispatch(frame)
    assert table.unanswered_s(13.0) == 1.0
    table.drop(third)
    assert table.unanswered_s(13.0) == 0.0


def test_what_was_dropped_before_it_was_sent_is_not_waited_for() -> None:
    table = SinkTable()
    handle = table.add(Deaf())
    table.drop(handle)
    table.sent([handle], 10.0)
    assert table.unanswered_s(60.0) == 0.0


def test_who_read_nothing_for_long_blames_nobody() -> None:
    table = SinkTable()
    table.sent([table.add(Deaf())], 10.0)
    table.excuse(40.0)
    assert table.unanswered_s(41.0) == 1.0


def test_nothing_is_due_once_all_are_lost() -> None:
    table = SinkTable()
    table.sent([table.add(Deaf())], 10.0)
    table.lose_all("gone")
    assert table.unanswered_s(60.0) == 0.0
