"""`fairway budgets`: what the requests of a tenant, a key or an end user may cost."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.flags import (
    EtagOption,
    Format,
    LabelOption,
    NameArgument,
    OutputOption,
    key_values,
    money,
    replace_labels,
)
from fairway.cli.terminal.cells import age, labels
from fairway.cli.terminal.listing import Resource, add_delete, add_list, add_show, resource
from fairway.cli.terminal.money import show_money
from fairway.cli.terminal.table import Column
from fairway.v1 import controlplane_pb2 as cp

app = typer.Typer(help="Budgets: what requests may cost per month and per day.", no_args_is_help=True)

_EACH: Final = "*"
MonthOption = Annotated[
    int | None,
    typer.Option(
        "--per-month", parser=money, metavar="AMOUNT", help="Limit per calendar month, UTC. 0: no limit."
    ),
]
DayOption = Annotated[
    int | None,
    typer.Option("--per-day", parser=money, metavar="AMOUNT", help="Limit per day, UTC. 0: no limit."),
]


def _scope(budget: cp.Budget) -> str:
    if budget.key:
        return f"{budget.tenant} key {budget.key}"
    if budget.user:
        return f"{budget.tenant} {'each user' if budget.user == _EACH else f'user {budget.user}'}"
    return budget.tenant


def _amount(budget: cp.Budget, field: str, limit_micros: int) -> str:
    if not limit_micros:
        return "no limit"
    spent = show_money(getattr(budget, field)) if budget.HasField(field) else "?"  # type: ignore[arg-type]
    return f"{spent} / {show_money(limit_micros)}"


BUDGETS: Final[Resource[cp.Budget]] = resource(
    "budget",
    (
        Column("name", lambda budget: budget.metadata.name),
        Column("of", _scope),
        Column("month", lambda found: _amount(found, "spent_micros", found.limit_micros)),
        Column("today", lambda found: _amount(found, "day_spent_micros", found.day_limit_micros)),
        Column("currency", lambda budget: budget.currency),
        Column(
            "running",
            lambda found: show_money(found.reserved_micros) if found.HasField("reserved_micros") else "?",
            wide=True,
        ),
        Column("message", lambda budget: budget.message, wide=True),
        Column("labels", lambda budget: labels(budget.metadata), wide=True),
        Column("age", lambda budget: age(budget.metadata), wide=True),
        Column("etag", lambda budget: budget.metadata.etag, wide=True),
    ),
    lambda admin: admin.budgets,
)
add_list(app, BUDGETS, about="List the budgets and what was spent of them.")
add_show(app, BUDGETS, about="Show a budget with all its fields, amounts in millionths.")


@command(
    app,
    "create",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway budgets create acme-all --tenant acme --per-month 500 --per-day 50",
        "fairway budgets create acme-ci --tenant acme --key ci --per-month 20",
        "fairway budgets create acme-users --tenant acme --each-user --per-day 0.50",
    ),
)
async def create(
    connection: Connection,
    name: NameArgument,
    tenant: Annotated[
        str, typer.Option("--tenant", help="Tenant whose requests count.", autocompletion=completion.tenants)
    ] = "default",
    key: Annotated[str, typer.Option("--key", help="Count only requests with this key.")] = "",
    user: Annotated[str, typer.Option("--user", help="Count only requests of this end user.")] = "",
    each_user: Annotated[
        bool, typer.Option("--each-user", help="A budget for each end user that has none of its own.")
    ] = False,
    per_month: MonthOption = None,
    per_day: DayOption = None,
    currency: Annotated[str, typer.Option("--currency", help="Three letters, as in ISO 4217.")] = "USD",
    label: LabelOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Limit what requests may cost, by the prices of their deployments."""
    if user and each_user:
        raise typer.BadParameter("--user and --each-user exclude each other")
    wanted = cp.Budget(
        metadata=cp.Metadata(name=name, labels=key_values(label, flag="--label")),
        tenant=tenant,
        key=key,
        user=_EACH if each_user else user,
        limit_micros=per_month or 0,
        day_limit_micros=per_day or 0,
        currency=currency,
    )
    made = await checked(connection.admin.budgets.create(wanted), what=f"cannot create the budget {name}")
    BUDGETS.write_one(made, output)


@command(
    app,
    "update",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway budgets update acme-all --per-month 800",
        "fairway budgets update acme-ci --per-day 0",
    ),
)
async def update(
    connection: Connection,
    name: NameArgument,
    per_month: MonthOption = None,
    per_day: DayOption = None,
    label: LabelOption = None,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Change the limits and keep the rest. They apply from the next request on.

    --label replaces all present labels.
    """

    def change(budget: cp.Budget) -> None:
        if per_month is not None:
            budget.limit_micros = per_month
        if per_day is not None:
            budget.day_limit_micros = per_day
        replace_labels(budget.metadata, label)

    changed = connection.admin.budgets.change(name, change, etag=etag)
    BUDGETS.write_one(await checked(changed, what=f"cannot change the budget {name}"), output)


add_delete(
    app,
    BUDGETS,
    question="Delete the budget {name}? Requests are no longer limited by it.",
    about="Delete a budget. What was spent stays counted until the period ends.",
    examples=("fairway budgets delete acme-ci", "fairway budgets delete acme-ci --yes"),
)
