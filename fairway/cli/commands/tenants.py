"""`fairway tenants`: tenants are the unit of quotas and isolation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from fairway.cli.calls import checked
from fairway.cli.connection import Connection, Server, command
from fairway.cli.flags import (
    EtagOption,
    Format,
    LabelOption,
    NameArgument,
    OutputOption,
    PriorityName,
    YesOption,
    key_values,
    replace_labels,
)
from fairway.cli.limit_options import LIMITS, USER_LIMITS, set_limits, show_limits
from fairway.cli.terminal.cells import age, labels, limit, priority
from fairway.cli.terminal.listing import Resource, add_delete, add_list, add_show, resource
from fairway.cli.terminal.output import confirm
from fairway.cli.terminal.table import Column
from fairway.v1 import controlplane_pb2 as cp

app = typer.Typer(help="Tenants: the unit of quotas and isolation.", no_args_is_help=True)

DisplayNameOption = Annotated[str | None, typer.Option("--display-name", help="Name to show to users.")]
PriorityOption = Annotated[
    PriorityName | None, typer.Option("--max-priority", help="Highest priority that its requests may have.")
]

WeightOption = Annotated[
    float | None,
    typer.Option(
        "--weight", min=0.001, max=1_000_000, help="Share of a contended model, relative to other tenants."
    ),
]
CommittedOption = Annotated[
    int | None,
    typer.Option(
        "--committed-tokens-per-minute",
        min=0,
        help="Guaranteed tokens; usage above them is rejected first. 0: no guarantee.",
    ),
]
DegradeTokensOption = Annotated[
    int | None,
    typer.Option(
        "--degrade-max-output-tokens",
        min=0,
        max=1_048_576,
        help="Under pressure, limit outputs to this many tokens. 0: no limit.",
    ),
]
DegradeModelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--degrade-model",
        help="Under pressure, use another deployment: model=smaller. Repeatable; 'none' removes all.",
    ),
]


_PLAIN_FIELDS: Final = (
    "display_name",
    "weight",
    "committed_tokens_per_minute",
)


@dataclass(frozen=True, slots=True)
class _Changes:
    """The options of `create` and `update`; None: unchanged."""

    limits: Mapping[str, Any]
    user_limits: Mapping[str, Any]
    display_name: str | None
    max_priority: PriorityName | None
    weight: float | None
    committed_tokens_per_minute: int | None
    degrade_max_output_tokens: int | None
    degrade_models: list[str] | None
    labels: list[str] | None

    def apply(self, tenant: cp.Tenant) -> None:
        set_limits(tenant, self.limits)
        set_limits(tenant.user_limits, self.user_limits)
        for name in _PLAIN_FIELDS:
            if (value := getattr(self, name)) is not None:
                setattr(tenant, name, value)
        if self.max_priority is not None:
            tenant.max_priority = self.max_priority.proto
        if self.degrade_max_output_tokens is not None:
            tenant.degrade.max_output_tokens = self.degrade_max_output_tokens
        if self.degrade_models is not None:
            tenant.degrade.smaller_models.clear()
            if self.degrade_models != ["none"]:
                tenant.degrade.smaller_models.update(key_values(self.degrade_models, flag="--degrade-model"))
        replace_labels(tenant.metadata, self.labels)


def _degrade(tenant: cp.Tenant) -> str:
    """Return the tenant's degradation under pressure."""
    policy = tenant.degrade
    cap = [f"max_output_tokens={policy.max_output_tokens}"] if policy.max_output_tokens else []
    return ", ".join((*cap, *(f"{model}={other}" for model, other in sorted(policy.smaller_models.items()))))


TENANTS: Final[Resource[cp.Tenant]] = resource(
    "tenant",
    (
        Column("name", lambda tenant: tenant.metadata.name),
        Column("display name", lambda tenant: tenant.display_name, drop=1),
        Column("requests/min", lambda tenant: limit(tenant.requests_per_minute)),
        Column("concurrency", lambda tenant: limit(tenant.max_concurrency)),
        Column("tokens/min", lambda tenant: limit(tenant.tokens_per_minute), wide=True),
        Column("weight", lambda tenant: f"{tenant.weight or 1:g}", wide=True),
        Column("committed/min", lambda tenant: str(tenant.committed_tokens_per_minute or ""), wide=True),
        Column("each user", lambda tenant: show_limits(tenant.user_limits), wide=True),
        Column("degrade", _degrade, wide=True),
        Column("state", lambda tenant: "disabled" if tenant.disabled else "enabled"),
        Column("max priority", lambda tenant: priority(tenant.max_priority) or "standard", wide=True),
        Column("labels", lambda tenant: labels(tenant.metadata), wide=True),
        Column("age", lambda tenant: age(tenant.metadata), wide=True),
        Column("etag", lambda tenant: tenant.metadata.etag, wide=True),
    ),
    lambda admin: admin.tenants,
)
add_list(app, TENANTS, about="List the tenants with their limits.")
add_show(app, TENANTS, about="Show a tenant with all its fields.")


@command(
    app,
    "create",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway tenants create acme --display-name 'Acme Inc.'",
        "fairway tenants create acme --requests-per-minute 600 --max-concurrency 32",
        "fairway tenants create acme --user-tokens-per-minute 20000 --max-output-tokens 4096",
        "fairway tenants create acme --degrade-max-output-tokens 256 --degrade-model chat=chat-small",
    ),
    groups=(LIMITS, USER_LIMITS),
)
async def create(
    connection: Connection,
    name: NameArgument,
    limits: Mapping[str, Any],
    user_limits: Mapping[str, Any],
    display_name: DisplayNameOption = None,
    max_priority: PriorityOption = None,
    weight: WeightOption = None,
    committed_tokens_per_minute: CommittedOption = None,
    degrade_max_output_tokens: DegradeTokensOption = None,
    degrade_model: DegradeModelOption = None,
    label: LabelOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Create a tenant with its limits."""
    wanted = cp.Tenant(metadata=cp.Metadata(name=name))
    changes = _Changes(
        limits,
        user_limits,
        display_name,
        max_priority,
        weight,
        committed_tokens_per_minute,
        degrade_max_output_tokens,
        degrade_model,
        label,
    )
    changes.apply(wanted)
    what = f"cannot create the tenant {name}"
    TENANTS.write_one(await checked(connection.admin.tenants.create(wanted), what=what), output)


@command(
    app,
    "update",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway tenants update acme --requests-per-minute 1200",
        "fairway tenants update acme --label tier=gold --etag 4711",
    ),
    groups=(LIMITS, USER_LIMITS),
)
async def update(
    connection: Connection,
    name: NameArgument,
    limits: Mapping[str, Any],
    user_limits: Mapping[str, Any],
    display_name: DisplayNameOption = None,
    max_priority: PriorityOption = None,
    weight: WeightOption = None,
    committed_tokens_per_minute: CommittedOption = None,
    degrade_max_output_tokens: DegradeTokensOption = None,
    degrade_model: DegradeModelOption = None,
    label: LabelOption = None,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Change the given fields and keep the rest. Limits apply from the next request on.

    --label replaces all present labels.
    """
    changes = _Changes(
        limits,
        user_limits,
        display_name,
        max_priority,
        weight,
        committed_tokens_per_minute,
        degrade_max_output_tokens,
        degrade_model,
        label,
    )
    TENANTS.write_one(await _changed(connection, name, etag, changes.apply), output)


@command(app, "disable", to=Server.CONTROLPLANE, examples=("fairway tenants disable acme",))
async def disable(
    connection: Connection,
    name: NameArgument,
    etag: EtagOption = "",
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Reject every request of a tenant; its keys and limits stay."""
    confirm(f"Disable the tenant {name}? Its requests are rejected from now on.", yes=yes)
    TENANTS.write_one(await _changed(connection, name, etag, _disabled(True)), output)


@command(app, "enable", to=Server.CONTROLPLANE, examples=("fairway tenants enable acme",))
async def enable(
    connection: Connection, name: NameArgument, etag: EtagOption = "", output: OutputOption = Format.TABLE
) -> None:
    """Enable a disabled tenant."""
    TENANTS.write_one(await _changed(connection, name, etag, _disabled(False)), output)


add_delete(
    app,
    TENANTS,
    question="Delete the tenant {name}?",
    about="Delete a tenant. Rejected while it has keys or budgets.",
    examples=("fairway tenants delete acme", "fairway tenants delete acme --yes"),
)


async def _changed(
    connection: Connection, name: str, etag: str, change: Callable[[cp.Tenant], None]
) -> cp.Tenant:
    changed = connection.admin.tenants.change(name, change, etag=etag)
    return await checked(changed, what=f"cannot change the tenant {name}")


def _disabled(disabled: bool) -> Callable[[cp.Tenant], None]:
    def change(tenant: cp.Tenant) -> None:
        tenant.disabled = disabled

    return change
