"""The Jinja environment of chat templates: the features of transformers, within a budget.

Jinja's sandbox blocks Python's internals and limits ``range`` to 100,000, but allows ``'a' * 10**9``,
doubling by ``~``, ``'%999999999d'``, padding and nested loops. Here loop steps and characters are charged to
a budget, most of them before the operation, and widths are bounded, so that a template that computes too much
ends with an error of its own. The budget need not catch everything: the kernel bounds the process that
renders. An allow-list defines what a template may call. Templates come only from model versions; their
messages come from clients, as ``OriginText`` text.

Not offered, since the same messages must give the same text: ``random`` and ``lipsum``. Also not offered:
``autoescape`` and everything that needs further files.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace
from markupsafe import Markup

from services.gateway.text.traced_text import OriginText, concat, join, replaced, settled

MAX_INT_BITS: Final = 128

# A name that no template can spell: it contains a blank.
BUDGET: Final = "fairway budget"


class TemplateRefused(Exception):
    """The template called ``raise_exception``; the text is from its author."""


class TemplateTooCostly(Exception):
    """The template exceeded its characters, steps or time."""


class TemplateBudget:
    """The remaining budget of one rendering. Any thread, one at a time."""

    def __init__(
        self, *, max_chars: int, max_steps: int, deadline_s: float, monotonic_s: Callable[[], float]
    ) -> None:
        self._chars_left = max_chars
        self._steps_left = max_steps
        self._deadline_s = deadline_s
        self._monotonic_s = monotonic_s

    def charge(self, chars: int = 0) -> None:
        """Count one step and some characters. Raises TemplateTooCostly."""
        self._steps_left -= 1
        self._chars_left -= chars
        if self._chars_left < 0:
            raise TemplateTooCostly("too much text")
        if self._steps_left < 0:
            raise TemplateTooCostly("too many steps")
        if self._monotonic_s() > self._deadline_s:
            raise TemplateTooCostly("too much time")


def weight(value: object, budget: TemplateBudget) -> int:
    """Charge and return the approximate length of ``str(value)``, without building it."""
    if isinstance(value, str):
        budget.charge(len(value))
        return len(value)
    size = 24
    if isinstance(value, int):
        check_int(value)
    budget.charge(size)
    if isinstance(value, Mapping):
        size += sum(weight(key, budget) + weight(item, budget) for key, item in value.items())
    elif isinstance(value, list | tuple):
        size += sum(weight(item, budget) for item in value)
    return size


def check_int(value: int) -> None:
    if value.bit_length() > MAX_INT_BITS:
        raise TemplateTooCostly("a number is too large")


def budget_of(context: Context) -> TemplateBudget:
    found = context.resolve_or_missing(BUDGET)
    assert isinstance(found, TemplateBudget), "a template is rendered without a budget"
    return found


MAX_TEMPLATE_BYTES: Final = 128 * 1024
MAX_LIST_ITEMS: Final = 100_000
MAX_WIDTH: Final = 4096
MAX_FORMAT_CHARS: Final = 16 * 1024 * 1024

# Filters that only select, order or count their input: its text keeps its origin without help.
# fmt: off
_PICKING_FILTERS: Final = frozenset(
    (
        "abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby",
        "int", "items", "last", "length", "list", "map", "max", "min", "reject", "rejectattr",
        "reverse", "round", "select", "selectattr", "slice", "sort", "sum", "unique", "wordcount",
    )
)
_PADDING_METHODS: Final = frozenset(("center", "expandtabs", "ljust", "rjust", "zfill"))
_EXACT: Final = (str, OriginText)  # texts that keep their origin through operators and methods
_NOT_OFFERED: Final = frozenset(("encode", "format", "format_map"))
# fmt: on
_STR_METHODS: Final = frozenset(
    name for name in dir(Markup) if not name.startswith("_") and name not in _NOT_OFFERED
)
_DICT_METHODS: Final = frozenset(("copy", "get", "items", "keys", "values"))
_LIST_METHODS: Final = frozenset(("copy", "count", "index"))
_NUMBER_METHODS: Final = frozenset(("bit_length", "is_integer"))
_METHODS: Final = (
    (str, _STR_METHODS),
    (Mapping, _DICT_METHODS),
    (list, _LIST_METHODS),
    (tuple, _LIST_METHODS),
    (int, _NUMBER_METHODS),
    (float, _NUMBER_METHODS),
)
_WIDTH: Final = re.compile(r"[0-9]+")
_PERCENT_WIDTH: Final = re.compile(r"%(?:\([^)]*\))?[#0\- +]*([0-9]*\*?)(?:\.([0-9]*\*?))?")


@jinja2.pass_context
def _each(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """The iterator of every loop: the same items, each charged."""
    budget = budget_of(context)
    for item in items:
        budget.charge()
        yield item


@jinja2.pass_context
def _text(context: Context, data: str) -> str:
    """Literal text inside a loop or a macro, charged."""
    budget_of(context).charge(len(data))
    return data


@jinja2.pass_context
def _concat(context: Context, *parts: Any) -> str:
    return concat([_finalize(context, part) for part in parts])


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> str:
    """The text of any value in the output; charged."""
    if isinstance(value, str):
        budget_of(context).charge(len(value))
        return str(value)
    weight(value, budget_of(context))
    text: str = settled(str, (value,), {})
    return text


@jinja2.pass_context
def _join(context: Context, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    budget = budget_of(context)
    items: Iterable[Any] = _each(context, value)
    if attribute is not None:
        items = map(make_attrgetter(context.environment, attribute), items)
    parts = [_finalize(context, item) for item in items]
    separator = _finalize(context, d)
    budget.charge(len(separator) * len(parts))
    return join(separator, parts)


@jinja2.pass_context
def _replace(context: Context, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    source, before, after = (_finalize(context, value) for value in (s, old, new))
    times = source.count(before)
    if count is not None and count >= 0:
        times = min(times, count)
    budget_of(context).charge(times * max(0, len(after) - len(before)))
    return replaced(source, before, after, -1 if count is None else count)


@jinja2.pass_context
def _string(context: Context, value: Any) -> str:
    return value if isinstance(value, str) else _finalize(context, value)


@jinja2.pass_context
def _trim(context: Context, value: Any, chars: str | None = None) -> str:
    text = _string(context, value)
    budget_of(context).charge(len(text))
    return text.strip(chars)


@jinja2.pass_context
def _tojson(
    context: Context,
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as chat templates expect it."""
    if isinstance(indent, int):
        _check_width(indent)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    budget, parts = budget_of(context), []
    for part in encoder.iterencode(x):
        budget.charge(len(part))
        parts.append(part)
    return "".join(parts)


@jinja2.pass_context
def _indent(context: Context, s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    if not isinstance(width, str):
        _check_width(width)
        width = " " * width
    text = _finalize(context, s)
    # Jinja appends a newline, so that an empty last line counts as a line.
    lines = (text + "\n").splitlines()
    budget_of(context).charge(len(text) + (len(width) + 1) * len(lines))
    wanted = [first, *(bool(line) or blank for line in lines[1:])]
    return join("\n", [width + line if pads else line for line, pads in zip(lines, wanted, strict=True)])


@jinja2.pass_context
def _center(context: Context, value: Any, width: int = 80) -> str:
    _check_width(width)
    return str(value).center(width)


@jinja2.pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
    if args and kwargs:
        raise jinja2.exceptions.FilterArgumentError("format takes values by position or by name")
    text = value if isinstance(value, str) else str(value)
    _check_percent(text, kwargs or args, budget_of(context))
    return text % (kwargs or args)


def _traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that keeps the origin of its text's characters; charged."""
    wants = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @jinja2.pass_context
    def run(context: Context, *args: Any, **kwargs: Any) -> Any:
        weight((args, kwargs), budget_of(context))
        found = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        filled = functools.partial(function, found[wants]) if wants else function
        return settled(filled, args, kwargs)

    return run


def _raise_exception(message: object) -> None:
    raise TemplateRefused(str(message)[:300])


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text, for training; here its content passes through."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block with its own scope, as in transformers: its variables are not visible after it.
        return nodes.CallBlock(self.call_method("content"), [], [], body).set_lineno(line)

    def content(self, caller: Macro) -> str:
        return caller()


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        found = dict(*rest, **kwargs)
        for name in found:
            _check_name(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError("a name in a namespace begins with an underscore")


class _Dict:
    """The type ``dict`` without the methods of every Python type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Formatter(SandboxedFormatter):
    """``str.format`` for one call, with bounded widths and a bounded result."""

    chars = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        for width in _WIDTH.findall(format_spec):
            _check_width(int(width[:9]))
        text = super().format_field(value, format_spec)
        self.chars += len(text)
        if self.chars > MAX_FORMAT_CHARS:
            raise TemplateTooCostly("too much text")
        return text


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """Rendering needs a TemplateBudget in the context under the name ``BUDGET``."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def __init__(self, extra_globals: Mapping[str, Callable[..., object]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            optimized=False,
            cache_size=0,
            finalize=_finalize,
            extensions=[loopcontrols, _GenerationTag],
        )
        own: dict[str, Any] = {"tojson": _tojson, "center": _center, "format": _format}
        self.filters.update(own)
        self.filters = {
            name: found if name in _PICKING_FILTERS else _traced(found)
            for name, found in self.filters.items()
            if name != "random"
        }
        # These keep the origin themselves.
        self.filters |= {
            "each ": _each, "text ": _text, "concat ": _concat, "join": _join, "replace": _replace,
            "indent": _indent, "string": _string, "trim": _trim,
        }  # fmt: skip
        self.globals = {
            "range": self.globals["range"],
            "dict": _Dict(),
            "namespace": _Namespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            **extra_globals,
        }

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of a macro, a block or an assignment."""
        return concat(parts)

    def is_safe_callable(self, obj: Any) -> bool:
        owner = getattr(obj, "__self__", None)
        for kind, allowed in _METHODS:
            if isinstance(owner, kind):
                return getattr(obj, "__name__", "") in allowed
        # Of other objects, only Jinja's own and those here have methods: (2).to_bytes(10**9) is not allowed.
        known = owner is None or isinstance(owner, LoopContext | Cycler | _GenerationTag | _Dict)
        return known and super().is_safe_callable(obj)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandbox's ``format`` for ``str.format``, with bounded widths."""
        stock = super().wrap_str_format(value)
        text = getattr(value, "__self__", None)
        if stock is None or isinstance(text, Markup) or not isinstance(text, str):
            return stock

        def format_map(values: Mapping[str, Any]) -> str:
            return _Formatter(self).vformat(text, (), values)

        def format(*args: Any, **kwargs: Any) -> str:
            return _Formatter(self).vformat(text, args, kwargs)

        return format_map if value.__name__ == "format_map" else format

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of(__context)
        budget.charge()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(__obj, LoopContext) and args:  # a recursive loop
            args = (_each(__context, args[0]), *args[1:])
        if not isinstance(owner, str) and _moves_values(__obj, owner):
            return super().call(__context, __obj, *args, **kwargs)
        for scope in ("_loop_vars", "_block_vars"):  # generated code passes these to every call
            kwargs.pop(scope, None)
        if not isinstance(owner, str):
            return settled(functools.partial(super().call, __context, __obj), args, kwargs)
        if not __self.is_safe_callable(__obj):
            raise jinja2.exceptions.SecurityError("this method of a text is not offered")
        if name in ("join", "replace") and not isinstance(owner, Markup):
            return __self._built(__context, owner, name, *args, **kwargs)
        weight((owner, args), budget)
        if name in _PADDING_METHODS:
            for value in (*args, *kwargs.values()):
                _check_width(value)
        return settled(
            lambda text, *rest, **named: getattr(text, name)(*rest, **named), (owner, *args), kwargs
        )

    def _built(self, context: Context, text: str, name: str, *args: Any) -> str:
        """``str.join`` and ``str.replace``, which take only texts, while the filters accept any value."""
        first, *others = args
        parts = list(_each(context, first)) if name == "join" else [first, *others[:1]]
        if not all(isinstance(part, str) for part in parts):
            raise TypeError(f"{name} takes texts")
        return _join(context, parts, text) if name == "join" else _replace(context, text, *args)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = budget_of(context)
        if operator == "+" and type(left) in _EXACT and type(right) in _EXACT:
            budget.charge(len(left) + len(right))
            return left + right
        budget.charge()
        if operator == "+":
            for side in (left, right):
                if isinstance(side, str):
                    budget.charge(len(side))
                elif isinstance(side, list | tuple):
                    _check_items(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_percent(left, right, budget)
        else:
            _check_product(operator, left, right, budget)
        return settled(functools.partial(super().call_binop, context, operator), (left, right), {})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for kind in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends):
            if template.find(kind) is not None:
                raise jinja2.TemplateSyntaxError("a chat template is one file", 1)
        if template.find(nodes.ScopedEvalContextModifier) is not None:
            raise jinja2.TemplateSyntaxError("autoescape is not offered", 1)
        _instrument(template, repeated=False)
        return template


def _moves_values(obj: Any, owner: Any) -> bool:
    """Return whether a callable makes no text of its arguments that lacks its origin."""
    return (
        isinstance(obj, Macro | LoopContext | BlockReference | Joiner | _Dict)
        or isinstance(owner, Mapping | list | tuple | LoopContext | Cycler | _GenerationTag | _Dict)
        or any(obj is known for known in (_Namespace, Cycler, Joiner, _raise_exception))
    )


def _check_width(value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_WIDTH:
        raise TemplateTooCostly("a width is too large")


def _check_percent(text: str, values: Any, budget: TemplateBudget) -> None:
    """Charge ``text % values``. Raises TemplateTooCostly."""
    budget.charge(len(text) + text.count("%") * weight(values, budget))
    for found in _PERCENT_WIDTH.finditer(text):
        for width in found.groups(""):
            if width.endswith("*"):
                for value in values if isinstance(values, tuple) else (values,):
                    _check_width(value)
            elif width:
                _check_width(int(width[:9]))


def _check_items(count: int) -> None:
    if count > MAX_LIST_ITEMS:
        raise TemplateTooCostly("a list is too long")


def _check_product(operator: str, left: Any, right: Any, budget: TemplateBudget) -> None:
    """Raise TemplateTooCostly if the result of ``left operator right`` would be large, before it is built."""
    for number, sequence in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple):
            if operator != "*" or not isinstance(number, int):
                raise TemplateTooCostly(f"{operator} of text is not offered")
            budget.charge(len(sequence) * max(0, number))
            if not isinstance(sequence, str):
                _check_items(len(sequence) * max(0, number))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        bits = bits * max(1, abs(right)) if operator == "**" else bits + right.bit_length()
        if bits > MAX_INT_BITS:
            raise TemplateTooCostly("a number is too large")


def _instrument(node: nodes.Node, *, repeated: bool) -> None:
    """Rewrite a parsed template so that loops, ``~`` and repeated literal text are charged."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [_rewritten(item, repeated, node) for item in value])
        elif isinstance(value, nodes.Node):
            setattr(node, name, _rewritten(value, repeated, node))
    if isinstance(node, nodes.For):
        node.iter = nodes.Filter(node.iter, "each ", [], [], None, None, lineno=node.lineno)


def _rewritten(value: Any, repeated: bool, parent: nodes.Node) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    inside = repeated or isinstance(parent, nodes.For | nodes.Macro | nodes.CallBlock)
    if isinstance(value, nodes.TemplateData):
        if not inside:
            return value
        text = nodes.Const(value.data, lineno=value.lineno)
        return nodes.Filter(text, "text ", [], [], None, None, lineno=value.lineno)
    _instrument(value, repeated=inside)
    if isinstance(value, nodes.Concat):
        first, *rest = value.nodes
        return nodes.Filter(first, "concat ", rest, [], None, None, lineno=value.lineno)
    return value
