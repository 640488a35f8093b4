"""Whatever a template computes, it ends soon and small."""

from __future__ import annotations

import contextlib
import time
import tracemalloc

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.gateway.text.sandbox import (
    BUDGET,
    BudgetedEnvironment,
    TemplateBudget,
    TemplateRefused,
    TemplateTooCostly,
)


def _grown(first: str, step: str) -> str:
    """A template that grows a variable sixty times."""
    loop = "{% for i in range(60) %}{% set s.v = " + step + " %}{% endfor %}"
    return "{% set s = namespace(v=" + first + ") %}" + loop


BOMBS = {
    "product of text": "{{ 'a' * 10**9 }}",
    "product from the left": "{{ 10**9 * 'a' }}",
    "product of a list": "{{ ['a'] * 10**9 }}",
    "product of a variable": "{% set n = 1000000000 %}{{ text * n }}",
    "doubling by plus": _grown("'aaaaaaaa'", "s.v + s.v"),
    "doubling by tilde": _grown("'aaaaaaaa'", "s.v ~ s.v"),
    "doubling of lists": _grown("[1]", "s.v + s.v"),
    "power": "{{ 10 ** 10 ** 10 }}",
    "repeated squares": _grown("3", "s.v * s.v"),
    "format by percent": "{{ '%1000000000d' % 1 }}",
    "format method": "{{ '{:>1000000000}'.format(1) }}",
    "format_map method": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "format kept in a variable": "{% set f = '{:>1000000000}'.format %}{{ f(1) }}",
    "padding method": "{{ 'a'.ljust(10**9) }}",
    "zero filling": "{{ 'a'.zfill(1000000000) }}",
    "tab stops": "{{ ('\t' ~ 'a').expandtabs(1000000000) }}",
    "bytes of a number": "{{ (2).to_bytes(1000000000, 'big') }}",
    "padding filter": "{{ 'a' | center(1000000000) }}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops without a call": (
        "{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}"
    ),
    "loop with text": "{% for a in range(99999) %}" + "x" * 5000 + "{% endfor %}",
    "loop into a variable": "{% set x %}{% for a in range(99999) %}{{ text }}{% endfor %}{% endset %}",
    "large join": "{{ range(99999) | join(text) }}",
    "large join method": "{{ text.join(range(9) | map('string') | list * 9999) }}",
    "replace of nothing": "{{ text | replace('', text) }}",
    "replace method": "{{ text.replace('a', text).replace('a', text) }}",
    "text of a list": "{{ ([text] * 99999) | string }}",
    "json of a list": "{{ ([text] * 99999) | tojson }}",
    "json indent": "{{ [[1]] | tojson(indent=1000000000) }}",
    "indent filter": "{{ text | indent(1000000000) }}",
    "recursion of a macro": "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "doubling macro": "{% macro m(n) %}{{ m(n-1) if n }}{{ m(n-1) if n }}{% endmacro %}{{ m(60) }}",
    "large range": "{{ range(10**9) | list }}",
    "padding filter of a block": "{% filter center(10**9) %}a{% endfilter %}",
    "format by star": "{{ '%*d' % (10**9, 1) }}",
    "format by name": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "format of a precision": "{{ '%.1000000000f' % 1 }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format with a nested width": "{{ '{:>{}}'.format(1, 10**9) }}",
    "format of one text often": "{{ ('{0}' * 9999).format(text) }}",
    "percent of one text often": "{{ ('%(a)s' * 9999) % {'a': text} }}",
    "representation of a list": "{{ ([text] * 99999) | pprint }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "recursive loop over a range": "{% for x in range(9) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "filter in a condition": "{% for a in range(99999) if range(99999) | join(text) %}{% endfor %}",
}
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self._TemplateReference__context }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum() }}",
    "{{ messages.append(1) }}",
    "{{ (messages | first).update({'role': 'system'}) }}",
    "{{ ''|attr('__class__') }}",
    "{{ '{0.__class__}'.format(text) }}",
    "{{ '{a.__class__.__mro__}'.format_map({'a': text}) }}",
    "{{ '{x.__init__}'.format(x=messages) }}",
    "{{ messages|map(attribute='__class__')|list|first }}",
    "{{ messages|map('attr', '__class__')|list|first }}",
    "{{ messages|sum(attribute='__class__') }}",
    "{{ messages|join(attribute='__class__') }}",
    "{{ ''.format.__self__ }}",
    "{{ ''.format.__globals__ }}",
    "{{ cycler.__class__ }}",
    "{{ joiner(', ').__init__ }}",
    "{{ dict.__class__ }}",
    "{{ dict.mro() }}",
    "{{ namespace(__class__=1).__class__ }}",
    "{% set n = namespace() %}{% set n.__init__ = 1 %}{{ n.__init__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ (text|e).__html__ }}",
    "{{ (text|safe).__class__ }}",
    "{{ 'a'.maketrans.__self__ }}",
    "{{ 'a'.encode() }}",
]
FILES = ["{% include 'x' %}", "{% import 'x' as y %}", "{% from 'x' import y %}", "{% extends 'x' %}"]


def environment() -> BudgetedEnvironment:
    return BudgetedEnvironment({})


def render(source: str, *, seconds: float = 2.0) -> str:
    template = environment().from_string(source)
    budget = TemplateBudget(
        max_chars=2_000_000,
        max_steps=100_000,
        deadline_s=time.monotonic() + seconds,
        monotonic_s=time.monotonic,
    )
    variables = {BUDGET: budget, "text": "a" * 100_000, "messages": [{"role": "user", "content": "hi"}]}
    return "".join(template.generate(variables))


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_stopped_before_it_is_large(name: str) -> None:
    tracemalloc.start()
    started_s = time.monotonic()
    try:
        with pytest.raises(
            (TemplateTooCostly, jinja2.TemplateError, RecursionError, OverflowError, TypeError)
        ):
            render(BOMBS[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024 * 1024
    assert time.monotonic() - started_s < 5.0


def test_time_ends_a_template_that_counts_within_its_steps() -> None:
    with pytest.raises(TemplateTooCostly, match="time"):
        render("{% for a in range(5) %}{% endfor %}", seconds=-1.0)


@pytest.mark.parametrize("source", ESCAPES)
def test_python_is_out_of_reach(source: str) -> None:
    with contextlib.suppress(jinja2.TemplateError, TypeError):
        assert render(source) == ""


@pytest.mark.parametrize("source", [*FILES, "{% autoescape true %}{{ text }}{% endautoescape %}"])
def test_a_template_is_one_file_without_escapes_of_its_own(source: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        environment().from_string(source)


def test_the_budget_has_no_name_in_a_template() -> None:
    assert render("{{ fairway }}{{ budget }}") == ""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a' ~ 1 ~ none ~ 'b' }}", "a1Noneb"),
        ("{% for m in messages %}{{ loop.index0 }}{{ m.role }}{{ '!' if loop.last }}{% endfor %}", "0user!"),
        ("{% for m in [1, 2, 3] if m != 2 %}{{ m }},{% else %}none{% endfor %}", "1,3,"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% for m in [] %}x{% else %}none{% endfor %}", "none"),
        ("{{ {'b': 1, 'a': '<é>'} | tojson }}", '{"b": 1, "a": "<é>"}'),
        ("{{ [1, 2] | tojson(indent=2) }}", "[\n  1,\n  2\n]"),
        ("{{ 'a-b' | replace('-', '+') }}{{ 'a-b'.replace('-', '*', 1) }}", "a+ba*b"),
        ("{{ ' x ' | trim }}{{ 'x y'.split(' ')[-1] }}{{ ', '.join(['p', 'q']) }}", "xyp, q"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ messages[::-1] | length + 2 * 3 }}", "7"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}", "<a>"),
        ("{% generation %}a{{ 1 }}{% endgeneration %}", "a1"),
        ("{{ messages | map(attribute='role') | join('|') }}", "user"),
        (_grown("0", "s.v + 1") + "{{ s.v }}", "60"),
        ("a\n{% if true %}\n  b\n{% endif %}\nc", "a\n  b\nc"),
    ],
)
def test_what_chat_templates_do_still_works(source: str, expected: str) -> None:
    assert render(source) == expected


def test_an_author_can_refuse() -> None:
    with pytest.raises(TemplateRefused, match="no tools"):
        render("{{ raise_exception('no tools') }}")


# The constructs that published chat templates are made of.
PUBLISHED = {
    "chatml with a default system turn": (
        "{%- if messages[0]['role'] == 'system' %}"
        "{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}"
        "{%- else %}{{- '<|im_start|>system\nYou help.<|im_end|>\n' }}{%- endif %}\n"
        "{%- for message in messages %}\n"
        '    {%- if (message.role == "user") or (message.role == "assistant" and not message.tool_calls) %}\n'
        "        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}\n"
        '    {%- elif message.role == "tool" %}\n'
        "        {{- '<tool_response>' ~ (message.content | tojson) }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ),
    "alternating turns": (
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}"
        "{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}"
        "{{- bos_token }}{%- for m in loop_messages %}"
        "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('alternate') }}{%- endif %}"
        "{%- if m['role'] == 'user' and loop.last and system is defined %}"
        "{{- '[INST] ' + system + '\n\n' + m['content'] | trim + '[/INST]' }}"
        "{%- elif m['role'] == 'user' %}{{- '[INST] ' + m['content'] + '[/INST]' }}"
        "{%- else %}{{- ' ' + m['content'] | trim + eos_token }}{%- endif %}{%- endfor %}"
    ),
    "thoughts cut from history": (
        "{%- set ns = namespace(multi_step_tool=true, last=messages | length - 1) %}"
        "{%- for message in messages[::-1] %}{%- set index = (messages | length - 1) - loop.index0 %}"
        "{%- if ns.multi_step_tool and message.role == 'user' and not (message.content.startswith('<r>')"
        " and message.content.endswith('</r>')) %}{%- set ns.multi_step_tool = false %}"
        "{%- set ns.last = index %}{%- endif %}{%- endfor %}"
        "{%- for message in messages %}"
        "{%- set content = message.content if message.content is string else '' %}"
        "{%- if message.role == 'assistant' and '</think>' in content %}"
        "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}"
        "{%- if loop.index0 > ns.last %}{{- thought }}{%- endif %}{%- endif %}"
        "{{- message.role ~ ':' ~ content ~ '\n' }}{%- endfor %}"
    ),
    "parts and dates": (
        "{%- if not date is defined %}{%- set date = 'today' %}{%- endif %}{{- date }}"
        "{%- for message in messages %}{%- if message.content is mapping or message.content is iterable"
        " and message.content is not string %}{{- message.content[0].text }}{%- else %}"
        "{{- message['content'] | trim | replace('\n', ' ') }}{%- endif %}"
        "{%- if not loop.last %}{{ ', ' }}{% endif %}{%- endfor %}"
    ),
}
TURNS = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "a\nb"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
    {"role": "user", "content": "c"},
]


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("start", [0, 1])
def test_published_templates_render_as_in_a_stock_sandbox(name: str, start: int) -> None:
    def refuse(message: str) -> None:
        raise TemplateRefused(message)

    stock = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    stock.globals["raise_exception"] = refuse
    variables = {
        "messages": TURNS[start:],
        "add_generation_prompt": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    expected = stock.from_string(PUBLISHED[name]).render(variables)
    budget = TemplateBudget(max_chars=10_000, max_steps=1_000, deadline_s=5.0, monotonic_s=lambda: 0.0)
    assert environment().from_string(PUBLISHED[name]).render({**variables, BUDGET: budget}) == expected
    assert "c" in expected
