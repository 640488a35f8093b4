"""The outputs of a request on their way to its sink: nothing leaves without a verdict of every layer.

What arrives of a choice is held in a queue. A piece of it is released once all its text is decided by the
lists, judged by each model of the pack, and has the window's tokens after it. A find that ends the output
drops its piece and all that follows, and frees the sequence at once; what stands before it still waits for
its own verdicts. Held tokens count as taken for the worker's credit, but not for the client's window.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Final, Protocol

import structlog

from fairway.formats.safety import ClassifierRule, JudgeRule
from services.core.generation import FinishReason, GenerationSpec, TokenLogprobs
from services.core.safety import REDACTED_ID, REDACTED_TEXT, UNAVAILABLE
from services.gateway.events import ChoiceResult, OutputSink
from services.gateway.idempotency.record_log import Piece, Place
from services.gateway.requests.terms import Produced
from services.gateway.safety.lists import TextMatch
from services.gateway.safety.requests import RequestSafety

log = structlog.get_logger()

_ALL: Final = Place(1 << 62, 1 << 62)
_NO_LOGPROBS: Final = TokenLogprobs(0.0, (), (), (), "")


class ScreenedRun(Protocol):
    """The run of one choice, whose output a screen receives."""

    @property
    def choice(self) -> int: ...

    async def run(self) -> ChoiceResult: ...

    def filtered(self) -> ChoiceResult:
        """Return the result of a run that was cancelled because its output is not delivered."""


class OutputScreen:
    """Takes the output of a request's choices, before the request's sink. The request's end passes it by."""

    def __init__(
        self,
        safety: RequestSafety,
        spec: GenerationSpec,
        sink: OutputSink,
        earlier: Sequence[Produced],
        client_window: int | None,
    ) -> None:
        """``earlier``: what the sink has of each choice. ``client_window``: see ``GatewayService.submit``."""
        self._choices = tuple(
            ChoiceScreen(safety, choice, spec, sink, _of(earlier, choice), client_window)
            for choice in range(spec.choices)
        )
        shadow = safety.shadow
        self._shadows = (
            ()
            if shadow is None
            else tuple(
                ChoiceScreen(shadow, choice, spec, NoOutput(), _of(earlier, choice), None)
                for choice in range(spec.choices)
            )
        )

    async def run(self, run: ScreenedRun) -> ChoiceResult:
        """Return once the choice ended and all of it that passes was sent. Raises what ends its run."""
        try:
            return await self._choices[run.choice].run(run)
        finally:
            for shadow in self._shadows[run.choice : run.choice + 1]:
                shadow.leave()

    def held(self, choice: int) -> int:
        """Return the tokens of a choice for which the worker needs credit beyond the reader's windows."""
        return self._choices[choice].held

    @property
    def probed(self) -> bool:
        """Whether the worker is to send the scores of a probe."""
        return any(one.probed for one in (*self._choices, *self._shadows))

    @property
    def judged(self) -> bool:
        """Whether models judge the output, whose verdicts are due at tokens."""
        return any(one.judged for one in (*self._choices, *self._shadows))

    def allow(self, choice: int, tokens: int) -> None:
        """The client takes ``tokens`` more of the choice."""
        self._choices[choice].allow(tokens)

    def on_scores(self, choice: int, offset: int, scores: Sequence[float]) -> None:
        """The probe's scores of tokens from ``offset`` on, before these arrive."""
        for screens in (self._choices, self._shadows):
            if screens:
                screens[choice].on_scores(offset, scores)

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        self._choices[choice].on_tokens(offset, ids, text, logprobs)
        if self._shadows:
            self._shadows[choice].on_tokens(offset, ids, text, logprobs)


class NoOutput:
    """The sink of a screen that only flags."""

    def on_tokens(
        self, choice: int, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None: ...


def _of(earlier: Sequence[Produced], choice: int) -> Produced:
    return earlier[choice] if choice < len(earlier) else Produced()


@dataclass(frozen=True, slots=True)
class _Held:
    """Output that waits. ``end_chars``: the text of the choice up to its end."""

    offset: int
    ids: Sequence[int]
    text: str
    logprobs: Sequence[TokenLogprobs]
    end_chars: int
    # The length of the choice's text that contains all text of its tokens, unless the choice ends before.
    whole_chars: int
    arrived_s: float

    @property
    def end(self) -> int:
        return self.offset + len(self.ids)

    @property
    def start_chars(self) -> int:
        return self.end_chars - len(self.text)

    def within(self, bound: Place) -> bool:
        return self.end <= bound.tokens and self.whole_chars <= bound.chars


@dataclass(slots=True)
class _Verdict:
    """A verdict on the text up to a place. ``found``: None until it is in."""

    upto: Place
    text: str
    found: Sequence[str] | None = None
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Layer:
    """A model of the pack, and up to where it has judged a choice and is to judge it."""

    rule: ClassifierRule | JudgeRule
    judged: Place
    asked: Place
    verdicts: deque[_Verdict] = field(default_factory=deque)  # awaited ones in the order of their places


@dataclass(slots=True)
class _Recent:
    """The last text of a choice, by the tokens that it came with."""

    texts: deque[tuple[int, str]] = field(default_factory=deque)
    tokens: int = 0

    def add(self, tokens: int, text: str, least: int) -> None:
        """Add text. What precedes the last ``least`` tokens is dropped."""
        self.texts.append((tokens, text))
        self.tokens += tokens
        while self.tokens - self.texts[0][0] > least:
            self.tokens -= self.texts.popleft()[0]

    def last(self, tokens: int) -> str:
        """Return the text of at least so many tokens."""
        sums = accumulate(count for count, _ in reversed(self.texts))
        pieces = next((at for at, total in enumerate(sums, 1) if total >= tokens), len(self.texts))
        return "".join([text for _, text in self.texts][len(self.texts) - pieces :])


class ChoiceScreen:
    """The output of one choice."""

    def __init__(
        self,
        safety: RequestSafety,
        choice: int,
        spec: GenerationSpec,
        sink: OutputSink,
        earlier: Produced,
        client_window: int | None,
    ) -> None:
        pack = safety.pack
        self._safety = safety
        self._choice = choice
        self._sink = sink
        self._scored = spec.scored_tokens
        self._window = pack.window_tokens
        self._allowed = client_window
        # Text lags behind its tokens by the beginning of a stop string, or of a character.
        self._lag = max(map(len, spec.limits.stop), default=1) - 1
        self._start = Place(len(earlier.ids), earlier.chars)
        self._suppressed = 0  # tokens that the sink had
        self._had_chars = 0  # the end of the text that is made again
        # Redacted output is made again from its beginning: what its tokens were is not recorded.
        again = earlier.redacted
        begun = Place() if again else self._start
        self._tokens, self._out_chars = begun.tokens, begun.chars
        self._scans = safety.scans(spec)
        self._revisions = [0] * len(self._scans)
        judged = Place(self._start.tokens, begun.chars)
        self._layers = [_Layer(rule, judged, judged) for rule in safety.models("output")]
        self._probed = self._start.tokens if pack.probe is not None else _ALL.tokens
        self._recent = _Recent()
        self._text, self._text_from = "", begun.chars  # what waits, and what a match still needs before it
        self._passed = begun.chars  # the text that is released
        self._queue: deque[_Held] = deque()
        self._waiting = 0  # tokens in the queue
        self._ready: deque[Piece] = deque()  # output that waits for the client's window alone
        self._ended = self._cut = False
        self._done = asyncio.Event()
        self._scope: asyncio.Timeout | None = None
        if not again and earlier.text:
            self._had(earlier.text, begun.tokens)

    def _had(self, text: str, tokens: int) -> None:
        """Take text that the sink has: it has its verdicts, and what follows is read after it."""
        for at, scan in enumerate(self._scans):
            scan.feed(text)
            scan.forget(len(text))
            self._revisions[at] = scan.revision
        most = max((layer.rule.context_tokens for layer in self._layers), default=0)
        if most:
            kept = min(tokens, most)
            self._recent.add(kept, text[-max(1, len(text) * kept // max(1, tokens)) :], most)

    @property
    def held(self) -> int:
        return max(self._waiting, self._window) + self._suppressed

    @property
    def probed(self) -> bool:
        return self._safety.pack.probe is not None and self._safety.terms.probed

    @property
    def judged(self) -> bool:
        return bool(self._layers)

    def allow(self, tokens: int) -> None:
        if self._allowed is not None:
            self._allowed += tokens
            self._send()
            self._settle()

    async def run(self, run: ScreenedRun) -> ChoiceResult:
        """Return the result once nothing waits."""
        try:
            try:
                async with asyncio.timeout(None) as self._scope:
                    result = await run.run()
            except TimeoutError:
                if not self._cut:
                    raise
                result = run.filtered()
            finally:
                self._scope = None
            self._end()
            await self._done.wait()
        finally:
            self._close()
        return replace(result, finish_reason=FinishReason.FILTERED, stop="") if self._cut else result

    def leave(self) -> None:
        """End what only flags: its last verdicts may come after the request's end."""
        self._end()
        self._safety.spawn(f"judge {self._safety.request_id}", self._finish())

    async def _finish(self) -> None:
        try:
            await self._done.wait()
        finally:
            self._close()

    def on_tokens(
        self, offset: int, ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]
    ) -> None:
        if self._ended:  # the worker has not read of the end yet
            return
        if offset < self._scored:
            prompt = min(len(ids), self._scored - offset)
            self._pass(Piece(Place(offset, self._out_chars), ids[:prompt], "", logprobs[:prompt]))
            self._tokens = offset + prompt
            offset, ids, logprobs = offset + prompt, ids[prompt:], logprobs[prompt:]
            if not ids and not text:
                self._send()
                return
        chars = self._scans[0].chars + len(text)
        # A token without text may be the beginning of a character.
        whole = chars + max(self._lag, int(not text))
        self._hold(_Held(offset, ids, text, logprobs, chars, whole, self._safety.now_s()))
        if self._tokens > self._probed:
            self._unprobed()
        self._advance()

    def on_scores(self, offset: int, scores: Sequence[float]) -> None:
        rule = self._safety.pack.probe
        if rule is None or self._ended:
            return
        first = max(self._start.tokens, self._scored)
        for at, score in enumerate(scores, offset):
            if at >= first and math.isnan(score):
                return  # the token comes without a verdict
            if at >= first and score >= rule.threshold:
                self._unsafe(rule.category, Place(at, _ALL.chars), "")
                if self._ended:
                    return
            self._probed = max(self._probed, at + 1)

    def _hold(self, held: _Held) -> None:
        self._queue.append(held)
        self._waiting += len(held.ids)
        self._tokens = held.end
        self._text += held.text
        for scan in self._scans:
            scan.feed(held.text)
        if held.end <= self._start.tokens:  # an earlier run had its verdicts, and recorded its finds
            self._had_chars = held.end_chars
            for layer in self._layers:
                layer.judged = layer.asked = Place(layer.judged.tokens, held.whole_chars)
        least = [max(one.rule.context_tokens, held.end - one.asked.tokens) for one in self._layers]
        if least:
            self._recent.add(len(held.ids), held.text, max(least))

    # --- verdicts ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Act on what the lists found, have the models judge what is due, release what is decided."""
        self._read_lists()
        for layer in self._layers:
            self._ask(layer)
        self._release()
        self._settle()

    def _read_lists(self) -> None:
        first: TextMatch | None = None
        for at, scan in enumerate(self._scans):
            if scan.revision != self._revisions[at]:
                self._revisions[at] = scan.revision
                ending = (one for one in scan.matches if self._ends(one.category))
                found = next(ending, None)
                if found is not None and (first is None or found.start < first.start):
                    first = found
        if first is not None:
            self._unsafe(first.category, Place(_ALL.tokens, first.start), self._matched(first), first.start)

    def _matched(self, match: TextMatch) -> str:
        return self._text[max(0, match.start - self._text_from) : match.end - self._text_from]

    def _ends(self, category: str) -> bool:
        return self._safety.action_of(category) in ("block", "stop")

    def _ask(self, layer: _Layer) -> None:
        """Have a model judge the text if it reaches a multiple of ``every_tokens``, or the end.

        No verdict waits for another: what is judged depends on the output alone, so that an output which is
        made again on another worker has the same verdicts.
        """
        if not self._queue:
            return
        last, asked, every = self._queue[-1], layer.asked, layer.rule.every_tokens
        upto = Place(max(last.end, asked.tokens), last.whole_chars if self._ended else last.end_chars)
        if upto.tokens // every > asked.tokens // every or (self._ended and not last.within(asked)):
            text = self._recent.last(max(layer.rule.context_tokens, upto.tokens - asked.tokens))
            layer.asked = upto
            layer.verdicts.append(verdict := _Verdict(upto, text))
            verdict.task = self._safety.spawn(f"judge {self._safety.request_id}", self._judge(layer, verdict))

    async def _judge(self, layer: _Layer, verdict: _Verdict) -> None:
        """Await a verdict, and act on those that wait for none before them."""
        try:
            verdict.found = await self._safety.judge(layer.rule, verdict.text, "output")
        except Exception:  # what is not judged is not sent, whatever is wrong here
            log.exception("safety.verdict_crashed", model=layer.rule.model)
            verdict.found = (UNAVAILABLE,)
        while layer.verdicts and (found := layer.verdicts[0].found) is not None:
            one = layer.verdicts.popleft()
            self._act(layer, one.upto, one.text, found)
        self._advance()

    def _act(self, layer: _Layer, upto: Place, text: str, found: Sequence[str]) -> None:
        place = {"request_id": self._safety.request_id, "choice": self._choice, "model": layer.rule.model}
        span = {"from_token": layer.judged.tokens, "to_token": upto.tokens}
        log.debug("safety.judged", found=found, **place, **span)
        ending = [category for category in found if self._ends(category)]
        for category in found:
            if category not in ending:
                self._note(category, layer.judged.chars, text)
        if ending:
            self._unsafe(ending[0], layer.judged, text)
            self._dismiss(layer)
        else:
            layer.judged = upto

    def _dismiss(self, layer: _Layer) -> None:
        for verdict in layer.verdicts:
            if verdict.task is not None:
                verdict.task.cancel()
        layer.verdicts.clear()

    def _unprobed(self) -> None:
        """Act as the pack states on tokens that came without a score."""
        if self._safety.pack.fail == "open":
            self._safety.note_passed("output")
            self._probed = _ALL.tokens
        else:
            self._unsafe(UNAVAILABLE, Place(self._probed, _ALL.chars), "")

    def _unsafe(self, category: str, bound: Place, text: str, position: int | None = None) -> None:
        """Act on a find that ends the output before the first piece that is not within ``bound``.

        With the ``position`` of the find, the text before it stays, without the tokens that it came with:
        what is delivered does not depend on how the output was cut into pieces.
        """
        if not self._ends(category):
            self._note(category, self._scans[0].chars, text)
            return
        kept = next((at for at, held in enumerate(self._queue) if not held.within(bound)), None)
        if kept is None:
            if self._cut or bound.tokens < self._tokens:
                return  # another find dropped it already
            kept = len(self._queue)  # the probe's find is of a token that is about to arrive
        at_chars = self._queue[kept].start_chars if kept < len(self._queue) else self._scans[0].chars
        self._note(category, at_chars if position is None else position, text)
        dropped = [self._queue.pop() for _ in range(len(self._queue) - kept)][::-1]
        self._waiting -= sum(len(held.ids) for held in dropped)
        if dropped and position is not None and position > at_chars:
            text = "".join([held.text for held in dropped])[: position - at_chars]
            head = _Held(dropped[0].offset, (), text, (), position, position, dropped[0].arrived_s)
            self._queue.append(head)
        self._ended = self._cut = True
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    def _note(self, category: str, position: int, text: str) -> None:
        self._safety.note(category, "output", self._choice, position, text)

    def _end(self) -> None:
        """The choice made all its output."""
        if not self._ended:
            self._ended = True
            for scan in self._scans:
                scan.finish()
        self._advance()

    # --- what leaves ------------------------------------------------------------------------------

    def _release(self) -> None:
        """Release the pieces that every layer has decided on."""
        bound = _ALL
        if not self._ended:
            safe_chars = min(scan.safe_chars for scan in self._scans)
            bound = Place(min(self._tokens - self._window, self._probed), safe_chars)
        for layer in self._layers:
            judged = layer.judged
            bound = Place(min(bound.tokens, judged.tokens), min(bound.chars, judged.chars))
        released = False
        while self._queue and self._queue[0].within(bound):
            released = True
            held = self._queue.popleft()
            self._waiting -= len(held.ids)
            self._safety.held(held.arrived_s)
            self._passed = held.end_chars
            self._pass(self._redacted(held))
        if released:
            self._forget()
            self._send()

    def _redacted(self, held: _Held) -> Piece:
        """Return a piece as the sink may have it. Every match within it is final."""
        at = Place(held.offset, self._out_chars)
        start, end = held.start_chars, held.end_chars
        spans = [one for one in self._redactions() if one[0] < held.whole_chars and one[1] > start]
        if not spans:
            return Piece(at, held.ids, held.text, held.logprobs)
        texts, kept = [], start
        for first, last in spans:
            texts.append(held.text[kept - start : max(0, first - start)])
            if start <= first < end:
                texts.append(REDACTED_TEXT)
            kept = max(kept, min(last, end))
        texts.append(held.text[kept - start :])
        count = len(held.ids)
        return Piece(at, (REDACTED_ID,) * count, "".join(texts), (_NO_LOGPROBS,) * len(held.logprobs))

    def _redactions(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the text that are redacted, none of which touches another."""
        action_of = self._safety.action_of
        found = sorted(
            (match.start, match.end)
            for scan in self._scans
            for match in scan.matches
            if action_of(match.category) == "redact"
        )
        last: tuple[int, int] | None = None
        for start, end in found:
            if last is not None and start < last[1]:
                last = last[0], max(last[1], end)
                continue
            if last is not None:
                yield last
            last = start, end
        if last is not None:
            yield last

    def _pass(self, piece: Piece) -> None:
        """Have a piece sent, as far as the sink lacks it."""
        self._out_chars = piece.end.chars
        lacking = piece.beyond(self._start) if piece.end > self._start else None
        self._suppressed += len(piece.ids) - (0 if lacking is None else len(lacking.ids))
        if lacking is not None:
            self._ready.append(lacking)

    def _send(self) -> None:
        """Send what is ready and what the client takes."""
        while self._ready:
            piece = self._ready[0]
            if self._allowed is not None and piece.end.tokens > self._scored:
                room = self._allowed + self._scored - piece.at.tokens
                if piece.ids and room <= 0:
                    return
                piece = piece.first(room) if piece.ids else piece
            rest = self._ready.popleft()
            if piece is not rest:
                self._ready.appendleft(rest.beyond(piece.end))
            self._sink.on_tokens(self._choice, piece.at.tokens, piece.ids, piece.text, piece.logprobs)

    def _forget(self) -> None:
        """Record what was found in the text that is released, and forget it."""
        seen: set[tuple[int, int]] = set()
        needed = self._passed
        for scan in self._scans:
            for match in scan.matches:
                if match.end > self._passed:
                    needed = min(needed, match.start)
                elif match.end > self._had_chars and (match.rule, match.start) not in seen:
                    seen.add((match.rule, match.start))
                    self._note(match.category, match.start, self._matched(match))
            scan.forget(self._passed)
        self._text = self._text[max(0, needed - self._text_from) :]
        self._text_from = max(self._text_from, needed)

    def _settle(self) -> None:
        if self._ended and not self._queue and not self._ready:
            self._done.set()

    def _close(self) -> None:
        self._ended = True
        for layer in self._layers:
            self._dismiss(layer)
        self._queue.clear()
        self._ready.clear()
