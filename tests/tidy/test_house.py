"""What ``make house`` measures stays within its bounds, and its rules find what they look for."""

from __future__ import annotations

import pytest

from scripts.house import (
    MAX_FIELDS_IN_TEXT,
    ROOT,
    ambiguous_names,
    code_files,
    crowded_docstrings,
    dialect_of,
    documents,
    modules_by_folder,
    prose_of,
    request_shapes,
)

SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in code_files()}


def test_prose_uses_the_verbs_of_programs() -> None:
    per_1000, worst = dialect_of(SOURCES)
    assert per_1000 < 0.3, worst.most_common(10)


def test_one_public_class_name_has_one_meaning() -> None:
    assert ambiguous_names(SOURCES) == {}


def test_no_folder_is_crowded() -> None:
    assert [found for found in modules_by_folder(code_files()).most_common() if found[1] > 16] == []


MAX_DOCS_WORDS = 42_000
# A page about one role.
MAX_PAGE_WORDS = 1_500
MAX_TEXT_LINE = 150


def test_the_documents_can_be_read() -> None:
    assert sum(documents().values()) <= MAX_DOCS_WORDS


def test_a_page_of_the_architecture_can_be_read_at_once() -> None:
    pages = {page: words for page, words in documents().items() if page.startswith("docs/architecture/")}
    assert [found for found in pages.items() if found[1] > MAX_PAGE_WORDS] == []


def test_lines_of_text_are_short() -> None:
    found = [
        f"{page}:{number}"
        for page in documents()
        for number, line in enumerate((ROOT / page).read_text().splitlines(), start=1)
        if len(line) > MAX_TEXT_LINE and "|" not in line
    ]
    assert found == []


@pytest.mark.parametrize("prose", ["# The worker tells the leader.", '"""Whom the queue asks."""'])
def test_dialect_is_found_in_comments_and_docstrings(prose: str) -> None:
    assert dialect_of({"a.py": f"{prose}\n"})[0] > 0.0


def test_only_prose_is_searched() -> None:
    assert prose_of('told = "say"  # a comment\n') == "# a comment\n"


def test_two_classes_of_one_name_are_found() -> None:
    found = {"services/a.py": "class Load: ...\n", "services/b.py": "class Load: ...\nclass _Own: ...\n"}
    assert ambiguous_names(found) == {"Load": ["services/a.py", "services/b.py"]}


def test_shapes_of_a_request_are_found_in_classes_and_messages() -> None:
    spec = "class Spec:\n    request_id: str\n    sampling: int\n"
    policy = "class Policy:\n    max_tokens: int\n"
    start = "message Start {\n  uint32 max_output_tokens = 1;\n  string request_id = 2;\n}\n"
    other = "message Id {\n  uint64 seed = 1;\n}\n"
    assert request_shapes({"services/a.py": spec + policy}, [start + other]) == [
        "services/a.py:Spec",
        "protos:Start",
    ]


def test_each_of_many_fields_is_documented_at_the_field() -> None:
    assert crowded_docstrings(SOURCES) == []


def test_a_docstring_that_describes_many_fields_is_found() -> None:
    fields = "\n".join(f"    f{number}: int" for number in range(MAX_FIELDS_IN_TEXT + 1))
    crowded = f'class C:\n    """``f0`` is a, ``f1`` b, ``f2`` c."""\n\n{fields}\n'
    assert crowded_docstrings({"a.py": crowded}) == ["a.py: C"]
    assert crowded_docstrings({"a.py": crowded.replace("``f2``", "f2")}) == []
