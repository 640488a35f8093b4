"""House rules that no off-the-shelf linter knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.tidy.sources import ROOT, long_functions, project_files, python_files, used_names

MAX_FUNCTION_LINES: Final = 60
# What services outside services/runtime must not touch, and what they take instead.
BANNED: Final = {
    "time.time": "Clock.unix_s",
    "time.time_ns": "Clock.unix_s",
    "time.monotonic": "Clock.monotonic_s",
    "time.monotonic_ns": "Clock.monotonic_s",
    "time.perf_counter": "Clock.monotonic_s",
    "time.sleep": "Clock.sleep",
    "datetime.datetime.now": "Clock.unix_s",
    "datetime.datetime.utcnow": "Clock.unix_s",
    "asyncio.sleep": "Clock.sleep",
    "asyncio.create_task": "a TaskGroup or Supervisor.spawn",
    "asyncio.TaskGroup": "fairway.task_group.TaskGroup",
    "asyncio.ensure_future": "a TaskGroup or Supervisor.spawn",
    "os.environ": "runtime.config.load",
    "os.getenv": "runtime.config.load",
    "print": "structlog",
}
# The engine is a process of its own without an event loop: it measures its steps and waits for its socket. So
# is the process of a fixed-cost model.
ENGINE: Final = ROOT / "services" / "worker" / "engine"
BATCHER: Final = ROOT / "services" / "worker" / "batcher"
DEVICE_MODULES: Final = (BATCHER / "process.py", BATCHER / "measure.py")
ENGINE_ALLOWED: Final = {"time.monotonic", "time.perf_counter", "time.sleep"}


def violations(source: str, *, engine: bool = False) -> Iterator[str]:
    """Yield "line: name: use instead" for each banned name in a module of the services."""
    for line, name in used_names(source):
        if name in BANNED and not (engine and name in ENGINE_ALLOWED):
            yield f"{line}: {name}: use {BANNED[name]}"
        elif name.startswith("random.") and not name.startswith("random.Random"):
            yield f"{line}: {name}: use the injected random.Random"


def _services() -> list[Path]:
    return [path for path in python_files("services") if (ROOT / "services" / "runtime") not in path.parents]


def test_services_take_clock_tasks_randomness_and_settings_from_the_runtime() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{each}"
        for path in _services()
        for each in violations(path.read_text(), engine=ENGINE in path.parents or path in DEVICE_MODULES)
    ]
    assert found == []


def test_no_module_changes_where_others_are_imported_from() -> None:
    sources = (path for name in ("services", "fairway", "simulator") for path in (ROOT / name).rglob("*.py"))
    assert [path for path in sources if "sys.path" in path.read_text(encoding="utf-8")] == []


def test_nothing_that_others_import_prints() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files("fairway")
        for line, name in used_names(path.read_text())
        if name == "print"
    ]
    assert found == []


def test_functions_fit_a_screen() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{each}"
        for path in python_files()
        for each in long_functions(path.read_text(), MAX_FUNCTION_LINES)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import time\ntime.time()", "time.time"),
        ("import time as clock\nnow = clock.monotonic", "time.monotonic"),
        ("from time import monotonic as m\nm()", "time.monotonic"),
        ("import asyncio\nasyncio.create_task(f())", "asyncio.create_task"),
        ("from os import environ\nenviron['A']", "os.environ"),
        ("import os\nos.environ.get('A')", "os.environ"),
        ("import random\nrandom.shuffle(x)", "random.shuffle"),
        ("print('x')", "print"),
        ("from datetime import datetime\ndatetime.now()", "datetime.datetime.now"),
    ],
)
def test_rule_sees_through_imports(source: str, name: str) -> None:
    assert any(f": {name}: use" in each for each in violations(source))


@pytest.mark.parametrize(
    "source",
    ["import random\nrng = random.Random(1)", "clock.sleep(1)", "import time\ntime.gmtime()", "self.print()"],
)
def test_rule_leaves_the_rest_alone(source: str) -> None:
    assert list(violations(source)) == []


def test_length_rule_counts_whole_functions() -> None:
    long = "def f():\n" + "    x = 1\n" * 60
    assert list(long_functions(long, 60)) == ["1 f is 61 lines"]
    assert list(long_functions(long, 61)) == []


def raising_star_handlers(source: str) -> list[int]:
    """Return the lines of the ``except*`` blocks that raise an error."""
    return [
        handler.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.TryStar)
        for handler in node.handlers
        if any(isinstance(inner, ast.Raise) for inner in ast.walk(handler))
    ]


def test_no_except_star_block_raises() -> None:
    """Python 3.11.0 to 3.11.3 wrap a plain error that such a block raises in another group."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files("services", "fairway", "simulator", "bench", "tests")
        for line in raising_star_handlers(path.read_text())
    ]
    assert found == [], "use `except BaseExceptionGroup` with first_failure"


def filtered_extractions(source: str) -> list[int]:
    """Return the lines of calls that pass a tarfile's extraction a filter."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("extract", "extractall", "unpack_archive")
        and any(keyword.arg == "filter" for keyword in node.keywords)
    ]


def test_no_archive_is_extracted_by_tarfile_with_a_filter() -> None:
    """Python 3.11.0 to 3.11.3 have no such parameter, and mypy, which has one version per minor, has."""
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files("services", "fairway", "simulator", "bench", "tests", "scripts")
        for line in filtered_extractions(path.read_text())
    ]
    assert found == [], "run tar, which refuses paths that leave its folder"
    assert filtered_extractions("a.extractall(b, filter='data')\na.extractall(b)") == [1]


def test_the_rule_about_except_star_finds_what_it_forbids() -> None:
    source = "try:\n    pass\nexcept* KeyError as group:\n    raise group.exceptions[0] from None\n"
    assert raising_star_handlers(source) == [3]
    assert raising_star_handlers(source.replace("raise group.exceptions[0] from None", "pass")) == []


# Positions of the mode and of the encoding among the arguments.
_OPENING: Final = {"read_text": (None, 0), "write_text": (None, 1), "open": (0, 2), "fdopen": (1, 3)}


def locale_dependent(source: str) -> list[int]:
    """Return the lines that read or write text in the encoding of the locale."""
    return [
        node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and _by_locale(node)
    ]


def _by_locale(call: ast.Call) -> bool:
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in keywords:
        return False
    if any(_constant(keywords.get(name)) is True for name in ("text", "universal_newlines")):
        return True
    method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in _OPENING or (method and name == "open" and not call.args and "mode" not in keywords):
        return False  # `open()` of an object that is no path
    at, encoding = _OPENING[name]
    if at is None:
        return len(call.args) <= (encoding or 0)
    at += name == "open" and not method
    mode = keywords.get("mode", call.args[at] if len(call.args) > at else ast.Constant("r"))
    value = _constant(mode)
    return isinstance(value, str) and set(value) <= set("rwax+t")


def _constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def test_text_files_are_utf8_whatever_the_locale() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in python_files("services", "fairway", "simulator", "scripts", "models")
        for line in locale_dependent(path.read_text())
    ]
    assert found == [], "pass the encoding utf-8"


def test_the_rule_about_encodings_finds_what_it_forbids() -> None:
    wrong = (
        "p.read_text()", "p.write_text(t)", "open(p)", "open(p, 'w')", "p.open('a')", "os.fdopen(d)",
        "os.fdopen(d, 'w', buffering=1)", "subprocess.run(c, text=True)",
    )  # fmt: skip
    right = (
        "p.read_text('utf-8')", "p.write_text(t, 'utf-8')", "open(p, 'rb')", "p.open('ab')",
        "os.fdopen(d, 'wb')",
        "open(p, encoding='utf-8')", "part(text=words)", "link.open()",
    )  # fmt: skip
    assert [each for each in (*wrong, *right) if locale_dependent(each)] == list(wrong)


# How our modules are run: by Python's launcher in a list, in YAML, in a Dockerfile, in a sentence.
_RUN: Final = re.compile(r"""(-[A-Za-z]+|\w+)["',\s]+-m["',\s]+["']?(services|fairway\.cli)\b""")


def test_our_programs_import_nothing_of_the_current_folder() -> None:
    """`python -m` puts the current folder first: its `services` or `secrets` would be imported and run."""
    found = [
        f"{path.relative_to(ROOT)}: {run.group(0)}"
        for path in project_files()
        if path.suffix in (".py", ".yml", ".md", "")
        and path.relative_to(ROOT).parts[0] not in ("tests", "bench")
        for run in _RUN.finditer(path.read_text("utf-8", "replace"))
        if run.group(1) != "-P"
    ]
    assert found == []
    assert _RUN.search('[sys.executable, "-m", "services"]')
    assert _RUN.search("python, -m, services, worker")
