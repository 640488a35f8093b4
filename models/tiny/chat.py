"""Chat examples drawn from the corpus, rendered by the template that ships with the checkpoint."""

import ast
import random
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jinja2
from corpus import Document

# Breaking "<|" keeps a message from spelling a special token.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('the role must be system, user or assistant') }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + (message['content'] | trim | replace('<|', '< |')) + eos_token }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You write Python.",
    "You are an expert in Python. Answer briefly.",
)
SYSTEM_SHARE = 0.3
ANSWER_CHARS_MIN, ANSWER_CHARS_MAX = 60, 1800


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its answer, both taken from a corpus document."""

    question: str
    answer: str


def chat_documents(documents: Iterable[Document], *, rng: random.Random) -> list[Document]:
    """All exchanges of `documents` in random order, rendered; each keeps the name of its source."""
    template = jinja2.Environment(autoescape=False).from_string(CHAT_TEMPLATE)
    rendered: list[Document] = []
    for document in documents:
        for exchange in _exchanges(document, rng):
            text = template.render(
                messages=_messages(exchange, rng), bos_token="<|begin|>", eos_token="<|end|>"
            )
            rendered.append(Document(document.name, "chat", text))
    rng.shuffle(rendered)
    return rendered


def _messages(exchange: Exchange, rng: random.Random) -> list[dict[str, str]]:
    turns = [
        {"role": "user", "content": exchange.question},
        {"role": "assistant", "content": exchange.answer},
    ]
    if rng.random() < SYSTEM_SHARE:
        turns.insert(0, {"role": "system", "content": rng.choice(SYSTEMS)})
    return turns


def _exchanges(document: Document, rng: random.Random) -> Iterator[Exchange]:
    candidates = (
        _topic_exchanges(document, rng) if document.kind == "topic" else _source_exchanges(document, rng)
    )
    return (e for e in candidates if ANSWER_CHARS_MIN <= len(e.answer) <= ANSWER_CHARS_MAX)


def _topic_exchanges(document: Document, rng: random.Random) -> Iterator[Exchange]:
    topic = document.name.partition("#")[2]
    answer = _first_paragraphs(document.text)
    for form in rng.sample(
        ("Explain `{}`.", "What is `{}` in Python?", "Tell me about {}.", "How does `{}` work?"), 3
    ):
        yield Exchange(form.format(topic), answer)


def _source_exchanges(document: Document, rng: random.Random) -> Iterator[Exchange]:
    tree = ast.parse(document.text)
    module = document.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if overview := ast.get_docstring(tree):
        form = rng.choice(("What does the module `{}` do?", "What is `{}`?", "Explain the module `{}`."))
        yield Exchange(form.format(module), _first_paragraphs(overview))
    lines = document.text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield from _definition_exchanges(lines, node, rng)


def _definition_exchanges(
    lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, rng: random.Random
) -> Iterator[Exchange]:
    """A request to write `node`, from the first line of its docstring, and a question about what it does."""
    docstring = ast.get_docstring(node)
    if not docstring:
        return
    wish = docstring.split("\n\n")[0].replace("\n", " ").strip().rstrip(".")
    word = "class" if isinstance(node, ast.ClassDef) else "function"
    source = _segment(lines, node)
    if 8 <= len(wish) <= 160:
        lowered = wish[0].lower() + wish[1:]
        forms = (
            f"Write a {word} `{node.name}`: {wish}.",
            f"Write a {word} `{node.name}` that does this: {lowered}.",
            f"Write a Python {word} named {node.name}. {wish}.",
        )
        yield Exchange(rng.choice(forms), f"```python\n{source}\n```")
    if len(docstring) >= 120:
        yield Exchange(rng.choice((f"What does `{node.name}` do?", f"Explain `{node.name}`.")), docstring)


def _segment(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """The source of `node` without its indent; `ast.get_source_segment` splits the file at each call."""
    assert node.end_lineno is not None
    first, last = node.lineno - 1, node.end_lineno - 1
    end = lines[last].encode()[: node.end_col_offset].decode()
    return textwrap.dedent("\n".join([*lines[first:last], end])).strip()


def _first_paragraphs(text: str) -> str:
    """The leading paragraphs of `text` that fit into ANSWER_CHARS_MAX."""
    kept = ""
    for paragraph in text.strip().split("\n\n"):
        if len(kept) + len(paragraph) + 2 > ANSWER_CHARS_MAX:
            break
        kept += paragraph + "\n\n"
    return kept.strip()
