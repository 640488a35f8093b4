"""A Jinja environment in which every template ends soon and small, whatever it computes.

Jinja's sandbox keeps a template away from Python's internals and ``range`` below 100,000, but allows
``'a' * 10**9``, doubling by ``~``, ``'%999999999d'``, padding and nested loops. Here each operation that
makes text or repeats is charged to a budget before it happens: loop steps and characters are counted,
the deadline is read along the way, and whatever cannot be charged (padding, ``format``, imports) is
not there. What a template may call is an allow-list. Templates come from model versions alone; the
messages that they read come from clients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_BYTES: Final = 128 * 1024
MAX_LIST_ITEMS: Final = 100_000
MAX_INT_BITS: Final = 128

# A name that no template can spell: it holds a blank.
BUDGET: Final = "fairway budget"

# fmt: off
_FILTERS: Final = frozenset(
    (
        "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby",
        "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject",
        "rejectattr", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum",
        "title", "trim", "unique", "upper",
    )
)
_STR_METHODS: Final = frozenset(
    (
        "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal",
        "isdigit", "islower", "isspace", "istitle", "isupper", "join", "lower", "lstrip",
        "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition",
        "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title",
        "upper",
    )
)
# fmt: on
_DICT_METHODS: Final = frozenset(("get", "items", "keys", "values"))
_LIST_METHODS: Final = frozenset(("count", "index"))
_METHODS: Final = ((str, _STR_METHODS), (dict, _DICT_METHODS), (list, _LIST_METHODS), (tuple, _LIST_METHODS))


class TemplateRefused(Exception):
    """The template called ``raise_exception``; the text is its author's."""


class BudgetExceeded(Exception):
    """The template asked for more characters, steps or time than it is given."""


class Budget:
    """What one rendering may still use. Any thread, one at a time."""

    def __init__(
        self, *, max_chars: int, max_steps: int, deadline_s: float, monotonic_s: Callable[[], float]
    ) -> None:
        self._chars_left = max_chars
        self._steps_left = max_steps
        self._deadline_s = deadline_s
        self._monotonic_s = monotonic_s

    def charge(self, chars: int = 0) -> None:
        """Count one step and some characters. Raises BudgetExceeded."""
        self._steps_left -= 1
        self._chars_left -= chars
        if self._chars_left < 0:
            raise BudgetExceeded("too much text")
        if self._steps_left < 0:
            raise BudgetExceeded("too many steps")
        if self._monotonic_s() > self._deadline_s:
            raise BudgetExceeded("too much time")


def weight(value: object, budget: Budget) -> int:
    """Charge and return about how many characters ``str(value)`` has, without making them."""
    size = len(value) if isinstance(value, str) else 24
    if isinstance(value, int):
        _check_int(value)
    budget.charge(size)
    if isinstance(value, Mapping):
        size += sum(weight(key, budget) + weight(item, budget) for key, item in value.items())
    elif isinstance(value, list | tuple):
        size += sum(weight(item, budget) for item in value)
    return size


def _check_int(value: int) -> None:
    if value.bit_length() > MAX_INT_BITS:
        raise BudgetExceeded("a number is too large")


def _budget(context: Context) -> Budget:
    found = context.resolve_or_missing(BUDGET)
    assert isinstance(found, Budget), "a template is rendered without a budget"
    return found


@jinja2.pass_context
def _each(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """What every loop iterates over: the same items, each charged."""
    budget = _budget(context)
    for item in items:
        budget.charge()
        yield item


@jinja2.pass_context
def _text(context: Context, data: str) -> str:
    """Literal text inside a loop or a macro, charged."""
    _budget(context).charge(len(data))
    return data


@jinja2.pass_context
def _concat(context: Context, *parts: Any) -> str:
    budget = _budget(context)
    for part in parts:
        weight(part, budget)
    return "".join(str(part) for part in parts)


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> str:
    weight(value, _budget(context))
    return str(value)


@jinja2.pass_context
def _join(context: Context, items: Iterable[Any], d: Any = "", attribute: str | None = None) -> str:
    if attribute is not None:
        raise BudgetExceeded("join by attribute is not offered")
    budget = _budget(context)
    parts = list(_each(context, items))
    if isinstance(d, str) and len(parts) > 1:
        budget.charge(len(d) * (len(parts) - 1))
    for part in parts:
        weight(part, budget)
    return str(d).join(str(part) for part in parts)


@jinja2.pass_context
def _replace(context: Context, text: Any, old: str, new: str, count: int | None = None) -> str:
    source = str(text)
    found = source.count(str(old))
    times = found if count is None or count < 0 else min(found, count)
    _budget(context).charge(len(source) + times * max(0, len(str(new)) - len(str(old))))
    return source.replace(str(old), str(new), -1 if count is None else count)


@jinja2.pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as chat templates are written for."""
    if indent is not None and not 0 <= indent <= 16:
        raise BudgetExceeded("tojson indents by 0 to 16")
    budget, parts = _budget(context), []
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, allow_nan=False
    )
    for part in encoder.iterencode(value):
        budget.charge(len(part))
        parts.append(part)
    return "".join(parts)


@jinja2.pass_context
def _indent(context: Context, text: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    if not isinstance(width, int) or not 0 <= width <= 64:
        raise BudgetExceeded("indent is by 0 to 64")
    lines = str(text).splitlines()
    _budget(context).charge(sum(map(len, lines)) + (width + 1) * len(lines))
    pad = " " * width
    wanted = [(index > 0 or first) and (bool(line) or blank) for index, line in enumerate(lines)]
    return "\n".join(pad + line if pads else line for line, pads in zip(lines, wanted, strict=True))


def _raise_exception(message: object) -> None:
    raise TemplateRefused(str(message)[:300])


class _GenerationTag(Extension):
    """``{% generation %}`` marks what an assistant said, for training; here its content passes through."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BudgetedEnvironment(ImmutableSandboxedEnvironment):
    """Rendering needs a Budget in the context under the name ``BUDGET``."""

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
        own: dict[str, Any] = {
            "each ": _each, "text ": _text, "concat ": _concat, "join": _join, "replace": _replace,
            "tojson": _tojson, "indent": _indent,
        }  # fmt: skip
        self.filters = {name: found for name, found in self.filters.items() if name in _FILTERS} | own
        self.filters["string"] = _finalize
        kept = ("range", "dict", "namespace")
        self.globals = {name: self.globals[name] for name in kept} | {"raise_exception": _raise_exception}
        self.globals.update(extra_globals)

    def is_safe_callable(self, obj: Any) -> bool:
        owner = getattr(obj, "__self__", None)
        for kind, allowed in _METHODS:
            if isinstance(owner, kind):
                return getattr(obj, "__name__", "") in allowed
        # Of other objects only Jinja's own have methods that are worth calling: (2).to_bytes(10**9) is none.
        known = owner is None or isinstance(owner, LoopContext)
        return known and super().is_safe_callable(obj)

    def wrap_str_format(self, value: Any) -> None:
        """Keep ``str.format`` a plain method, which is then refused: its widths are bombs."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget(__context).charge()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "join":
            return _join(__context, _only(args), owner)
        if isinstance(owner, str) and name == "replace":
            return _replace(__context, owner, *args, **kwargs)
        if isinstance(owner, str):
            _budget(__context).charge(len(owner))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        budget.charge()
        if operator == "+":
            for side in (left, right):
                if isinstance(side, str):
                    budget.charge(len(side))
                elif isinstance(side, list | tuple):
                    _check_items(len(left) + len(right))
        else:
            _check_product(operator, left, right, budget)
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for kind in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends):
            if template.find(kind) is not None:
                raise jinja2.TemplateSyntaxError("a chat template is one file", 1)
        if any(loop.recursive for loop in template.find_all(nodes.For)):
            raise jinja2.TemplateSyntaxError("recursive loops are not offered", 1)
        _instrument(template, repeated=False)
        return template


def _only(args: tuple[Any, ...]) -> Any:
    if len(args) != 1:
        raise TypeError("join takes one argument")
    return args[0]


def _check_items(count: int) -> None:
    if count > MAX_LIST_ITEMS:
        raise BudgetExceeded("a list is too long")


def _check_product(operator: str, left: Any, right: Any, budget: Budget) -> None:
    """Raise BudgetExceeded when ``left operator right`` is large, before it is made."""
    for number, sequence in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple):
            if operator != "*" or not isinstance(number, int):
                raise BudgetExceeded(f"{operator} of text is not offered")
            budget.charge(len(sequence) * max(0, number))
            if not isinstance(sequence, str):
                _check_items(len(sequence) * max(0, number))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        bits = bits * max(1, abs(right)) if operator == "**" else bits + right.bit_length()
        if bits > MAX_INT_BITS:
            raise BudgetExceeded("a number is too large")


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
