"""The pages under docs/reference are those that the code gives, and short enough to read."""

from __future__ import annotations

import pytest

from scripts.metric_list import metric_list, registrations
from scripts.reference import FOLDER, PAGES, cli_page, http_page, settings_page, stale_pages
from services.runtime.config import PREFIX, Settings

MAX_WORDS = 12_700


def test_pages_are_current() -> None:
    assert stale_pages() == [], "run `make reference`"


def test_no_other_page_stands_there() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*PAGES, "clients.md"}  # that one by `make clients`


def test_pages_are_short() -> None:
    assert sum(len(page().split()) for page in PAGES.values()) <= MAX_WORDS


def test_each_setting_has_its_meaning_and_default() -> None:
    rows = [line.split(" | ") for line in settings_page().splitlines() if line.startswith("`" + PREFIX)]
    assert {row[0].strip("`") for row in rows} == {PREFIX + name.upper() for name in Settings.model_fields}
    assert all(len(row) == 4 and row[3] for row in rows)
    age = next(row[3] for row in rows if "ROUTE_MAX_AGE_S" in row[0])
    assert age.startswith("Age of the routes"), "the first of the comment's two lines"


def test_each_metric_has_a_name_of_its_own_and_a_description() -> None:
    found = metric_list()
    assert len(found) > 100
    assert len({metric.name for metric in found}) == len(found)
    assert all(metric.text for metric in found)


def test_commands_and_routes_are_listed() -> None:
    assert "`fairway keys rotate NAME`" in cli_page()
    assert "`POST /v1/chat/completions` | tenant" in http_page()


def test_bodies_are_those_of_the_openapi_document() -> None:
    page = http_page()
    assert "`messages` (required) | list of ChatTurn" in page
    assert "`reasoning_effort` | `high`, `low`" in page
    assert '`function_call` ("none", "auto")' in page


def test_metrics_of_a_table_and_with_named_labels_are_found() -> None:
    source = """
ROWS = (("fairway_a_bytes", "A.", len), ("fairway_b_bytes", "B.", len))
BY = ("model",)
def register(metrics):
    metrics.counter("fairway_c_total", "C " "c.", BY)
    metrics.level("fairway_d_seconds", "D.", len)
    for name, text, read in ROWS:
        metrics.gauge(name, text, read, ("state", "model"))
"""
    assert sorted(registrations(source)) == [
        ("fairway_a_bytes", "gauge", "A.", ("model", "state")),
        ("fairway_b_bytes", "gauge", "B.", ("model", "state")),
        ("fairway_c_total", "counter", "C c.", ("model",)),
        ("fairway_d_seconds", "gauge", "D.", ()),
    ]


def test_a_description_that_is_no_constant_is_refused() -> None:
    with pytest.raises(ValueError, match="fairway_a_total"):
        list(registrations('metrics.counter("fairway_a_total", f"{x}")'))
