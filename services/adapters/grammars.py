"""``Grammars`` by llguidance: an Earley parser over lexemes whose automata are built as they are needed.

The only module that imports llguidance. Its limits hold for every constraint: a compilation, and then each
step, stops where it needs more fuel, items, states or symbols than these. Messages quote the constraint only
(``verbose_errors`` is off), and nothing is logged.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from services.adapters.json_schemas import exact_schema, read
from services.core.generation import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from services.ports.grammars import Bits, GrammarRefused, MaskRequest, TokenizerUnusable

MAX_COMPILED: Final = 64  # grammars that are kept for requests to come
MAX_SHOWN: Final = 300  # characters of a message
# What writers of JSON put between its tokens; small models would continue for ever with more blanks.
WHITESPACE: Final = r"(\x20|\x0A[\x20\x09]{0,16})?"
# The engine's options for each schema replace a client's. With \u, a free property could take the name of
# another.
_OPTIONS: Final[dict[str, object]] = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "json_allowed_escapes": 'nrbtf"\\',
}
# What may hide the mark of a schema in a grammar, as the engine reads it: texts, patterns, tokens, comments.
_LARK: Final = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\])+/|#[^\n]*|<[^<>\s]+>|%json')


# What one constraint may take.
LIMITS: Final = llguidance.LLParserLimits(
    # Items in one row of the parser's chart.
    max_items_in_row=1000,
    # Fuel of the lexer while the grammar is compiled, about 20 ms.
    initial_lexer_fuel=1_000_000,
    # Fuel of the lexer in one step, about 7 ms.
    step_lexer_fuel=100_000,
    # Items of the parser in one step, about 1 ms.
    step_max_items=20_000,
    # States of the lexer, at 1 to 2 kB each.
    max_lexer_states=20_000,
    # Symbols in the productions of the grammar.
    max_grammar_size=50_000,
    verbose_errors=False,
)


class GuidanceMatcher:
    """Implements ``Matcher``."""

    def __init__(self, native: llguidance.LLMatcher, eos_ids: frozenset[int]) -> None:
        self.native = native
        self._eos_ids = eos_ids
        self._refusal = ""

    def consume(self, tokens: Sequence[int]) -> None:
        """See ``Matcher``. A complete output may go on with ends of sequence, where these are ignored."""
        native = self.native
        if tokens and not self._refusal:
            rest = tokens[native.try_consume_tokens(list(tokens)) :]
            if native.is_error():
                self._refusal = _shown(native.get_error())
            elif rest and not (native.is_stopped() and self._eos_ids.issuperset(rest)):
                self._refusal = f"token {rest[0]} of the output does not fit it"
        if self._refusal:
            raise GrammarRefused(self._refusal)

    def fitting(self, tokens: Sequence[int]) -> int:
        """See ``Matcher``."""
        found: int = self.native.validate_tokens(list(tokens))
        return found


class GuidanceGrammars:
    """Implements ``Grammars``. A compiled grammar is kept and copied for the next request with it."""

    def __init__(
        self,
        tokenizer: llguidance.LLTokenizer,
        *,
        eos_ids: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._executor = llguidance.LLExecutor(num_threads=1)
        self._row_bytes = -(-int(tokenizer.vocab_size) // 32) * 4
        self._eos_ids = frozenset(eos_ids)
        self._end = bytearray(self._row_bytes)  # the mask of an output that can only end
        for token in eos_ids:
            self._end[token // 8] |= 1 << token % 8
        self._compiled: OrderedDict[Constraint, llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # guards the kept grammars

    @property
    def row_bytes(self) -> int:
        """See ``Grammars``."""
        return self._row_bytes

    def exact(self, constraint: Constraint) -> Constraint:
        """See ``Grammars``. One that becomes longer than a constraint may be is returned as it is."""
        write = _EXACT.get(constraint.kind)
        if constraint.exact or write is None:
            return constraint
        source = _written(constraint.source, write)
        fits = len(source.encode()) <= MAX_CONSTRAINT_BYTES
        return replace(constraint, source=source, exact=True) if fits else constraint

    def compile(self, constraint: Constraint) -> GuidanceMatcher:
        """See ``Grammars``. The first mask is computed as well: some grammars fail only there."""
        with self._lock:
            kept = self._compiled.get(constraint)
            if kept is not None:
                self._compiled.move_to_end(constraint)
                return GuidanceMatcher(kept.deep_copy(), self._eos_ids)
        native = llguidance.LLMatcher(self._tokenizer, _grammar(constraint), log_level=0, limits=LIMITS)
        if not native.is_error():
            native.compute_bitmask()
        if native.is_error():
            raise GrammarRefused(_shown(native.get_error()))
        with self._lock:
            self._compiled[constraint] = native
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return GuidanceMatcher(native.deep_copy(), self._eos_ids)

    def fill(self, requests: Sequence[MaskRequest], into: Bits) -> dict[int, str]:
        """See ``Grammars``. The calling thread computes; the interpreter's lock is free meanwhile."""
        problems: dict[int, str] = {}
        steps: list[tuple[llguidance.LLMatcher, int, list[int]]] = []
        for request in requests:
            matcher = request.matcher
            assert isinstance(matcher, GuidanceMatcher), "a matcher of other grammars"
            try:
                matcher.consume(request.produced)
            except GrammarRefused as refused:
                problems[request.row] = str(refused)
                continue
            if matcher.native.is_stopped() and not matcher.native.is_error():
                into[request.row : request.row + 1 + len(request.proposals)] = self._end
            else:
                steps.append((matcher.native, request.row, list(request.proposals)))
        if steps:
            self._fill(steps, into)
        for native, row, _ in steps:
            if native.is_error():
                problems[row] = _shown(native.get_error())
        return problems

    def _fill(self, steps: list[tuple[llguidance.LLMatcher, int, list[int]]], into: Bits) -> None:
        rows, width = into.shape
        assert into.flags.c_contiguous, "masks are written in place"
        assert width == self._row_bytes, "a mask of another vocabulary"
        for native, row, proposals in steps:
            if not proposals:
                native.unsafe_compute_mask_ptr(into.ctypes.data + row * width, width)
        ahead = [each for each in steps if each[2]]
        if ahead:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(ahead, into.ctypes.data, width, rows)


def grammars_of(
    source: str,
    *,
    eos_ids: Sequence[int],
    vocab_size: int,
) -> GuidanceGrammars:
    """Return the grammars of a tokenizer.json; takes up to a second for 131k tokens.

    Raises TokenizerUnusable, also where the version names no end of sequence.
    """
    if not eos_ids:
        raise TokenizerUnusable("the version names no end-of-sequence token")
    try:
        tokenizer = llguidance.LLTokenizer(source, eos_token=sorted(eos_ids))
        if tokenizer.vocab_size < vocab_size:
            tokenizer = llguidance.LLTokenizer(source, n_vocab=vocab_size, eos_token=sorted(eos_ids))
    except ValueError as error:
        raise TokenizerUnusable(_shown(str(error))) from error
    return GuidanceGrammars(tokenizer, eos_ids=sorted(eos_ids))


def _grammar(constraint: Constraint) -> str:
    """Return the constraint in llguidance's own form. Raises GrammarRefused."""
    write, exact = _WRITERS[constraint.kind], _EXACT.get(constraint.kind)
    if exact is None or constraint.exact:
        return _written(constraint.source, write)
    return _written(constraint.source, lambda source: write(exact(source)))


def _written(source: str, write: Callable[[str], str]) -> str:
    """Return a constraint's source in another form. Raises GrammarRefused."""
    if len(source.encode()) > MAX_CONSTRAINT_BYTES:
        raise GrammarRefused(f"it is longer than {MAX_CONSTRAINT_BYTES} bytes")
    try:
        return write(source)
    except RecursionError:
        raise GrammarRefused("it nests too deep") from None
    except (ValueError, TypeError, ArithmeticError) as error:
        raise GrammarRefused(_shown(str(error))) from error


def _exact_schema(source: str) -> str:
    schema, end = read(source)
    if source[end:].strip():
        raise GrammarRefused("it is more than one JSON value")
    return exact_schema(schema, _OPTIONS)


def _exact_grammar(source: str) -> str:
    """Schemas within a grammar are those of JSON Schema too, without the options of the engine."""
    text, pieces, done = any_to_lark(source), [], 0
    for found in _LARK.finditer(text):
        if found[0] == "%json":
            schema, end = read(text, found.end())
            pieces += [text[done : found.end()], exact_schema(schema, _OPTIONS)]
            done = end
    return "".join((*pieces, text[done:]))


def _choice(source: str) -> str:
    choices: Any = json.loads(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise GrammarRefused("it is no list of strings")
    found: str = llguidance.grammar_from("choice", source)
    return found


# How the engine takes the source of each kind with schemas.
_EXACT: Final[dict[ConstraintKind, Callable[[str], str]]] = {
    ConstraintKind.JSON_SCHEMA: _exact_schema,
    ConstraintKind.GRAMMAR: _exact_grammar,
}
# An exact source in llguidance's own form.
_WRITERS: Final[dict[ConstraintKind, Callable[[str], str]]] = {
    ConstraintKind.JSON_SCHEMA: llguidance.LLMatcher.grammar_from_json_schema,
    ConstraintKind.REGEX: llguidance.LLMatcher.grammar_from_regex,
    ConstraintKind.CHOICE: _choice,
    ConstraintKind.GRAMMAR: llguidance.LLMatcher.grammar_from_lark,
}


# What a grammar is refused with that compiles and then has no first token, or exceeds a limit of a step.
_REASONS: Final = {
    "NoExtensionBias": "no output can match it",
    "NoExtension": "no output can match it",
    "ParserTooComplex": "it needs more parser items than one step may take",
    "LexerTooComplex": "it needs more lexer fuel or states than it may take",
}


def _shown(message: str) -> str:
    """Return a message in one line of bounded length."""
    line = " ".join(message.replace("<non-verbose/>", "").split())
    line = _REASONS.get(line, line)
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}..."
