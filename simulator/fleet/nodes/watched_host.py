"""Observed streams and tally of a worker: each sequence that it admits, and what it charges for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.core.fixed_cost.rows import RowSpec
from services.core.fleet import SequenceUsage
from services.core.generation import NotAdmittedReason, StartSpec
from services.ports.streams.worker_stream import StepFrame, WorkerStream
from services.worker.streams.charges import Key, Tally
from services.worker.streams.host import SequenceHost
from simulator.fleet.grant_watch import ComputedTokens, GrantWatch

Started = Callable[[StartSpec], None]


class WatchedHost:
    """Implements ``ports.worker_stream.WorkerStreams`` over a host; ``started`` is called inside of it."""

    def __init__(self, host: SequenceHost, started: Started) -> None:
        self._host = host
        self._started = started

    def open(self, wake: Callable[[], None]) -> WorkerStream:
        return _WatchedStream(self._host, wake, self._started)


class _WatchedStream:
    def __init__(self, host: SequenceHost, wake: Callable[[], None], started: Started) -> None:
        self._host = host
        self._stream = host.open(wake)
        self._started = started

    def start(self, handle: int, spec: StartSpec) -> None:
        before = self._host.running
        self._stream.start(handle, spec)
        if self._host.running > before:
            self._started(spec)

    def start_row(self, handle: int, spec: RowSpec) -> None:
        self._stream.start_row(handle, spec)

    def refuse(self, handle: int, reason: NotAdmittedReason) -> None:
        self._stream.refuse(handle, reason)

    def credit(self, handles: Sequence[int], tokens: Sequence[int]) -> None:
        self._stream.credit(handles, tokens)

    def cancel(self, handles: Sequence[int]) -> None:
        self._stream.cancel(handles)

    @property
    def only_accepted(self) -> bool:
        return self._stream.only_accepted

    def take(self) -> StepFrame | None:
        return self._stream.take()

    def close(self) -> None:
        self._stream.close()


class WatchedTally(Tally):
    """The production tally of one worker; it also reports to the watch."""

    def __init__(self, worker_id: str, watch: GrantWatch) -> None:
        super().__init__()
        self._worker_id = worker_id
        self._watch = watch

    def add_prefill(self, key: Key, tokens: int, cached_tokens: int) -> None:
        super().add_prefill(key, tokens, cached_tokens)
        self._watch.produced(self._worker_id, key[0], key[2], ComputedTokens(tokens, cached_tokens))

    def add_output(self, key: Key, tokens: int) -> None:
        super().add_output(key, tokens)
        if tokens:
            self._watch.produced(self._worker_id, key[0], key[2], ComputedTokens(output=tokens))

    def add_ended(self, usage: SequenceUsage) -> None:
        super().add_ended(usage)
        self._watch.ended(self._worker_id, usage)
