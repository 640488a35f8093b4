"""Budgets and limits in tables of 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from fairway.cli.commands.accounts import BUDGETS, LIMITS, USER_LIMITS, set_limits, show_limits
from fairway.cli.terminal.table import table_of, visible
from fairway.v1 import controlplane_pb2 as cp


def budget(name: str, **fields: object) -> cp.Budget:
    return cp.Budget(metadata=cp.Metadata(name=name), tenant="acme", currency="USD", **fields)  # type: ignore[arg-type]


def test_budgets_fit_80_columns() -> None:
    found = [
        budget("acme-all", limit_micros=500_000_000, spent_micros=123_450_000, day_limit_micros=50_000_000),
        budget("acme-ci", key="ci", limit_micros=20_000_000, spent_micros=75_000),
        budget("acme-users", user="*", day_limit_micros=500_000),
    ]
    file = io.StringIO()
    console = Console(file=file, width=80)
    console.print(table_of(visible(BUDGETS.columns, wide=False), found, width=80))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines == [
        "NAME        OF              MONTH            TODAY      CURRENCY",
        "acme-all    acme            123.45 / 500.00  ? / 50.00  USD",
        "acme-ci     acme key ci     0.075 / 20.00    no limit   USD",
        "acme-users  acme each user  no limit         ? / 0.50   USD",
    ]


def test_limits_that_are_given_are_set_and_others_stay() -> None:
    limits = cp.Limits(requests_per_minute=5)
    set_limits(limits, {"max_timeout": 1.5, "max_output_tokens": 7})
    assert show_limits(limits) == "requests_per_minute=5,max_output_tokens=7,max_timeout=1.5s"
    set_limits(limits, {"max_timeout": 0.0, "requests_per_minute": 0})
    assert show_limits(limits) == "max_output_tokens=7"


def test_every_limit_has_an_option() -> None:
    fields = {field.name for field in cp.Limits.DESCRIPTOR.fields}
    assert set(LIMITS.options) == set(USER_LIMITS.options) == fields
