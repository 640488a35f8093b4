"""Measure how readable the tree is: its size, its parts, its copies, its names, its words, its documents.

python scripts/house.py            the worst places of each figure, and RESULT {json}
python scripts/house.py --traced   also the files that a request runs: starts an installation

The code counted is hand-written Python of ``services``, ``fairway``, ``simulator`` and ``console``
(no generated stubs).
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("services", "fairway", "simulator", "console")
# A program does not do these: it observes, receives, reports, requests, returns, yields.
DIALECT: Final = re.compile(
    r"\b(tells?|told|telling|hears?|heard|hearing|says?|said|saying|knows|knew|speaks?|spoke|speaking"
    r"|talks?|asks|asked|asking|whom|whoever|nobody|somebody|g(?:ives?|ave|iving) way|lets? go|news)\b",
    re.IGNORECASE,
)
# A shape of a request names a request, a sequence or a model, and says how it is sampled or how long it is.
NAMED: Final = frozenset({"request_id", "handle", "model"})
CARRIED: Final = frozenset({"sampling", "limits", "max_output_tokens", "max_tokens"})
# What runs a request to its one end: it admits, places, runs and settles.
REQUEST_RUNS: Final = (
    "services/gateway/requests/request.py:Request",  # sequences, stored answers and rows
)
# What decides which tenant is next, each with an order of its own.
FAIR_ORDERS: Final = (
    "services/scheduler/policy/queue/fair_order.py:FairOrder",  # sequences, by tokens served
    "services/scheduler/slots/pool.py:divide",  # slots of rows
    "services/core/fixed_cost/turns.py:TenantTurns",  # rows in one batch or without a leader, batches
    "services/runtime/process/tenant_turns.py:TenantRoundRobin",  # texts, and work in the event loop
)
LIMITER_PORT: Final = "services/ports/limiter.py"
# A constructor call with so many arguments that read an attribute copies a shape by hand.
COPIED: Final = 4
# A comment that begins so and is short has no subject and no verb. A heuristic, the same for every code base.
FRAGMENT: Final = re.compile(
    r"(of|by|in|on|at|with|without|for|from|to|that|which|whose|those|until|while|when|where|since|before|after"
    r"|behind|beside|as|and|among|between|beyond|under)\b",
    re.IGNORECASE,
)
MAX_FRAGMENT: Final = 90
# A class with more fields documents each at its own line.
MAX_FIELDS_IN_TEXT: Final = 6
_MESSAGE: Final = re.compile(r"^message (\w+) \{(.*?)^\}", re.MULTILINE | re.DOTALL)


def code_files(root: Path = ROOT) -> list[Path]:
    """Return the hand-written modules."""
    return sorted(
        path
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    )


@cache
def tree_of(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(source)))


@cache
def comments_of(source: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def classes_of(source: str) -> Iterator[ast.ClassDef]:
    return (node for node in nodes_of(source) if isinstance(node, ast.ClassDef))


def functions_of(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in nodes_of(source) if isinstance(node, functions))


def prose_of(source: str) -> str:
    """Return the comments and docstrings of a module."""
    found = list(comments_of(source))
    for node in nodes_of(source):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(ast.get_docstring(node) or "")
    return "\n".join(found)


def dialect_of(sources: Mapping[str, str]) -> tuple[float, Counter[str]]:
    """Return the words of ``DIALECT`` per 1,000 words of prose, and how many each module has."""
    words, found = 0, Counter[str]()
    for name, source in sources.items():
        prose = prose_of(source)
        words += len(prose.split())
        if count := len(DIALECT.findall(prose)):
            found[name] = count
    return 1000.0 * found.total() / max(1, words), found


def double_names(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the public classes that several modules define, each with a meaning of its own.

    The client's own copy of a class of the services has the same meaning: both are errors, or they share a
    third of the members of the smaller one.
    """
    places: defaultdict[str, dict[str, set[str]]] = defaultdict(dict)
    for name, source in sources.items():
        for node in tree_of(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name][name] = members_of(node)
    meanings = {
        name: [module for module in modules if not _is_clients_copy(module, modules)]
        for name, modules in sorted(places.items())
    }
    return {name: modules for name, modules in meanings.items() if len(modules) > 1}


def _is_clients_copy(module: str, modules: Mapping[str, set[str]]) -> bool:
    if not module.startswith("fairway/client/"):
        return False
    originals = {name: members for name, members in modules.items() if name.startswith("services/")}
    own = modules[module]
    return any(
        3 * len(members & own) >= max(1, min(len(members), len(own)))
        or {Path(module).name, Path(name).name} == {"errors.py"}
        for name, members in originals.items()
    )


def members_of(node: ast.ClassDef) -> set[str]:
    """Return the public fields, constants and methods of a class, and what it assigns to ``self``."""
    constants = (target for child in node.body if isinstance(child, ast.Assign) for target in child.targets)
    own = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and ast.unparse(inner.value) == "self"
    }
    found = {*_fields(node), *_methods(node), *own}
    found |= {name.id for name in constants if isinstance(name, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def _methods(node: ast.ClassDef) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {child.name for child in node.body if isinstance(child, functions)}


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)


def _implementers(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the members of each class but the Protocols, by place."""
    return {
        f"{name}:{node.name}": members_of(node)
        for name, source in sources.items()
        for node in classes_of(source)
        if not _is_protocol(node)
    }


def lonely_protocols(sources: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Return the Protocols that one class of the product implements, and no other class."""
    classes = _implementers({**sources, **others})
    product = {place for place in classes if place.startswith(("services/", "fairway/"))}
    found = []
    for name, source in sources.items():
        for node in filter(_is_protocol, classes_of(source)):
            methods = {method for method in _methods(node) if not method.startswith("__")}
            places = {place for place, members in classes.items() if methods and methods <= members}
            if len(places) == 1 and places <= product:
                found.append(f"{name}:{node.name}")
    return found


def limiters(sources: Mapping[str, str]) -> list[str]:
    """Return the classes of the services that implement the port of the limiter."""
    port = next(node for node in classes_of(sources[LIMITER_PORT]) if node.name == "Limiter")
    services = {name: source for name, source in sources.items() if name.startswith("services/")}
    return [place for place, members in _implementers(services).items() if _methods(port) <= members]


def lost_names(names: Iterable[str], sources: Mapping[str, str]) -> list[str]:
    """Return those of ``path:name`` that the tree does not define."""
    defined = {
        f"{name}:{node.name}"
        for name, source in sources.items()
        for node in (*classes_of(source), *functions_of(source))
    }
    return [name for name in names if name not in defined]


def hand_copies(sources: Mapping[str, str]) -> list[str]:
    """Return the constructor calls with at least ``COPIED`` arguments that read an attribute."""
    return [
        f"{name}:{node.lineno}"
        for name, source in sources.items()
        for node in nodes_of(source)
        if isinstance(node, ast.Call) and _is_constructor(node.func) and _copied(node) >= COPIED
    ]


def _is_constructor(called: ast.expr) -> bool:
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return bool(name[:1].isupper())


def _copied(call: ast.Call) -> int:
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    return sum(any(isinstance(node, ast.Attribute) for node in ast.walk(value)) for value in values)


def fragments_of(sources: Mapping[str, str]) -> tuple[float, Counter[str]]:
    """Return the percentage of comments that are fragments, and how many each module has."""
    comments, found = 0, Counter[str]()
    for name, source in sources.items():
        for comment in comments_of(source):
            text = comment.lstrip("#: ").strip()
            if text and not text.startswith(("type:", "noqa", "fmt")):
                comments += 1
                found[name] += len(text) < MAX_FRAGMENT and FRAGMENT.match(text) is not None
    return 100.0 * found.total() / max(1, comments), +found


def importers(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the modules that import each module, all by path."""
    paths = {name.removesuffix(".py").replace("/", "."): name for name in sources}
    found: dict[str, set[str]] = {name: set() for name in modules_of(sources)}
    for name, source in sources.items():
        for node in nodes_of(source):
            imported = []
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for module in imported:
                if module in paths:
                    found[paths[module]].add(name)
    return found


def modules_of(sources: Mapping[str, str]) -> list[str]:
    """Return the modules without the folders' own files."""
    return [name for name in sources if not name.endswith("/__init__.py")]


def lines_of_code(source: str) -> int:
    """Return the lines that are neither blank nor a docstring nor a comment alone."""
    prose: set[int] = set()
    for node in nodes_of(source):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    texts = enumerate((line.strip() for line in source.splitlines()), start=1)
    return sum(number not in prose and text != "" and not text.startswith("#") for number, text in texts)


def longest_function(sources: Mapping[str, str]) -> tuple[int, str]:
    """Return the lines of the longest function, and its place."""
    return max(
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{name}:{node.name}")
        for name, source in sources.items()
        for node in functions_of(source)
    )


def request_shapes(sources: Mapping[str, str], protos: Iterable[str]) -> list[str]:
    """Return the classes of ``services`` and the messages that carry a request."""
    found = [
        f"{name}:{node.name}"
        for name, source in sources.items()
        if name.startswith("services/")
        for node in classes_of(source)
        if _is_request(_fields(node))
    ]
    for text in protos:
        for name, body in _MESSAGE.findall(text):
            if _is_request(re.findall(r"^\s+[\w. ]+ (\w+) = \d+", body, re.MULTILINE)):
                found.append(f"protos:{name}")
    return found


def _is_request(fields: Iterable[str]) -> bool:
    found = set(fields)
    return bool(found & NAMED) and bool(found & CARRIED)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            yield child.target.id


def crowded_docstrings(sources: Mapping[str, str]) -> list[str]:
    """Return the classes with many fields whose docstring describes several of them."""
    found = []
    for name, source in sources.items():
        for node in classes_of(source):
            fields = set(_fields(node))
            described = fields & set(re.findall(r"``(\w+)``", ast.get_docstring(node) or ""))
            if len(fields) > MAX_FIELDS_IN_TEXT and len(described) > 2:
                found.append(f"{name}: {node.name}")
    return found


def documents(root: Path = ROOT) -> dict[str, int]:
    """Return the words of the README and of each page under docs that is read.

    The reference is left out: it is generated and looked up. A table's bar counts as a word.
    """
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    reference = root / "docs" / "reference"
    return {
        page.relative_to(root).as_posix(): len(page.read_text("utf-8").split())
        for page in pages
        if page.parent != reference
    }


def sources_of(files: Iterable[Path]) -> dict[str, str]:
    """Return the texts of modules, by their path from the root."""
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in files}


def fakes() -> dict[str, str]:
    """Return the modules of the tests and the benchmarks that define a class."""
    paths = (path for folder in ("tests", "bench") for path in sorted((ROOT / folder).rglob("*.py")))
    return {name: source for name, source in sources_of(paths).items() if "class " in source}


def figures(sources: Mapping[str, str]) -> dict[str, float | None]:
    """Return what is measured without a running installation, and print the places of each figure."""
    protos = [path.read_text("utf-8") for path in sorted(ROOT.glob("protos/**/*.proto"))]
    dialect, words = dialect_of(sources)
    percent, fragments = fragments_of(sources)
    names, shapes = double_names(sources), request_shapes(sources, protos)
    copies, lonely, carriers = hand_copies(sources), lonely_protocols(sources, fakes()), limiters(sources)
    by_module = Counter(place.partition(":")[0] for place in copies)
    function_lines, function = longest_function(sources)
    pages = documents()
    single = [name for name, found in importers(sources).items() if len(found) == 1]
    worst = {"hand copies": by_module, "fragments": fragments, "words": Counter(pages)}
    worst[f"dialect ({dialect:.2f} of 1,000 words)"] = words
    for title, found in worst.items():
        print(f"{title}:", ", ".join(f"{name} {count}" for name, count in found.most_common(8)))
    for name, places in names.items():
        print(f"double name: {name}:", ", ".join(places))
    parts = {"one importer": single, "request shapes": shapes, "request runs": REQUEST_RUNS}
    parts |= {"limiters": carriers, "fair orders": FAIR_ORDERS, "lonely protocols": lonely}
    for title, found_names in parts.items():
        print(f"{title}:", ", ".join(found_names))
    print(f"longest function: {function}")
    return {
        "code_lines": sum(map(lines_of_code, sources.values())),
        "lines": sum(source.count("\n") for source in sources.values()),
        "modules": len(modules_of(sources)),
        "one_importer": len(single),
        "double_names": len(names),
        "hand_copies": len(copies),
        "request_shapes": len(shapes),
        "request_runs": len(REQUEST_RUNS),
        "limiters": len(carriers),
        "fair_orders": len(FAIR_ORDERS),
        "lonely_protocols": len(lonely),
        "fragments_percent": round(percent, 1),
        "files_per_generate": None,
        "files_per_http_stream": None,
        "max_function": function_lines,
        "docs_words": sum(pages.values()),
    }


def main(arguments: list[str]) -> int:
    result = figures(sources_of(code_files()))
    if "--traced" in arguments:
        from tests.support.traced_request import count_files

        result |= count_files()
    print(f"RESULT {json.dumps(result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
