"""docs/benchmarks.md is what its records give; a template that names what no record has is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bench.store.page import TEMPLATE, page
from bench.store.records import BenchMachine, BenchRecord, BenchStore, StoreError
from scripts.benchmarks import is_stale

BEGAN = datetime(2026, 12, 1, tzinfo=UTC)
MACHINE = '{{ machine("A", "one", cpu="One", cores=2) }}{{ section("A", "2026-12-01") }}\n'


def test_the_page_is_current() -> None:
    assert not is_stale(), "run `make reference`"


def test_committed_records_are_whole() -> None:
    store = BenchStore(TEMPLATE.parent)
    assert store.problems == []
    assert len(store.records) > 40


def test_a_record_without_samples_says_so() -> None:
    bare = [record for record in BenchStore(TEMPLATE.parent).records if not record.runs]
    assert all("published figure, written by hand" in record.note for record in bare)


def written(tmp_path: Path, text: str, *records: dict[str, Any]) -> str:
    """Return the page of a template after the machine and section, of records a day apart."""
    store = BenchStore(tmp_path / "store")
    for number, fields in enumerate(records):
        at = BEGAN + timedelta(days=number)
        given = {"suite": "s", "machine": BenchMachine(cpu="One", cores=2)} | fields
        store.append(
            BenchRecord(schema=1, id=f"s-{number}-x", command="c", began=at, ended=at, **given)  # type: ignore[arg-type]
        )
    template = tmp_path / "page.jinja"
    template.write_text(MACHINE + text)
    return page(store, template).partition("\n")[2]


def test_a_row_shows_the_newest_record_with_its_date_and_machine(tmp_path: Path) -> None:
    text = '{{ row("s", "label", aim("s", "5 ms", "x<=5"), "{x:.1f} ms of {x.least} to {x.most}") }}'
    old, new = {"figures": {"x": 3.0}}, {"runs": [{"x": [4.0, 9.0, 4.0]}]}
    assert written(tmp_path / "a", text, old) == "label | 5 ms, met | 3.0 ms of 3 to 3"
    found = written(tmp_path / "b", text, old, new)
    assert found == "label | 5 ms, met | 4.0 ms of 3 to 4; 2026-12-02"
    elsewhere = new | {"machine": BenchMachine(cpu="Two", cores=8)}
    assert written(tmp_path / "c", text, elsewhere).endswith("; 8 cores, Two")


@pytest.mark.parametrize(
    ("values", "verdict"), [([3, 4], "met"), ([6, 4], "missed at times"), ([4, 6], "missed")]
)
def test_an_aim_is_judged_by_the_records(tmp_path: Path, values: list[float], verdict: str) -> None:
    records = [{"figures": {"x": value}} for value in values]
    assert written(tmp_path, '{{ aim("s", "5", "x<=5") }}', *records) == f"5, {verdict}"


def test_a_variant_is_named_by_its_parameters(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"figures": {"x": 1.0}},
        {"figures": {"x": 2.0}, "parameters": {"n": "8"}},
    ]
    text = '{{ row("s", "l", "{x} and {s --n 8/x}") }}'
    assert written(tmp_path, text, *records) == "l | 1 and 2; 2026-12-02"


def test_ends_of_raw_values(tmp_path: Path) -> None:
    runs = [{"x": [4.0, 9.0]}, {"x": [2.0]}]
    assert written(tmp_path, '{{ row("s", "l", "{x.min} to {x.max}") }}', {"runs": runs}) == "l | 2 to 9"


def test_what_no_record_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no record of 's' has the figure 'y'"):
        written(tmp_path / "a", '{{ row("s", "l", "{y}") }}', {"figures": {"x": 1.0}})
    with pytest.raises(StoreError, match="is no condition"):
        written(tmp_path / "b", '{{ aim("s", "1", "x about 1") }}', {"figures": {"x": 1.0}})


def test_a_damaged_store_makes_no_page(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "s.jsonl").write_text('{"schema": 1, "id"')
    with pytest.raises(StoreError, match="cut after"):
        written(tmp_path, "")
