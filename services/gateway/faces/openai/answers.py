"""Answers in the OpenAI dialects: whole, and as the frames of a stream.

Output in which a prompt is scored begins with the prompt's tokens: ``PromptPart`` is what an answer shows of
these. Log-probabilities of a prompt are those of vLLM.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from fairway.formats.answers import AssistantAnswer, CallDelta, ContentText, OutputPart, answer_of
from services.core.generation import FinishReason, StageClock, TokenLogprobs
from services.gateway.events import Finished, Tokens
from services.gateway.faces.openai.requests import ApiRequest, Dialect
from services.gateway.policy.degrade import Degradation
from services.gateway.requests.streaming import Completion
from services.runtime.ids import ANSWER_PREFIXES

_LOWEST_LOGPROB: Final = -9999.0
# Alternatives included: a few milliseconds of the event loop.
SLICE_LOGPROBS: Final = 1024
Item = TypeVar("Item")
Result = TypeVar("Result")
# What makes a result in steps of a few milliseconds.
Steps = Generator[None, None, Result]
_encode: Final = msgspec.json.Encoder().encode
_REASONS: Final = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.FILTERED: "content_filter",
}
_OBJECTS: Final = {
    "chat": ("chat.completion", "chat.completion.chunk"),
    "completions": ("text_completion", "text_completion"),
}


class CompletionLogprobs(Struct, frozen=True):
    """The first token of an echoed prompt has null, in both lists."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True):
    """A token at a place of a prompt."""

    logprob: float
    # Its place by probability, from 1.
    rank: int
    decoded_token: str


# Log-probabilities by token id, in decimal; null for the first token.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """The first ``tokens`` of a choice's output are the prompt's. ``echoed``: the answer shows them."""

    tokens: int = 0
    echoed: bool = False

    def text(self, entries: Sequence[TokenLogprobs], first: int = 0) -> str:
        """Return the text to show of the prompt, of entries from place ``first`` on."""
        return "".join(entry.text for entry in entries[: self.within(first)]) if self.echoed else ""

    def shown(self, entries: Sequence[Item], first: int = 0) -> Sequence[Item]:
        """Return the entries, or ids, to show with the text, of those from place ``first`` on."""
        return entries if self.echoed else entries[self.within(first) :]

    def within(self, first: int) -> int:
        """Return how many places from ``first`` on are the prompt's."""
        return max(0, self.tokens - first)


def slices_of(entries: Sequence[TokenLogprobs]) -> list[slice]:
    """Return the slices in which a list of entries is written, of a few milliseconds each; at least one."""
    size = max(1, SLICE_LOGPROBS // (1 + len(entries[-1].top_ids))) if entries else 1
    return [slice(first, first + size) for first in range(0, len(entries), size)] or [slice(0)]


def encoded(slices: Iterable[list[Item]]) -> Steps[list[Item]]:
    """Return a list as its JSON, made slice by slice."""
    pieces = []
    for part in slices:
        pieces.append(_encode(part)[1:-1])
        yield
    whole: list[Item] = _joined(pieces)
    return whole


def _joined(pieces: Iterable[bytes]) -> Any:
    """Return the JSON of a list in place of the list."""
    return Raw(b"[" + b",".join(pieces) + b"]")


def sliced_completion_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprobs], *, begins: bool
) -> Steps[CompletionLogprobs]:
    slices, offset_chars = slices_of(entries), 0
    if len(slices) == 1:
        return completion_logprobs(ids, entries, 0, begins=begins)
    columns: list[list[bytes]] = [[], [], [], []]
    for part in slices:
        found = completion_logprobs(ids[part], entries[part], offset_chars, begins=begins and not part.start)
        for column, values in zip(columns, structs.astuple(found), strict=True):
            column.append(_encode(values)[1:-1])
        offset_chars += sum(len(entry.text) for entry in entries[part])
        yield
    return CompletionLogprobs(*map(_joined, columns))


def completion_logprobs(
    ids: Sequence[int], entries: Sequence[TokenLogprobs], offset_chars: int, *, begins: bool
) -> CompletionLogprobs:
    """``offset_chars`` is where the first token's text begins in the choice's. ``begins``: that token begins
    a prompt."""
    offsets = []
    for entry in entries:
        offsets.append(offset_chars)
        offset_chars += len(entry.text)
    own: list[float | None] = [finite(entry.sampled) for entry in entries]
    named = [_named(token, entry) for token, entry in zip(ids, entries, strict=True)]
    tops: list[dict[str, float] | None] = [top for _, top in named]
    if begins and entries:
        own[0] = tops[0] = None
    return CompletionLogprobs([name for name, _ in named], own, tops, offsets)


def sliced_prompt_logprobs(ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Steps[PromptLogprobs]:
    """Return the log-probabilities of a prompt's tokens, as JSON."""
    return (yield from encoded(_places(ids[part], entries[part], part.start) for part in slices_of(entries)))


def _places(ids: Sequence[int], entries: Sequence[TokenLogprobs], first: int | None) -> PromptLogprobs:
    found: PromptLogprobs = [_ranked(token, entry) for token, entry in zip(ids, entries, strict=True)]
    return found if first else [None, *found[1:]]


def _ranked(token: int, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
    found = {
        str(other): PromptLogprob(finite(value), place, token_name(text, data))
        for place, (other, text, value, data) in enumerate(alternatives(entry), 1)
    }
    name = token_name(entry.token, entry.token_bytes)
    found.setdefault(str(token), PromptLogprob(finite(entry.sampled), entry.rank, name))
    return found


def _named(own: int, entry: TokenLogprobs) -> tuple[str, dict[str, float]]:
    """Return the name of a token, and the alternatives by theirs, the token included.

    A name is the text, or ``bytes:`` and what is no character, as OpenAI writes it. If names are equal, the
    less likely token has vLLM's, ``token_id:`` and its id.
    """
    found: dict[str, float] = {}
    names: dict[int, str] = {}
    for token, text, value, data in alternatives(entry):
        names[token] = name = f"token_id:{token}" if (name := token_name(text, data)) in found else name
        found[name] = finite(value)
    if own not in names:
        name = token_name(entry.token, entry.token_bytes)
        names[own] = name = f"token_id:{own}" if name in found else name
        found[name] = finite(entry.sampled)
    return names[own], found


def alternatives(entry: TokenLogprobs) -> Iterator[tuple[int, str, float, bytes]]:
    """Return id, text, log-probability and, of a part of a character, bytes of each alternative."""
    data = entry.top_bytes or (b"",) * len(entry.top_ids)
    return zip(entry.top_ids, entry.top_tokens, entry.top_logprobs, data, strict=True)


def token_name(text: str, data: bytes) -> str:
    return f"bytes:{data.decode('ascii', 'backslashreplace')}" if data else text


def finite(logprob: float) -> float:
    """JSON has no minus infinity."""
    return max(logprob, _LOWEST_LOGPROB) if math.isfinite(logprob) else _LOWEST_LOGPROB


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    """``reasoning_tokens``: to the end of the reasoning, its mark included."""

    reasoning_tokens: int


class UsageBody(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    # Tokens of the reasoning of a chat; absent where several tokens spell the mark that ends it.
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class _RunningUsage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopToken(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenEntry]
    refusal: None = None


class AnswerFunction(Struct, frozen=True):
    name: str
    arguments: str


class AnswerCall(Struct, frozen=True):
    id: str
    function: AnswerFunction
    type: str = "function"


class AnswerMessage(Struct, frozen=True):
    role: str
    # null where the answer is calls alone.
    content: str | None
    refusal: None = None
    tool_calls: list[AnswerCall] | UnsetType = UNSET
    # Only of a model that reasons, by both names that vLLM uses.
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class _DeltaFunction(Struct, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class _DeltaCall(Struct, frozen=True):
    index: int
    function: _DeltaFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class _Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[_DeltaCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class _ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: _Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class TextChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    # Only when the client named it.
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class DegradedBody(Struct, frozen=True):
    """An extension of the dialect: the differences between the answer and the request."""

    kind: str
    original: str
    applied: str


class _Head(Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | UnsetType = UNSET
    degraded: list[DegradedBody] | UnsetType = UNSET


class _Whole(Struct, frozen=True, kw_only=True):
    id: str
    # The object type in the dialect.
    object: str
    # Seconds of Unix time.
    created: int
    model: str
    system_fingerprint: str
    usage: UsageBody
    # Only when the client named one.
    service_tier: str | UnsetType = UNSET
    # Only when the client requested it.
    stage_clock: list[StageClock] | UnsetType = UNSET
    # Only when the answer differs from the request.
    degraded: list[DegradedBody] | UnsetType = UNSET


class ChatCompletion(_Whole, frozen=True, kw_only=True):
    choices: list[ChatChoice]
    # Only when the client named it.
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(_Whole, frozen=True, kw_only=True):
    choices: list[TextChoice]


class ModelEntry(Struct, frozen=True):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "fairway"


class ModelList(Struct, frozen=True):
    data: list[ModelEntry]
    object: str = "list"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that every part of one answer repeats."""

    request_id: str
    created_unix_s: int
    model: str
    version_digest: str
    degradations: tuple[Degradation, ...] = ()
    # The tier by which the request was served; empty where the client named none.
    service_tier: str = ""

    def head(self, dialect: Dialect, *, chunk: bool) -> _Head:
        return _Head(
            id=ANSWER_PREFIXES[dialect] + self.request_id,
            object=_OBJECTS[dialect][chunk],
            created=self.created_unix_s,
            model=self.model,
            system_fingerprint="fp_" + self.version_digest.removeprefix("sha256:")[:12],
            service_tier=self.service_tier or UNSET,
            degraded=_degraded(self.degradations),
        )


def _degraded(degradations: Sequence[Degradation]) -> list[DegradedBody] | UnsetType:
    found = [DegradedBody(one.kind.value, one.original, one.applied) for one in degradations]
    return found or UNSET


def usage_body(finished: Sequence[Finished]) -> UsageBody:
    """Return the sum over the generations of one answer."""
    usages = [each.usage for each in finished]
    prompt = sum(usage.prompt_tokens for usage in usages)
    output = sum(usage.output_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    counts = [result.reasoning_tokens for each in finished for result in each.choices]
    known = [count for count in counts if count is not None]
    details = CompletionDetails(sum(known)) if len(known) == len(counts) else UNSET
    return UsageBody(prompt, output, prompt + output, PromptDetails(cached), details)


def finish_reasons(finished: Finished) -> dict[int, str]:
    return {result.choice: _REASONS.get(result.finish_reason, "stop") for result in finished.choices}


def whole_answer(
    request: ApiRequest, completions: Sequence[Completion], created_unix_s: int, request_id: str
) -> Steps[bytes]:
    """Return the JSON of an answer that is not streamed."""
    first = completions[0].accepted
    tier = served_tier(request)
    answer = AnswerHead(request_id, created_unix_s, first.model, first.version_digest, service_tier=tier)
    head = answer.head(request.dialect, chunk=False)
    chat: list[ChatChoice] = []
    text: list[TextChoice] = []
    for number, completion in enumerate(completions):
        reasons = finish_reasons(completion.finished)
        for choice in range(len(completion.texts)):
            index = number * request.choices + choice
            reason = reasons.get(choice, "stop")
            if request.dialect == "chat":
                chat.append((yield from _chat_choice(request, completion, choice, index, reason)))
                chosen: list[Any] = chat
            else:
                text.append((yield from _text_choice(request, number, completion, choice, index, reason)))
                chosen = text
            if request.logprobs:  # many choices of few log-probabilities each take long together
                chosen[-1] = Raw(_encode(chosen[-1]))
                yield
    common: dict[str, Any] = {
        **structs.asdict(head),
        "usage": usage_body([completion.finished for completion in completions]),
        "stage_clock": [one.finished.clock for one in completions] if request.stage_clock else UNSET,
        "degraded": _degraded([found for one in completions for found in one.accepted.degradations]),
    }
    if request.dialect == "chat":
        scores = yield from _prompt_logprobs(request, completions[0], 0)
        return _encode(ChatCompletion(choices=chat, prompt_logprobs=scores, **common))
    return _encode(TextCompletion(choices=text, **common))


def _chat_choice(
    request: ApiRequest, completion: Completion, choice: int, index: int, reason: str
) -> Steps[ChatChoice]:
    entries = prompt_part(request, completion.accepted.prompt_tokens).shown(completion.logprobs[choice])
    found = (yield from sliced_chat_logprobs(entries)) if request.logprobs else None
    parts = completion.answers[choice] if completion.answers else AssistantAnswer(completion.texts[choice])
    return ChatChoice(index, answer_message(parts), found, reason)


def _text_choice(
    request: ApiRequest, number: int, completion: Completion, choice: int, index: int, reason: str
) -> Steps[TextChoice]:
    prompt, entries = prompt_part(request, completion.accepted.prompt_tokens), completion.logprobs[choice]
    before = prompt.text(entries) if prompt.tokens else request.echoed(number)
    listed = None
    if request.logprobs:
        ids, begins = prompt.shown(completion.ids[choice]), prompt.tokens > 0 and prompt.echoed
        listed = yield from sliced_completion_logprobs(ids, prompt.shown(entries), begins=begins)
    scores = yield from _prompt_logprobs(request, completion, choice)
    return TextChoice(index, before + completion.texts[choice], listed, reason, scores)


def prompt_part(request: ApiRequest, prompt_tokens: int) -> PromptPart:
    """Return what the output of a generation has of its prompt."""
    return PromptPart(prompt_tokens if request.scores_prompt else 0, request.echo)


def _prompt_logprobs(
    request: ApiRequest, completion: Completion, choice: int
) -> Steps[PromptLogprobs | UnsetType]:
    if not request.prompt_logprobs:
        return UNSET
    ids, count = completion.ids[choice], completion.accepted.prompt_tokens
    return (yield from sliced_prompt_logprobs(ids[:count], completion.logprobs[choice][:count]))


def answer_message(answer: AssistantAnswer) -> AnswerMessage:
    """Return the message of a whole answer."""
    calls = [AnswerCall(call.id, AnswerFunction(call.name, call.arguments)) for call in answer.calls]
    return AnswerMessage(
        "assistant",
        None if calls and not answer.content else answer.content,
        tool_calls=calls or UNSET,
        reasoning_content=answer.reasoning or UNSET,
        reasoning=answer.reasoning or UNSET,
    )


def _delta(parts: Sequence[OutputPart]) -> _Delta:
    """Return the delta of one event. It has one piece of each call, since an event is one frame."""
    if len(parts) == 1 and isinstance(parts[0], ContentText):  # nearly always
        return _Delta(content=parts[0].text or UNSET)
    answer, named = answer_of(parts), {part.index: part for part in parts if isinstance(part, CallDelta)}
    calls = [
        _DeltaCall(
            index,
            _DeltaFunction(call.name or UNSET, call.arguments),
            id=call.id or UNSET,
            type="function" if call.id else UNSET,
        )
        for index, call in zip(named, answer.calls, strict=True)
    ]
    reasoning = answer.reasoning or UNSET
    return _Delta(
        content=answer.content or UNSET,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=calls or UNSET,
    )


def served_tier(request: ApiRequest) -> str:
    """Return the tier that an answer states, as OpenAI does; empty where the client named none."""
    return "default" if request.service_tier == "auto" else request.service_tier


def sliced_chat_logprobs(entries: Sequence[TokenLogprobs]) -> Steps[ChatLogprobs]:
    slices = slices_of(entries)
    if len(slices) == 1:
        return chat_logprobs(entries)
    return ChatLogprobs((yield from encoded(chat_logprobs(entries[part]).content for part in slices)))


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    content = []
    for entry in entries:
        tops = [
            TopToken(text, finite(value), list(data or text.encode()))
            for _, text, value, data in alternatives(entry)
        ]
        own = list(entry.token_bytes or entry.token.encode())
        content.append(TokenEntry(entry.token, finite(entry.sampled), own, tops))
    return ChatLogprobs(content)


_NO_DELTA: Final = _Delta()


class Frames:
    """Writes the frames of one streamed answer: one JSON head, built once, around each choice."""

    def __init__(self, request: ApiRequest, answer: AnswerHead) -> None:
        self._request = request
        head = _encode(answer.head(request.dialect, chunk=True))
        self._before = b"data: " + head[:-1] + b',"choices":['
        # Every frame but the last has a null usage when usage is requested.
        self._after = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._offsets: dict[int, int] = {}
        self._split: set[int] = set()  # choices whose output has parts
        # Output tokens so far and prompt tokens, by choice; only for frames that state them.
        self._tokens: Counter[int] = Counter()
        self._prompt_tokens: dict[int, int] = {}
        self._echoes: dict[int, str] = {}  # what is to precede the next text of a choice

    def start(
        self, index: int, prompt_tokens: int, *, split: bool, tokens: int = 0, token_chars: int = 0
    ) -> None:
        """Begin a choice, behind what its client has: tokens, whose texts have that many characters.

        ``split``: whether its output has parts; otherwise its text is content.
        """
        if split:
            self._split.add(index)
        prompt = prompt_part(self._request, prompt_tokens)
        if not (tokens or prompt.tokens):
            self._echoes[index] = self._request.echoed(index // self._request.choices)
        self._offsets[index], self._tokens[index] = token_chars, max(0, tokens - prompt.tokens)
        self._prompt_tokens[index] = prompt_tokens

    def role(self, index: int) -> bytes:
        """The first frame of a chat choice."""
        frame = _ChatChunkChoice(index, _Delta(role="assistant", content=""))
        return self._before + _encode(frame) + self._ending(index, tokens=0)

    def tokens(self, index: int, event: Tokens) -> bytes:
        """The frame of new output; empty while text is held back and no log probabilities were requested."""
        wants = self._request.logprobs and bool(event.logprobs)
        prompt = prompt_part(self._request, self._prompt_tokens.get(index, 0))
        self._tokens[index] += max(0, len(event.ids) - prompt.within(event.offset))
        if self._request.dialect == "chat":
            parts = event.parts if index in self._split else (ContentText(event.text),)
            delta = _delta(parts)
            if delta == _NO_DELTA:
                if not wants:
                    return b""
                delta = _Delta(content="")
            found = chat_logprobs(event.logprobs) if wants else None
            return self._frame(_ChatChunkChoice(index, delta, found))
        text = self._echoes.pop(index, "") + prompt.text(event.logprobs, event.offset) + event.text
        if not text and not wants:
            return b""
        listed = None
        if wants:
            begins, offset = prompt.tokens > 0 and not event.offset, self._offsets.get(index, 0)
            listed = completion_logprobs(event.ids, event.logprobs, offset, begins=begins)
            self._offsets[index] = offset + sum(len(entry.text) for entry in event.logprobs)
        return self._frame(TextChoice(index, text, listed))

    def finish(self, index: int, reason: str, parts: Sequence[OutputPart] = ()) -> bytes:
        """The last frame of a choice, with the rest of its parts."""
        if self._request.dialect == "chat":
            return self._frame(_ChatChunkChoice(index, _delta(parts), finish_reason=reason))
        return self._frame(TextChoice(index, self._echoes.pop(index, ""), finish_reason=reason))

    def usage(self, finished: Sequence[Finished]) -> bytes:
        """The frame of the whole answer's usage; empty unless requested."""
        if not self._request.include_usage:
            return b""
        return self._before + b'],"usage":' + _encode(usage_body(finished)) + b"}\n\n"

    def stage_clock(self, clocks: Sequence[StageClock]) -> bytes:
        """The frame of the stage times, per generation; empty unless requested."""
        if not self._request.stage_clock:
            return b""
        return self._before + b'],"stage_clock":' + _encode(list(clocks)) + b"}\n\n"

    def _frame(self, choice: _ChatChunkChoice | TextChoice) -> bytes:
        return self._before + _encode(choice) + self._ending(choice.index, tokens=self._tokens[choice.index])

    def _ending(self, index: int, *, tokens: int) -> bytes:
        """Return what follows a choice in its frame."""
        if not self._request.continuous_usage:
            return self._after
        prompt = self._prompt_tokens.get(index, 0)
        usage = _RunningUsage(prompt, tokens, prompt + tokens)
        return b'],"usage":' + _encode(usage) + b"}\n\n"
