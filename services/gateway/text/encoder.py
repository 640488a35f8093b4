"""Encodes text and messages into token ids, by a model version's tokenizer and chat template.

Everything is read from the version's verified files and is immutable afterwards. The chat template is guarded
against control tokens in messages.

A chat template joins messages with control tokens, and a tokenizer reads control tokens back out of text
wherever they are spelled. A user who writes ``<|end|><|system|>`` must not end the user's turn. So the
template computes with text that records which of its characters come from a message (``traced_text``), and
writes exactly its usual text. Where a control token is spelled with at least one such character, the text is
cut behind the token's first character and tokenised in pieces, so that no piece spells it. Messages that
spell none give exactly their usual tokens. ``TextEncoder.encode_chat`` counts the control tokens afterwards.

Control tokens are the tokenizer's added tokens that are flagged special, and those that the template writes
around turns, tools, calls and results. Other added tokens (``<think>``) are ordinary text with an id of their
own: transformers reads them from messages too.
"""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2
import msgspec
from tokenizers import AddedToken, Tokenizer

from fairway.formats.answers import ToolCall
from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.generation import sampling_defaults
from fairway.formats.rope_config import context_of
from fairway.formats.tokenizer_files import FILES, read_tokenizer_files
from fairway.formats.version_files import TEMPLATES
from services.core.errors import (
    ConstraintRefused,
    FailedPrecondition,
    FairwayError,
    InvalidInput,
    PromptTooLong,
    UnsupportedFeature,
)
from services.core.generation import Constraint
from services.core.outputs.forms import Tool
from services.gateway.outputs.forms import MarkToken, form_of, mark_tokens, reasoning_openings
from services.gateway.text.sandbox import (
    BUDGET,
    MAX_TEMPLATE_BYTES,
    BudgetedEnvironment,
    TemplateBudget,
    TemplateRefused,
    TemplateTooCostly,
)
from services.gateway.text.text_model import ChatMessage, SamplingDefaults, TextModel
from services.gateway.text.traced_text import MESSAGE, OriginText, concat, origin_of
from services.ports.clock import Clock
from services.ports.grammars import GrammarRefused, Grammars, TokenizerUnusable

if TYPE_CHECKING:
    from services.gateway.text.row_encoder import RowEncoder

_STRFTIME: Final = re.compile(r"(%[-_0^#]?[A-Za-z%]|[^%])*")
MAX_STEPS: Final = 200_000
RENDER_TIMEOUT_S: Final = 2.0
# Intermediate characters of one rendering, all operations together.
MAX_WORK_CHARS: Final = 16 * 1024 * 1024
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_OWN_VARIABLES: Final = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")
_TEMPLATE_MISTAKES: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """Rendered text; ``cuts`` are the offsets at which it is split before tokenisation."""

    text: str
    cuts: tuple[int, ...] = ()

    def pieces(self) -> list[str]:
        bounds = (0, *self.cuts, len(self.text))
        return [self.text[start:end] for start, end in pairwise(bounds) if start < end]


class ControlTokens:
    """The spellings of a tokenizer's control tokens."""

    def __init__(self, special: Iterable[str]) -> None:
        self.texts = frozenset(special)
        self._special = _any_of(self.texts)

    def spelled(self, text: str) -> list[str]:
        """Return the control tokens that a tokenizer reads from the text, in order."""
        return self._special.findall(text) if self._special else []

    def guarded(self, text: str) -> Rendered:
        """Return a template's text, cut inside each control token that contains message text."""
        origin = origin_of(text)
        if self._special is None or MESSAGE not in origin:
            return Rendered(str.__str__(text))
        cuts, start = [], 0
        while found := self._special.search(text, start):
            start = found.end()
            if MESSAGE in origin[found.start() : start]:
                start = found.start() + 1
                cuts.append(start)
        return Rendered(str.__str__(text), tuple(cuts))


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    # Longest first, as tokenizers match them.
    ordered = sorted((text for text in texts if text), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


class ChatTemplate:
    """Renders messages into the text that the model was trained on. Any thread."""

    def __init__(
        self, source: str, *, control: ControlTokens, tokens: Mapping[str, str], clock: Clock
    ) -> None:
        """``tokens`` are ``bos_token`` and similar. Raises FailedPrecondition for an invalid template."""
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise FailedPrecondition(f"the chat template is longer than {MAX_TEMPLATE_BYTES} bytes")
        environment = BudgetedEnvironment({"strftime_now": _strftime(clock)})
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as exc:
            line = f" in line {exc.lineno}" if isinstance(exc, jinja2.TemplateSyntaxError) else ""
            raise FailedPrecondition(
                f"the chat template does not compile: {type(exc).__name__}{line}: {str(exc)[:300]}"
            ) from exc
        self.source = source
        self._control = control
        self._tokens = dict(tokens)
        self._clock = clock
        self._knows_developer = "developer" in source
        # Such a template takes arguments as text too: `arguments is string`.
        self._takes_text = "arguments is string" in source
        self.depends_on_time = "strftime_now" in source

    def guarding(self, control: ControlTokens) -> ChatTemplate:
        """Return the same template with these control tokens."""
        found = copy.copy(self)
        found._control = control
        return found

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_chars: int,
        variables: str = "",
        tools: Sequence[Tool] = (),
    ) -> Rendered:
        """Return the text up to the assistant's turn.

        ``variables`` is a JSON object of variables that are added to the template's own. Raises InvalidInput
        when the template rejects the messages or exceeds its budget, FailedPrecondition when it fails.
        """
        budget = TemplateBudget(
            max_chars=8 * max_chars + MAX_WORK_CHARS,
            max_steps=MAX_STEPS,
            deadline_s=self._clock.monotonic_s() + RENDER_TIMEOUT_S,
            monotonic_s=self._clock.monotonic_s,
        )
        own: dict[str, object] = {
            **self._tokens,
            BUDGET: budget,
            "messages": list(map(self._message, messages)),
            "tools": [_tool(index, tool) for index, tool in enumerate(tools)] or None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            text = concat(_bounded(self._template.generate(self._further(variables) | own), max_chars))
        except TemplateRefused as exc:
            raise InvalidInput(f"the chat template refuses the messages: {exc}", field="messages") from exc
        except TemplateTooCostly as exc:
            raise InvalidInput(
                f"the chat template needs too much for these messages: {exc}", field="messages"
            ) from exc
        except _TEMPLATE_MISTAKES as exc:
            raise FailedPrecondition(
                f"the version's chat template fails{_line(exc)} with {type(exc).__name__}: it has a mistake, "
                "or it is not made for such messages and does not refuse them"
            ) from exc
        return self._control.guarded(text)

    def _message(self, message: ChatMessage) -> dict[str, object]:
        """Return a turn as transformers passes it: without the fields that it does not have."""
        # Templates older than the role ``developer`` use its former name.
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        content = OriginText(message.content) if message.content or not message.tool_calls else None
        found: dict[str, object] = {"role": role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if text := getattr(message, name):
                found[name] = OriginText(text)
        if message.tool_calls:
            found["tool_calls"] = [self._call(call) for call in message.tool_calls]
        return found

    def _call(self, call: ToolCall) -> dict[str, object]:
        """Return a call of an earlier turn.

        Arguments that are no object, such as those of a call that was cut short, are passed as their text,
        and as no arguments where the template takes objects only.
        """
        arguments: object
        try:
            arguments = _object(call.arguments, "arguments")
        except InvalidInput:
            arguments = OriginText(call.arguments) if self._takes_text else {}
        found: dict[str, object] = {"type": "function"}
        found["function"] = {"name": OriginText(call.name), "arguments": arguments}
        return {"id": OriginText(call.id), **found} if call.id else found

    def _further(self, variables: str) -> dict[str, object]:
        """Return the variables of a request. Raises InvalidInput for the names of the template's own."""
        field = "chat.template_variables"
        found = _object(variables, field)
        for name in found:
            if not _VARIABLE.fullmatch(name):
                raise InvalidInput(f"{field} has a name that no template can use", field=field)
            if name in _OWN_VARIABLES or name in self._tokens or name in self._template.globals:
                raise InvalidInput(f"{field} may not set {name}", field=field)
        return {str.__str__(name): value for name, value in found.items()}


def _tool(index: int, tool: Tool) -> dict[str, object]:
    """Return a tool as transformers passes one; ``strict`` is for the server."""
    function: dict[str, object] = {"name": OriginText(tool.name)}
    if tool.description:
        function["description"] = OriginText(tool.description)
    if tool.parameters:
        function["parameters"] = _object(tool.parameters, f"chat.tools[{index}].parameters")
    return {"type": "function", "function": function}


def _object(text: str, field: str) -> dict[Any, Any]:
    """Return a client's JSON object, with every text in it traced; empty for an empty text."""
    try:
        found = msgspec.json.decode(text, type=dict[str, Any]) if text else {}
        return {OriginText(name): _traced(value) for name, value in found.items()}
    except (msgspec.DecodeError, RecursionError):
        raise InvalidInput(f"{field} is not a JSON object", field=field) from None


def _traced(value: Any) -> Any:
    match value:
        case str():
            return OriginText(value)
        case dict():
            return {OriginText(name): _traced(item) for name, item in value.items()}
        case list():
            return [_traced(item) for item in value]
    return value


def _line(exc: BaseException) -> str:
    """Return where in the template an error occurred, empty where that is not recorded."""
    frames = traceback.walk_tb(exc.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
    return f" in line {lines[-1]}" if lines else ""


def _bounded(pieces: Iterable[str], max_chars: int) -> list[str]:
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > max_chars:
            raise TemplateTooCostly("too much text")
        kept.append(piece)
    return kept


def _strftime(clock: Clock) -> Callable[..., object]:
    def strftime_now(text: str) -> str:
        # A large width (%0999d) exhausts memory.
        if len(text) > 256 or not _STRFTIME.fullmatch(text):
            raise TemplateTooCostly("strftime_now takes no widths and at most 256 characters")
        return datetime.fromtimestamp(clock.unix_s(), UTC).strftime(text)

    return strftime_now


_MAX_JSON_BYTES: Final = 64 * 1024 * 1024
_MAX_NUMBER: Final = 2**31 - 1
_SHORT_CHARS: Final = 1024
CONSTRAINT: Final = "sampling.constraint"  # the field that errors name
# A template may require or forbid a system message without any declaration.
_PROBES: Final = (
    (ChatMessage("user", "Hi"),),
    (ChatMessage("system", "Hi"), ChatMessage("user", "Hi")),
    (ChatMessage("user", "Hi"), ChatMessage("assistant", "Hi"), ChatMessage("user", "Hi")),
)
# What a template writes only around calls and results of tools is in no other. An id of nine letters and
# digits, a name and an argument are what some templates require.
_CALL: Final = (ToolCall("probe0001", "probe", '{"x": "Hi"}'),)
_RESULT: Final = ChatMessage("tool", "Hi", name="probe", tool_call_id="probe0001")
_TOOL_PROBES: Final = (
    (ChatMessage("user", "Hi"), ChatMessage("assistant", "", tool_calls=_CALL), _RESULT),
    (
        *(ChatMessage("user", "Hi"), ChatMessage("assistant", "Hi", tool_calls=_CALL), _RESULT),
        *(ChatMessage("assistant", "Hi"), ChatMessage("user", "Hi")),
    ),
)
_MAX_SHOWN: Final = 200
TOOL_USE: Final = "tool_use"
_NAMES: Final = ("default", TOOL_USE)
# A template for requests with tools is tried with one.
_PROBE_TOOLS: Final = (
    Tool("probe", "A tool", '{"type": "object", "properties": {"x": {"type": "string"}}}'),
)


@dataclass(frozen=True, slots=True)
class Templates:
    """A version's chat templates. ``with_tools`` is for requests with tools, where the version has one."""

    default: ChatTemplate | None
    with_tools: ChatTemplate | None = None


class TextEncoder:
    """One version's tokenizer and template. One caller at a time.

    The version's publisher controls both. They may take any time and memory, or crash: they run only in a
    process that is bounded and may crash.
    """

    def __init__(
        self,
        model: TextModel,
        tokenizer: Tokenizer,
        templates: Templates,
        control: ControlTokens,
        unknown: str,
        eos_ids: Sequence[int] = (),
    ) -> None:
        """``unknown`` is the token for text without a token of its own; it is not a control token."""
        self._eos_ids = eos_ids
        self._grammars: Grammars | None = None
        self.model = model
        self.templates = templates
        self.tokenizer = tokenizer
        self.rows: RowEncoder | None = None  # encoder of a decoder that embeds
        self._control = control
        added = tokenizer.get_added_tokens_decoder()
        self._unknown = unknown
        self._control_ids = frozenset(
            token
            for token, entry in added.items()
            if entry.content in control.texts and entry.content != unknown
        )

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Return the ids of a raw prompt, with the tokenizer's own prefix and suffix.

        Control tokens in its text count as such: a raw prompt has no turns, and all of it is the client's.
        """
        return self._in_vocabulary(self._ids(text, special=True))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, control tokens included. Ids without a token have no text."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def encode_chat(
        self, messages: Sequence[ChatMessage], variables: str = "", tools: Sequence[Tool] = ()
    ) -> tuple[int, ...]:
        """Return the ids of a conversation up to the assistant's turn.

        ``variables`` are further ones of the template, a JSON object. No message text becomes a control
        token. Raises UnsupportedFeature without a template, FailedPrecondition with one that renders nothing,
        InvalidInput when it rejects the messages, PromptTooLong beyond its bound.
        """
        if self.model.template_fault:
            raise FailedPrecondition(
                f"this version takes prompts only: {self.model.template_fault}",
                version_digest=self.model.version_digest,
            )
        template = (tools and self.templates.with_tools) or self.templates.default
        if template is None:
            raise UnsupportedFeature("this model has no chat template; send a prompt", field="messages")
        most = self.model.max_prompt_bytes + MAX_TEMPLATE_BYTES
        rendered = template.render(messages, max_chars=most, variables=variables, tools=tools)
        if len(rendered.text) > self.model.max_prompt_bytes:
            raise PromptTooLong(
                f"the rendered messages have {len(rendered.text)} characters, more than the "
                f"{self.model.max_prompt_bytes} bytes that are read for a context of "
                f"{self.model.max_context_tokens} tokens",
                field="messages",
                max_context_tokens=self.model.max_context_tokens,
            )
        ids: list[int] = []
        meant = 0
        for piece in rendered.pieces():
            ids += self._ids(piece, special=False)
            meant += sum(token != self._unknown for token in self._control.spelled(piece))
        if sum(token in self._control_ids for token in ids) > meant:
            raise InvalidInput("a message spells a control token of the model", field="messages")
        return self._in_vocabulary(ids)

    def open_grammars(self) -> None:
        """Prepare the tokenizer for ``check``, once. Raises UnsupportedFeature where that is impossible."""
        if self._grammars is not None:
            return
        from services.adapters.grammars import grammars_of

        try:
            self._grammars = grammars_of(
                self.tokenizer.to_str(), eos_ids=self._eos_ids, vocab_size=self.model.vocab_size
            )
        except TokenizerUnusable as error:
            raise UnsupportedFeature(
                f"this model's tokenizer cannot be constrained: {error}", field=CONSTRAINT
            ) from error

    def check(self, constraint: Constraint) -> Constraint:
        """Return the constraint for workers, if it compiles and an output can begin.

        Raises ConstraintRefused.
        """
        assert self._grammars is not None, "the grammars are not open"
        try:
            exact = self._grammars.exact(constraint)
            self._grammars.compile(exact)
            return exact
        except GrammarRefused as error:
            raise ConstraintRefused(
                f"{constraint.kind} is refused: {error}", field=f"{CONSTRAINT}.{constraint.kind}"
            ) from error

    def _ids(self, text: str, *, special: bool) -> list[int]:
        if len(text) <= _SHORT_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=special).ids
        # The same ids without their offsets, in half the time and memory.
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def _in_vocabulary(self, ids: list[int]) -> tuple[int, ...]:
        if ids and max(ids) >= self.model.vocab_size:
            raise InvalidInput("the text holds a token that the model has no embedding for", field="prompt")
        return tuple(ids)


def load_encoder(folder: Path, version_digest: str, clock: Clock) -> TextEncoder:
    """Return the encoder of a folder of verified files. Blocks on the disk.

    Raises FailedPrecondition that names the unusable file.
    """
    config = read_json(folder / "config.json", required=True)
    generation = read_json(folder / "generation_config.json")
    settings = read_json(folder / "tokenizer_config.json")
    tokenizer, unknown, tokens = read_tokenizer(folder)
    added = tokenizer.get_added_tokens_decoder()
    sources, fault = _template_sources(folder, settings)
    form = form_of(settings, "".join(sources))
    marks = mark_tokens(form, (MarkToken(one.content, id_, one.special) for id_, one in added.items()))
    default, with_tools = (
        _open_template(source, tokens=tokens, clock=clock, tools=tools)
        for source, tools in zip(sources, ((), _PROBE_TOOLS), strict=True)
    )
    control = ControlTokens(_control(added.values(), marks, default.written + with_tools.written))
    templates = Templates(*(one.template and one.template.guarding(control) for one in (default, with_tools)))
    if not fault:
        fault = default.fault or (with_tools.fault and f"the template {TOOL_USE}: {with_tools.fault}")
    text_config = config.get("text_config", config)
    if not isinstance(text_config, dict):
        raise FailedPrecondition("config.json of the version has no usable text_config")
    model = TextModel(
        version_digest,
        vocab_size=_positive(text_config, "vocab_size"),
        max_context_tokens=_context(text_config),
        longest_token_bytes=max((len(text.encode()) for text in tokenizer.get_vocab()), default=1),
        defaults=_defaults(generation),
        depends_on_time=any(one.template and one.template.depends_on_time for one in (default, with_tools)),
        is_guided="guideline" in sources[0],
        template_fault=fault,
        form=form,
        marks=marks,
        openings=reasoning_openings(form, lambda text: tokenizer.encode(text, add_special_tokens=False).ids),
    )
    if unknown in (tokens.get("bos_token"), tokens.get("eos_token")):
        unknown = ""  # it is also a start or end token
    return TextEncoder(model, tokenizer, templates, control, unknown, _eos_ids(folder, generation, config))


def _eos_ids(folder: Path, generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the end-of-sequence tokens as an engine reads them, without a look at what cannot be one."""
    fields = generation if (folder / "generation_config.json").exists() else config
    found = fields.get("eos_token_id")
    return tuple(entry for entry in (found if isinstance(found, list) else [found]) if type(entry) is int)


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Return the object in a file, empty without the file. Raises FailedPrecondition."""
    try:
        data = path.read_bytes() if path.stat().st_size <= _MAX_JSON_BYTES else b""
        return msgspec.json.decode(data, type=dict[str, Any])
    except FileNotFoundError:
        if required:
            raise FailedPrecondition(f"the version has no {path.name}") from None
        return {}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise FailedPrecondition(f"{path.name} of the version is malformed") from exc


class _TokenizerModel(msgspec.Struct):
    unk_token: str | None = None
    unk_id: int | None = None


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that the library does not expose."""

    model: _TokenizerModel


def read_tokenizer(folder: Path) -> tuple[Tokenizer, str, Mapping[str, str]]:
    """Return the tokenizer that the files of a version declare, its token for unknown text, empty without
    one, and its named tokens. Raises FailedPrecondition.
    """

    def read(name: str) -> bytes:
        if (folder / name).stat().st_size > _MAX_JSON_BYTES:
            raise FailedPrecondition(f"{name} of the version is larger than {_MAX_JSON_BYTES} bytes")
        return (folder / name).read_bytes()

    try:
        files = read_tokenizer_files([name for name in FILES if (folder / name).is_file()], read)
        tokenizer = Tokenizer.from_buffer(files.tokenizer)
        model = msgspec.json.decode(files.tokenizer, type=_TokenizerFile).model
    except FileNotFoundError:
        raise FailedPrecondition("the version has no tokenizer.json: it takes no text") from None
    except UnsupportedModel as exc:
        raise FailedPrecondition(f"the version's {exc}") from exc
    except (FairwayError, MemoryError):
        raise
    except Exception as exc:  # the library raises nothing narrower
        raise FailedPrecondition("tokenizer.json of the version is malformed") from exc
    unknown = model.unk_token or (None if model.unk_id is None else tokenizer.id_to_token(model.unk_id))
    # A training script may leave truncation on: a prompt is rejected, never truncated.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, unknown or "", files.named


def _control(added: Iterable[AddedToken], marks: Iterable[MarkToken], written: str) -> list[str]:
    """Return the spellings that no message may have as tokens.

    They are the special tokens, and those that a template writes around turns or tools and no output form
    has: many publishers leave the marks of turns unflagged.
    """
    free = {mark.text for mark in marks}
    return [
        token.content
        for token in added
        if token.special
        or (token.content in written and token.content not in free and not token.content.isspace())
    ]


def _template_sources(folder: Path, settings: Mapping[str, Any]) -> tuple[tuple[str, str], str]:
    """Return the templates for requests without and with tools, as transformers takes them, and what is
    wrong with them. Files go before the settings; an empty source is no template.
    """
    try:
        sources = {Path(name).stem: _template_file(folder, name) for name in TEMPLATES}
    except FailedPrecondition as error:
        return ("", ""), _shown(error)
    files = {name: source for name, source in sources.items() if source}
    if "chat_template" in files:
        files.setdefault("default", files["chat_template"])
    found: Any = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    named: Mapping[Any, Any] = files or (found if isinstance(found, dict) else {"default": found})
    default, tools = (source if isinstance(source := named.get(name), str) else "" for name in _NAMES)
    return (default, tools), ""


def _template_file(folder: Path, name: str) -> str:
    file = folder / name
    if not file.is_file():
        return ""
    if file.stat().st_size > MAX_TEMPLATE_BYTES:
        raise FailedPrecondition(f"{name} is longer than {MAX_TEMPLATE_BYTES} bytes")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise FailedPrecondition(f"{name} of the version is malformed") from exc


def _context(text_config: Mapping[str, Any]) -> int:
    try:
        return context_of(text_config)
    except UnsupportedModel as error:
        raise FailedPrecondition(f"config.json of the version: {error}") from error


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_NUMBER:
        raise FailedPrecondition(f"config.json of the version has no usable {name}")
    return value


def _defaults(generation: Mapping[str, Any]) -> SamplingDefaults:
    try:
        return SamplingDefaults(**sampling_defaults(generation))
    except UnsupportedModel as error:
        raise FailedPrecondition(f"the version's {error}") from error


@dataclass(frozen=True, slots=True)
class _Opened:
    template: ChatTemplate | None = None
    fault: str = ""  # why it renders no conversation
    written: str = ""  # its text of the conversations that it was tried with


def _open_template(source: str, *, tokens: Mapping[str, str], clock: Clock, tools: Sequence[Tool]) -> _Opened:
    """Return the template, without control tokens, after a few conversations. An empty source is none."""
    if not source:
        return _Opened()
    try:
        template = ChatTemplate(source, control=ControlTokens(()), tokens=tokens, clock=clock)
    except FailedPrecondition as error:
        return _Opened(fault=_shown(error))
    faults: list[str] = []
    written: list[str] = []
    works = False
    for messages in _PROBES:
        try:
            written.append(template.render(messages, max_chars=MAX_TEMPLATE_BYTES, tools=tools).text)
        except (FailedPrecondition, InvalidInput) as error:
            # A deliberate rejection: the template works.
            works = works or isinstance(error.__cause__, TemplateRefused)
            if isinstance(error.__cause__, TemplateTooCostly):  # other conversations would take as long
                faults = [_shown(error)]
                break
            faults.append(_shown(error))
    fault = "" if works or written else faults[0]
    if not fault:
        written += _written_around_tools(template)
    return _Opened(template, fault, "".join(written))


def _written_around_tools(template: ChatTemplate) -> Iterator[str]:
    """Yield a template's text of conversations with tools. It need not render them."""
    for messages in (*_TOOL_PROBES, *_PROBES):
        try:
            yield template.render(messages, max_chars=MAX_TEMPLATE_BYTES, tools=_PROBE_TOOLS).text
        except (FailedPrecondition, InvalidInput) as error:
            if isinstance(error.__cause__, TemplateTooCostly):
                return


def _shown(error: FailedPrecondition | InvalidInput) -> str:
    """Return an error with its cause, which contains no client text here."""
    cause = str(error.__cause__ or "")[:_MAX_SHOWN]
    return error.message if not cause or cause in error.message else f"{error.message}: {cause}"
