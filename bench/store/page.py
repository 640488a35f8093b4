"""The page of published figures, made from a template and the records of a store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import jinja2

from bench.store.records import BenchMachine, BenchRecord, BenchStore, StoreError, values_of

TEMPLATE: Final = Path(__file__).parents[1] / "records" / "page.md.jinja"
# {figure}, {figure:format}, {suite --parameter value/figure:format}
_REFERENCE: Final = re.compile(r"\{(?:([^{}/]+)/)?([^{}:/]+)(?::([^{}]*))?\}")
# Ends of a figure over all its records.
ENDS: Final[Mapping[str, Callable[[Iterable[float]], float]]] = {"least": min, "most": max}
_CONDITION: Final = re.compile(r"(?:([^<>/]+)/)?([^<>/]+?)\s*(<=|>=)\s*(-?[\d.]+)")


class BenchPage:
    """What the template calls: ``section`` sets the usual suite's machine and date, ``row`` writes a row.

    A figure is that of the newest record of its suite and parameters that has it; ``NAME.min`` and
    ``NAME.max`` are the ends of its values, ``NAME.least`` and ``NAME.most`` those over all records.
    """

    def __init__(self, store: BenchStore) -> None:
        if store.problems:
            raise StoreError(f"{store.folder}: {store.problems[0]}", "mend the record, or take it out")
        self._store = store
        self._machines: dict[str, BenchMachine] = {}
        self._usual = ("", "")

    def machine(self, letter: str, text: str, **fields: str | int) -> str:
        """Return a line of the legend; records of such a machine are shown by its letter."""
        self._machines[letter] = BenchMachine(**fields)  # type: ignore[arg-type]
        return f"- {letter}: {text}"

    def section(self, letter: str, date: str) -> str:
        """Return the machine and the date that rows below do not repeat."""
        self._usual = (letter, date)
        return f"{letter}, {date}" if letter else date

    def row(self, key: str, label: str, *cells: str) -> str:
        """Return a row of a table: the label and cells with their figures.

        ``key`` is the suite, or suite and parameters, of references that name none. Machine and date of the
        records follow the last cell where they are not the section's. Raises StoreError for a figure that no
        record has.
        """
        used: list[BenchRecord] = []

        def value(found: re.Match[str]) -> str:
            stem, _, end = found[2].rpartition(".")
            records = self._records(found[1] or key, stem if end in ENDS else found[2])
            used.append(records[-1])
            if end in ENDS:
                return format(ENDS[end](_figure(record, stem) for record in records), found[3] or "g")
            return format(_figure(records[-1], found[2]), found[3] or "g")

        filled = [_REFERENCE.sub(value, cell) for cell in cells]
        for record in used:
            suffix = "".join(f"; {each}" for each in self._unusual(record))
            if suffix and not filled[-1].endswith(suffix):
                filled[-1] += suffix
        return " | ".join([label, *filled])

    def aim(self, key: str, text: str, *conditions: str) -> str:
        """Return an aim and whether the newest record meets it: met, missed, or missed at times by others."""
        verdicts = [self._verdict(key, condition) for condition in conditions]
        same = len(set(verdicts)) == 1
        return f"{text}{';' if ', ' in text else ','} {verdicts[0] if same else '; '.join(verdicts)}"

    def _verdict(self, key: str, condition: str) -> str:
        found = _CONDITION.fullmatch(condition)
        if found is None:
            raise StoreError(f"{condition!r} is no condition", "write it as figure<=1.5")
        records = self._records(found[1] or key, found[2])
        bound = float(found[4])
        held = [
            value <= bound if found[3] == "<=" else value >= bound
            for value in (_figure(record, found[2]) for record in records)
        ]
        if not held[-1]:
            return "missed"
        return "met" if all(held) else "missed at times"

    def _records(self, key: str, figure: str) -> Sequence[BenchRecord]:
        suite, _, parameters = key.strip().partition(" ")
        found = [
            record
            for record in self._store.records
            if record.suite == suite and figure in _names(record)
            if " ".join(f"--{name} {value}".strip() for name, value in record.parameters.items())
            == parameters
        ]
        if not found:
            raise StoreError(f"no record of {key!r} has the figure {figure!r}", f"{TEMPLATE} names it")
        return found

    def _unusual(self, record: BenchRecord) -> list[str]:
        letters = [letter for letter, machine in self._machines.items() if machine == record.machine]
        letter = letters[0] if letters else f"{record.machine.cores} cores, {record.machine.cpu}"
        found = (letter, f"{record.began:%Y-%m-%d}")
        return [own for own, usual in zip(found, self._usual, strict=True) if usual and own != usual]


def _names(record: BenchRecord) -> set[str]:
    """Return the figures of a record; of one with raw values also ``NAME.min`` and ``NAME.max``."""
    ends = {f"{name}.{end}" for run in record.runs for name in run for end in ("min", "max")}
    return {*record.names, *ends}


def _figure(record: BenchRecord, name: str) -> float:
    found = record.figure(name)
    if found is None:
        stem, _, end = name.rpartition(".")
        values = [value for run in values_of(record, stem) for value in run]
        found = min(values) if end == "min" else max(values)
    return found


def page(store: BenchStore, template: Path = TEMPLATE) -> str:
    """Return the page. Raises StoreError where a record or a figure that it names is missing or damaged."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    made = BenchPage(store)
    calls = {"machine": made.machine, "section": made.section, "row": made.row, "aim": made.aim}
    return environment.from_string(template.read_text("utf-8")).render(calls)
