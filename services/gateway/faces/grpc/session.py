"""The muxed session: many generations on one stream; the tokens of one step of all share a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from msgspec.structs import replace

from fairway.formats.answers import OutputPart
from fairway.v1 import common_pb2, inference_pb2
from services.core.errors import ConcurrencyExceeded, FairwayError, InvalidInput
from services.core.generation import Principal, TokenLogprobs
from services.gateway.events import Accepted, Finished, Handle, Received
from services.gateway.faces.grpc.messages import accepted_message, finished_message
from services.gateway.requests.parts import OutputSplit
from services.gateway.service import GatewayService
from services.rpc import bounds
from services.rpc.convert.inference import parts_to_proto, token_logprobs
from services.rpc.status import to_proto

CHOICE_BITS: Final = 4
MAX_STREAMS: Final = 1024
# Bounds of a client that does not read: events, beyond which its messages are not read either, and tokens of
# one message. A token with log probabilities counts as this many tokens.
MAX_UNREAD: Final = 4096
MAX_MESSAGE_TOKENS: Final = 32_768
LOGPROBS_WEIGHT: Final = 32


class SessionStream:
    """The sink of one generation of a session: appends to the session's next message."""

    __slots__ = ("_base", "_parts", "_session", "_split", "_stream_id", "manual", "request")

    def __init__(self, session: MuxedSession, stream_id: int, *, manual: bool, parts: bool) -> None:
        self._session = session
        self._stream_id = stream_id
        self._base = stream_id << CHOICE_BITS
        self.manual = manual
        self._parts = parts
        self.request: Handle | None = None
        self._split: OutputSplit | None = None

    def on_accepted(self, accepted: Accepted) -> None:
        self._split = OutputSplit(accepted) if self._parts else None
        self._session.accepted.append(
            inference_pb2.SessionAccepted(stream_id=self._stream_id, accepted=accepted_message(accepted))
        )
        self._session.wake()

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        parts = self._split.feed(choice, ids, text) if self._split is not None else ()
        self._session.add_tokens(self._base + choice, offset, ids, text, logprobs, parts)

    def on_finished(self, finished: Finished) -> None:
        if self._split is not None:
            finished = self._split.finished(finished)
        self._end(
            inference_pb2.SessionFinished(stream_id=self._stream_id, finished=finished_message(finished))
        )

    def on_failed(self, error: FairwayError) -> None:
        self._end(inference_pb2.SessionFinished(stream_id=self._stream_id, error=to_proto(error)))

    def _end(self, message: inference_pb2.SessionFinished) -> None:
        self._session.finished.append(message)
        self._session.streams.pop(self._stream_id, None)
        self._session.wake()


class MuxedSession:
    """State of one Session RPC: its streams and the next message.

    Token columns are bounded by the gateway's window of each choice: credit is granted when tokens were
    passed to the transport. So a reader that stops also stops its streams, for every size of its own window.
    """

    def __init__(
        self, service: GatewayService, principal: Principal, received: Callable[[], Received]
    ) -> None:
        self._service = service
        self._principal = principal
        self._received = received
        self.streams: dict[int, SessionStream] = {}
        self.accepted: list[inference_pb2.SessionAccepted] = []
        self.finished: list[inference_pb2.SessionFinished] = []
        self._handles: list[int] = []
        self._offsets: list[int] = []
        self._ids: list[Sequence[int]] = []
        self._texts: list[str] = []
        self._logprobs: list[common_pb2.FrameLogprobs] = []
        self._parts: list[common_pb2.FrameParts] = []
        self._weight = 0
        self._half_closed = False
        self._failure: Exception | None = None
        self._has_output = asyncio.Event()
        self._read = asyncio.Event()

    # --- requests of the client --------------------------------------------------------------------

    def handle(self, message: inference_pb2.SessionRequest, time_left_s: float | None) -> None:
        """Apply one request message. A generation's own errors end that generation, not the session.

        Raises InvalidInput for a message that is invalid on this stream.
        """
        kind = message.WhichOneof("kind")
        if kind == "start":
            self._start(message.start, time_left_s)
            return
        bounds.check(message)
        if kind == "credit":
            if len(message.credit.stream_ids) != len(message.credit.tokens):
                raise InvalidInput("credit has not one token count per stream id", field="credit.tokens")
            for stream_id, tokens in zip(message.credit.stream_ids, message.credit.tokens, strict=True):
                self._credit(stream_id, tokens)
        elif kind == "cancel":
            for stream_id in message.cancel.stream_ids:
                stream = self.streams.get(stream_id)
                if stream is not None and stream.request is not None:
                    stream.request.withdraw()
        else:
            raise InvalidInput("the message is none of start, credit and cancel", field="kind")

    def _start(self, start: inference_pb2.SessionStart, time_left_s: float | None) -> None:
        if start.stream_id in self.streams:
            raise InvalidInput(f"stream_id {start.stream_id} is in use", field="start.stream_id")
        manual, parts = start.initial_credit_tokens > 0, start.generation.parts
        stream = SessionStream(self, start.stream_id, manual=manual, parts=parts)
        try:
            bounds.check(start, "start.")
            if manual and start.generation.HasField("prompt_logprobs"):
                raise InvalidInput(
                    "a window of credit counts output: start without one where prompt_logprobs are wanted",
                    field="start.generation.prompt_logprobs",
                )
            if start.generation.choices > 1 << CHOICE_BITS:
                raise InvalidInput(
                    f"a session's generation has at most {1 << CHOICE_BITS} choices",
                    field="start.generation.choices",
                )
            if len(self.streams) >= MAX_STREAMS:
                raise ConcurrencyExceeded(
                    f"a session runs at most {MAX_STREAMS} generations at once; wait for one to end, "
                    "or open another session",
                    retry_after_s=1.0,
                    limit=MAX_STREAMS,
                )
            self.streams[start.stream_id] = stream
            stream.request = self._service.submit(
                self._principal,
                start.generation,
                stream,
                received=replace(self._received(), attempt=start.attempt),
                timeout_s=time_left_s,
                client_window=start.initial_credit_tokens or None,
            )
        except FairwayError as error:
            stream.on_failed(error)

    def _credit(self, stream_id: int, tokens: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is None or stream.request is None:
            return  # it ended while the credit was under way
        if not stream.manual:
            raise InvalidInput(f"stream {stream_id} was started without a window", field="credit.stream_ids")
        stream.request.allow(tokens)

    def end_requests(self) -> None:
        """The client has closed its side; running generations continue."""
        self._half_closed = True
        self.wake()

    def fail(self, error: Exception) -> None:
        """End every generation now; the task that waits for the next message gets ``error``."""
        self._failure = error
        self.close()
        self.wake()

    async def readable(self) -> None:
        """Return once the client has read enough of the sent events for its next message."""
        while len(self.accepted) + len(self.finished) >= MAX_UNREAD:
            self._read.clear()
            await self._read.wait()

    # --- responses to the client -------------------------------------------------------------------

    def add_tokens(
        self,
        handle: int,
        offset: int,
        ids: Sequence[int],
        text: str,
        logprobs: Sequence[TokenLogprobs],
        parts: Sequence[OutputPart] = (),
    ) -> None:
        if parts:
            self._parts.append(common_pb2.FrameParts(entry=len(self._handles), parts=parts_to_proto(parts)))
        if logprobs:
            entry = common_pb2.FrameLogprobs(entry=len(self._handles), tokens=token_logprobs(logprobs))
            self._logprobs.append(entry)
        self._handles.append(handle)
        self._offsets.append(offset)
        self._ids.append(ids)
        self._texts.append(text)
        self._weight += len(ids) + LOGPROBS_WEIGHT * len(logprobs)
        self._has_output.set()

    def wake(self) -> None:
        self._has_output.set()

    @property
    def idle(self) -> bool:
        """No generation runs and nothing is left to send."""
        return not (self.streams or self._handles or self.accepted or self.finished)

    @property
    def ended(self) -> bool:
        """Nothing is left to send and nothing more can arrive."""
        return self._half_closed and self.idle

    async def next_message(self, heartbeat_s: float) -> inference_pb2.SessionResponse:
        """Return the output since the last message, up to the size bound, or a heartbeat after
        ``heartbeat_s``.

        Raises the error of a failed session.
        """
        if not self._has_output.is_set():
            try:
                async with asyncio.timeout(heartbeat_s):
                    await self._has_output.wait()
            except TimeoutError:
                return inference_pb2.SessionResponse(heartbeat=inference_pb2.Heartbeat())
        if self._failure is not None:
            raise self._failure
        self._has_output.clear()
        message = inference_pb2.SessionResponse(accepted=self.accepted)
        self.accepted = []
        if self._handles:
            self._take_tokens(message.tokens)
        if self._handles:  # the remaining tokens go into the next message, and the ends follow them
            self._has_output.set()
        else:
            message.finished.extend(self.finished)
            self.finished = []
        self._read.set()
        return message

    def sent(self, message: inference_pb2.SessionResponse) -> None:
        """The transport took the message: as many tokens of new credit are granted."""
        handles, counts = message.tokens.handles, message.tokens.counts
        for handle, count in zip(handles, counts, strict=True):
            stream = self.streams.get(handle >> CHOICE_BITS)
            if stream is not None and stream.request is not None:
                stream.request.credit(handle & ((1 << CHOICE_BITS) - 1), count)

    def close(self) -> None:
        """Cancel every generation that still runs."""
        for stream in list(self.streams.values()):
            if stream.request is not None:
                stream.request.cancel()

    def _take_tokens(self, frame: common_pb2.TokenFrame) -> None:
        if self._weight > MAX_MESSAGE_TOKENS:
            self._take_first_tokens(frame)
            return
        frame.handles.extend(self._handles)
        frame.offsets.extend(self._offsets)
        frame.counts.extend([len(ids) for ids in self._ids])
        frame.ids.extend([token for ids in self._ids for token in ids])
        frame.texts.extend(self._texts)
        if self._logprobs:
            frame.logprobs.extend(self._logprobs)
        if self._parts:
            frame.parts.extend(self._parts)
        self._handles, self._offsets, self._ids, self._texts = [], [], [], []
        self._logprobs, self._parts = [], []
        self._weight = 0

    def _take_first_tokens(self, frame: common_pb2.TokenFrame) -> None:
        """Take the entries that fit into one message, at least one; the others stay."""
        handles, offsets, ids, texts = self._handles, self._offsets, self._ids, self._texts
        logprobs = {found.entry: found for found in self._logprobs}
        parts = self._parts
        weights = [
            len(found) + (LOGPROBS_WEIGHT * len(found) if entry in logprobs else 0)
            for entry, found in enumerate(ids)
        ]
        fit = max(1, sum(1 for total in accumulate(weights) if total <= MAX_MESSAGE_TOKENS))
        self._handles, self._offsets, self._ids, self._texts = (
            handles[:fit],
            offsets[:fit],
            ids[:fit],
            texts[:fit],
        )
        self._logprobs = [found for entry, found in logprobs.items() if entry < fit]
        self._parts = [found for found in parts if found.entry < fit]
        self._weight = 0
        self._take_tokens(frame)
        self._handles, self._offsets, self._ids, self._texts = (
            handles[fit:],
            offsets[fit:],
            ids[fit:],
            texts[fit:],
        )
        for entry, found in logprobs.items():
            if entry >= fit:
                found.entry = entry - fit
                self._logprobs.append(found)
        for left in parts:
            if left.entry >= fit:
                left.entry -= fit
                self._parts.append(left)
        self._weight = sum(weights[fit:])
