"""`fairway tenants`, `keys` and `budgets`: who may use the models, how much of them, and at what cost."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, OptionGroup, Server, command
from fairway.cli.flags import (
    EtagOption,
    Format,
    IsolationName,
    LabelOption,
    NameArgument,
    OutputOption,
    PriorityName,
    RoleName,
    YesOption,
    key_values,
    optional,
    optional_money,
    optional_span,
    parse_future,
    replace_labels,
    span_s,
)
from fairway.cli.terminal.cells import isolation, limit, moment, priority, role_name, show_money
from fairway.cli.terminal.formats import DOCUMENTS, document_of, write_document
from fairway.cli.terminal.listing import Resource, add_delete, add_list, add_show, metadata_columns, resource
from fairway.cli.terminal.output import confirm, err, out, plain
from fairway.cli.terminal.table import Column
from fairway.v1 import controlplane_pb2 as cp

_COUNTS: Final = (
    ("requests_per_minute", 100_000_000, "Requests per minute"),
    ("max_concurrency", 1_000_000, "Requests at once"),
    ("tokens_per_minute", 10**12, "Prompt and output tokens per minute"),
    ("input_tokens_per_minute", 10**12, "Prompt tokens per minute"),
    ("output_tokens_per_minute", 10**12, "Output tokens per minute"),
    ("max_context_tokens", 2_097_152, "Prompt and most output of a request"),
    ("max_output_tokens", 1_048_576, "Most output tokens of a choice"),
)


def limit_options(name: str, *, prefix: str = "", of: str = "") -> OptionGroup:
    """Return the options of all limits. ``name``: of the parameter that receives those that were given."""
    options: dict[str, object] = {}
    for field, largest, what in _COUNTS:
        flag = f"--{prefix}{field.replace('_', '-')}"
        options[field] = optional(int, flag, f"{what}{of}. 0: no limit.", min=0, max=largest)
    options["max_timeout"] = optional_span(f"--{prefix}max-timeout", f"Longest time of a request{of}.")
    return OptionGroup(name, prefix.replace("-", "_"), options)


LIMITS: Final = limit_options("limits")
USER_LIMITS: Final = limit_options("user_limits", prefix="user-", of=", of each end user")


def set_limits(message: cp.Tenant | cp.Limits, values: Mapping[str, Any]) -> None:
    """Set the limits that were given; the others stay."""
    for field, value in values.items():
        if field != "max_timeout":
            setattr(message, field, value)
        elif value:
            message.max_timeout.FromMicroseconds(round(value * 1e6))
        else:
            message.ClearField("max_timeout")


def show_limits(limits: cp.Limits) -> str:
    """Return the limits that are set."""
    found = [f"{field}={value}" for field, _, _ in _COUNTS if (value := getattr(limits, field))]
    if limits.HasField("max_timeout"):
        found.append(f"max_timeout={limits.max_timeout.ToTimedelta().total_seconds():g}s")
    return ",".join(found)


tenants = typer.Typer(help="Tenants: the unit of quotas and isolation.", no_args_is_help=True)

_FIELDS: Final = OptionGroup(
    "fields",
    "",
    {
        "display_name": optional(str, "--display-name", "Name to show to users."),
        "max_priority": optional(
            PriorityName, "--max-priority", "Highest priority that its requests may have."
        ),
        "weight": optional(
            float,
            "--weight",
            "Share of a contended model, relative to other tenants.",
            min=0.001,
            max=1_000_000,
        ),
        "committed_tokens_per_minute": optional(
            int,
            "--committed-tokens-per-minute",
            "Guaranteed tokens; usage above them is rejected first. 0: no guarantee.",
            min=0,
        ),
        "degrade_max_output_tokens": optional(
            int,
            "--degrade-max-output-tokens",
            "Under pressure, limit outputs to this many tokens. 0: no limit.",
            min=0,
            max=1_048_576,
        ),
        "isolation": optional(
            IsolationName, "--isolation", "Nodes of its requests: shared ones, its slices, or its nodes."
        ),
        "isolation_waits": optional(
            bool,
            "--isolation-waits/--isolation-refuses",
            "Whether requests wait while no node of its own serves their model.",
        ),
        "kv_share": optional(
            float, "--kv-share", "Share of each worker's KV that it may hold. 0: no budget.", min=0, max=1
        ),
        "egress_tokens_per_second": optional(
            int,
            "--egress-tokens-per-second",
            "Output tokens that its clients receive per second. 0: no limit.",
            min=0,
            max=100_000_000,
        ),
        "stream_tokens_per_second": optional(
            int,
            "--stream-tokens-per-second",
            "Output tokens that each of its streams receives per second. 0: no limit.",
            min=0,
            max=100_000_000,
        ),
        "retention": optional_span(
            "--retention",
            "Longest time that its files, responses and answers are stored. 0: no bound of its own.",
        ),
        "residency": optional(
            str, "--residency", "Region that its prompts and outputs do not leave. '': any."
        ),
        "training_consent": optional(
            str,
            "--training-consent",
            "Who of the tenant agreed to the use of its data beyond its requests, and for what. "
            "'none' withdraws.",
            metavar="WHO=PURPOSE",
        ),
        "degrade_model": optional(
            list[str],
            "--degrade-model",
            "Under pressure, use another deployment: model=smaller. Repeatable; 'none' removes all.",
        ),
    },
)


def _set_fields(tenant: cp.Tenant, fields: Mapping[str, Any]) -> None:
    """Set the fields that were given; the others stay."""
    for name, value in fields.items():
        match name:
            case "max_priority":
                tenant.max_priority = value.proto
            case "isolation":
                tenant.isolation = value.proto
            case "retention":
                tenant.retention.FromMicroseconds(round(value * 1e6))
            case "training_consent":
                tenant.ClearField("training_consent")
                if value != "none":
                    ((who, purpose),) = key_values([value], flag="--training-consent").items()
                    tenant.training_consent.granted_by, tenant.training_consent.purpose = who, purpose
            case "degrade_max_output_tokens":
                tenant.degrade.max_output_tokens = value
            case "degrade_model":
                tenant.degrade.smaller_models.clear()
                if value != ["none"]:
                    tenant.degrade.smaller_models.update(key_values(value, flag="--degrade-model"))
            case _:
                setattr(tenant, name, value)


def _degrade(tenant: cp.Tenant) -> str:
    """Return the tenant's degradation under pressure."""
    policy = tenant.degrade
    cap = [f"max_output_tokens={policy.max_output_tokens}"] if policy.max_output_tokens else []
    return ", ".join((*cap, *(f"{model}={other}" for model, other in sorted(policy.smaller_models.items()))))


TENANTS: Final[Resource[cp.Tenant]] = resource(
    "tenant",
    (
        Column("display name", lambda tenant: tenant.display_name, drop=1),
        Column("requests/min", lambda tenant: limit(tenant.requests_per_minute)),
        Column("concurrency", lambda tenant: limit(tenant.max_concurrency)),
        Column("tokens/min", lambda tenant: limit(tenant.tokens_per_minute), wide=True),
        Column("weight", lambda tenant: f"{tenant.weight or 1:g}", wide=True),
        Column("committed/min", lambda tenant: str(tenant.committed_tokens_per_minute or ""), wide=True),
        Column("each user", lambda tenant: show_limits(tenant.user_limits), wide=True),
        Column("degrade", _degrade, wide=True),
        Column("isolation", lambda tenant: isolation(tenant.isolation) or "packed", wide=True),
        Column("kv share", lambda tenant: f"{tenant.kv_share:g}" if tenant.kv_share else "", wide=True),
        Column("egress/s", lambda tenant: str(tenant.egress_tokens_per_second or ""), wide=True),
        Column("stream/s", lambda tenant: str(tenant.stream_tokens_per_second or ""), wide=True),
        Column("safety pack", lambda tenant: tenant.safety_pack, wide=True),
        Column("state", lambda tenant: "disabled" if tenant.disabled else "enabled"),
        Column("max priority", lambda tenant: priority(tenant.max_priority) or "standard", wide=True),
        *metadata_columns(),
    ),
    lambda admin: admin.tenants,
)
add_list(tenants, TENANTS, about="List the tenants with their limits.")
add_show(tenants, TENANTS, about="Show a tenant with all its fields.")


@command(
    tenants,
    "create",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway tenants create acme --display-name 'Acme Inc.'",
        "fairway tenants create acme --requests-per-minute 600 --max-concurrency 32",
        "fairway tenants create acme --user-tokens-per-minute 20000 --max-output-tokens 4096",
        "fairway tenants create acme --isolation dedicated --isolation-waits",
        "fairway tenants create acme --kv-share 0.25",
        "fairway tenants create acme --degrade-max-output-tokens 256 --degrade-model chat=chat-small",
    ),
    groups=(_FIELDS, LIMITS, USER_LIMITS),
)
async def create_tenant(
    connection: Connection,
    name: NameArgument,
    fields: Mapping[str, Any],
    label: LabelOption = None,
    output: OutputOption = Format.TABLE,
    *,
    limits: Mapping[str, Any],
    user_limits: Mapping[str, Any],
) -> None:
    """Create a tenant with its limits."""
    wanted = cp.Tenant(metadata=cp.Metadata(name=name, labels=key_values(label, flag="--label")))
    _set_fields(wanted, fields)
    set_limits(wanted, limits)
    set_limits(wanted.user_limits, user_limits)
    what = f"cannot create the tenant {name}"
    TENANTS.write_one(await checked(connection.admin.tenants.create(wanted), what=what), output)


@command(
    tenants,
    "update",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway tenants update acme --requests-per-minute 1200",
        "fairway tenants update acme --label tier=gold --etag 4711",
    ),
    groups=(_FIELDS, LIMITS, USER_LIMITS),
)
async def update_tenant(
    connection: Connection,
    name: NameArgument,
    fields: Mapping[str, Any],
    label: LabelOption = None,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
    *,
    limits: Mapping[str, Any],
    user_limits: Mapping[str, Any],
) -> None:
    """Change the given fields and keep the rest. Limits apply from the next request on.

    --label replaces all present labels.
    """

    def change(tenant: cp.Tenant) -> None:
        _set_fields(tenant, fields)
        set_limits(tenant, limits)
        set_limits(tenant.user_limits, user_limits)
        replace_labels(tenant.metadata, label)

    await TENANTS.change(connection, name, change, etag, output)


@command(tenants, "disable", to=Server.CONTROLPLANE, examples=("fairway tenants disable acme",))
async def disable(
    connection: Connection,
    name: NameArgument,
    etag: EtagOption = "",
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Reject every request of a tenant; its keys and limits stay."""
    confirm(f"Disable the tenant {name}? Its requests are rejected from now on.", yes=yes)
    await TENANTS.change(connection, name, lambda tenant: setattr(tenant, "disabled", True), etag, output)


@command(tenants, "enable", to=Server.CONTROLPLANE, examples=("fairway tenants enable acme",))
async def enable(
    connection: Connection, name: NameArgument, etag: EtagOption = "", output: OutputOption = Format.TABLE
) -> None:
    """Enable a disabled tenant."""
    await TENANTS.change(connection, name, lambda tenant: setattr(tenant, "disabled", False), etag, output)


@command(tenants, "erase", to=Server.CONTROLPLANE, examples=("fairway tenants erase acme",))
async def erase(
    connection: Connection,
    name: NameArgument,
    etag: EtagOption = "",
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Destroy the keys of all that is stored of a tenant, and disable it. Cannot be undone.

    `show` has the time at which its files, responses and records were deleted.
    """
    confirm(f"Erase all that is stored of the tenant {name}? This cannot be undone.", yes=yes)
    erased = connection.admin.tenants.erase(name, etag=etag)
    TENANTS.write_one(await checked(erased, what=f"cannot erase the tenant {name}"), output)


@command(tenants, "rotate-key", to=Server.CONTROLPLANE, examples=("fairway tenants rotate-key acme",))
async def rotate_key(connection: Connection, name: NameArgument) -> None:
    """Seal what is stored of a tenant from now on with another data key."""
    rotated = connection.admin.tenants.rotate_key(name)
    await checked(rotated, what=f"cannot rotate the data key of the tenant {name}")
    out().print(f"Another data key seals what is stored of {name} within a few seconds.")


add_delete(
    tenants,
    TENANTS,
    question="Delete the tenant {name}?",
    about="Delete a tenant. Rejected while it has keys or budgets.",
    examples=("fairway tenants delete acme", "fairway tenants delete acme --yes"),
)


keys = typer.Typer(help="API keys of tenants and of the installation's people.", no_args_is_help=True)

ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="A model that the key may use. Repeatable; without it: all models of the tenant.",
        autocompletion=completion.deployments,
    ),
]
ExpiresOption = Annotated[
    datetime | None,
    typer.Option(
        "--expires",
        parser=parse_future,
        metavar="WHEN",
        help="Expiry: a time span such as 90d, or a time such as 2027-01-31.",
    ),
]


def _expiry(key: cp.Key) -> str:
    if not key.HasField("expire_time"):
        return "never"
    expired = key.expire_time.ToDatetime(tzinfo=UTC) <= datetime.now(UTC)
    return moment(key.expire_time) + (" (expired)" if expired else "")


KEYS: Final[Resource[cp.Key]] = resource(
    "key",
    (
        Column("role", lambda key: role_name(key.role)),
        Column("tenant", lambda key: key.tenant),
        Column("expires", _expiry),
        Column("models", lambda key: ",".join(key.models) or "all", wide=True),
        Column("limits", lambda key: show_limits(key.limits), wide=True),
        *metadata_columns(),
    ),
    lambda admin: admin.keys,
)
add_list(keys, KEYS, about="List the keys, without their secrets.")
add_show(keys, KEYS, about="Show a key, without its secret.")


@command(
    keys,
    "create",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway keys create ci --tenant acme --expires 90d",
        "fairway keys create kiosk --tenant acme --model fairway-tiny --requests-per-minute 60",
        "fairway keys create acme.lead --tenant acme --role tenant-admin",
        "fairway keys create ops-anna --role operator",
        "export FAIRWAY_API_KEY=$(fairway keys create laptop)",
    ),
    groups=(LIMITS,),
)
async def create_key(
    connection: Connection,
    name: NameArgument,
    tenant: Annotated[
        str, typer.Option("--tenant", help="Tenant of the key.", autocompletion=completion.tenants)
    ] = "default",
    role: Annotated[
        RoleName, typer.Option("--role", help="What the key may do; only the last two have a tenant.")
    ] = RoleName.TENANT,
    model: ModelsOption = None,
    expires: ExpiresOption = None,
    label: LabelOption = None,
    output: OutputOption = Format.TABLE,
    *,
    limits: Mapping[str, Any],
) -> None:
    """Create a key and print its secret. The secret is shown only once."""
    wanted = cp.Key(
        metadata=cp.Metadata(name=name, labels=key_values(label, flag="--label")),
        role=role.proto,
        tenant=tenant if role.of_tenant else "",
        models=model or (),
    )
    if expires is not None:
        wanted.expire_time.FromDatetime(expires)
    set_limits(wanted.limits, limits)
    made = await checked(connection.admin.keys.create(wanted), what=f"cannot create the key {name}")
    _show_secret(made.key, made.secret, output)


@command(
    keys,
    "rotate",
    to=Server.CONTROLPLANE,
    examples=("fairway keys rotate ci --grace 24h", "fairway keys rotate leaked"),
)
async def rotate(
    connection: Connection,
    name: NameArgument,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            parser=span_s,
            metavar="SPAN",
            help="How long the old secret stays valid.",
            show_default="0s",
        ),
    ] = 0.0,
    etag: EtagOption = "",
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Give a key a new secret and print it. The old one stays valid for the grace period, 0 by default."""
    if not grace:
        confirm(
            f"Rotate the key {name} without a grace period? The old secret is rejected at once.",
            yes=yes,
        )
    rotation = connection.admin.keys.rotate(name, grace_s=grace, etag=etag)
    made = await checked(rotation, what=f"cannot rotate the key {name}")
    _show_secret(made.key, made.secret, output)


@command(
    keys,
    "update",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway keys update ci --expires 30d",
        "fairway keys update ci --no-expiry",
        "fairway keys update kiosk --model fairway-tiny --model other",
        "fairway keys update kiosk --all-models",
    ),
    groups=(LIMITS,),
)
async def update_key(
    connection: Connection,
    name: NameArgument,
    model: ModelsOption = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="Allow all models of the tenant.")] = False,
    expires: ExpiresOption = None,
    no_expiry: Annotated[bool, typer.Option("--no-expiry", help="Remove the expiry.")] = False,
    label: LabelOption = None,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
    *,
    limits: Mapping[str, Any],
) -> None:
    """Change the given fields of a key and keep the rest. Its role, tenant and secret stay.

    --label replaces all present labels.
    """
    if (model and all_models) or (expires and no_expiry):
        raise typer.BadParameter("--model and --all-models, --expires and --no-expiry exclude each other")

    def change(key: cp.Key) -> None:
        if model or all_models:
            del key.models[:]
            key.models.extend(model or ())
        if expires is not None:
            key.expire_time.FromDatetime(expires)
        if no_expiry:
            key.ClearField("expire_time")
        set_limits(key.limits, limits)
        replace_labels(key.metadata, label)

    await KEYS.change(connection, name, change, etag, output)


add_delete(
    keys,
    KEYS,
    question="Revoke the key {name}? Requests with it are rejected from now on.",
    about="Delete a key. Requests with it are rejected from then on.",
    examples=("fairway keys revoke ci", "fairway keys revoke leaked --yes"),
    verb="revoke",
)


def _show_secret(key: cp.Key, secret: str, output: Format) -> None:
    """Print only the secret, for scripts, or the key and the secret as a document."""
    if output in DOCUMENTS:
        write_document({"key": document_of(key), "secret": secret}, output)
        return
    plain(out(), secret)
    plain(err(), f"This is the secret of the key {key.metadata.name}. It is not stored and not shown again.")


budgets = typer.Typer(help="Budgets: what requests may cost per month and per day.", no_args_is_help=True)

_EACH: Final = "*"
_AMOUNTS: Final = OptionGroup(
    "amounts",
    "",
    {
        "limit_micros": optional_money("--per-month", "Limit per calendar month, UTC. 0: no limit."),
        "day_limit_micros": optional_money("--per-day", "Limit per day, UTC. 0: no limit."),
    },
)


def _set_amounts(budget: cp.Budget, amounts: Mapping[str, int]) -> None:
    """Set the limits that were given; the others stay."""
    for field, micros in amounts.items():
        setattr(budget, field, micros)


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
        *metadata_columns(),
    ),
    lambda admin: admin.budgets,
)
add_list(budgets, BUDGETS, about="List the budgets and what was spent of them.")
add_show(budgets, BUDGETS, about="Show a budget with all its fields, amounts in millionths.")


@command(
    budgets,
    "create",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway budgets create acme-all --tenant acme --per-month 500 --per-day 50",
        "fairway budgets create acme-ci --tenant acme --key ci --per-month 20",
        "fairway budgets create acme-users --tenant acme --each-user --per-day 0.50",
    ),
    groups=(_AMOUNTS,),
)
async def create_budget(
    connection: Connection,
    name: NameArgument,
    *,
    tenant: Annotated[
        str, typer.Option("--tenant", help="Tenant whose requests count.", autocompletion=completion.tenants)
    ] = "default",
    key: Annotated[str, typer.Option("--key", help="Count only requests with this key.")] = "",
    user: Annotated[str, typer.Option("--user", help="Count only requests of this end user.")] = "",
    each_user: Annotated[
        bool, typer.Option("--each-user", help="A budget for each end user that has none of its own.")
    ] = False,
    amounts: Mapping[str, int],
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
        currency=currency,
    )
    _set_amounts(wanted, amounts)
    made = await checked(connection.admin.budgets.create(wanted), what=f"cannot create the budget {name}")
    BUDGETS.write_one(made, output)


@command(
    budgets,
    "update",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway budgets update acme-all --per-month 800",
        "fairway budgets update acme-ci --per-day 0",
    ),
    groups=(_AMOUNTS,),
)
async def update_budget(
    connection: Connection,
    name: NameArgument,
    amounts: Mapping[str, int],
    label: LabelOption = None,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Change the limits and keep the rest. They apply from the next request on.

    --label replaces all present labels.
    """

    def change(budget: cp.Budget) -> None:
        _set_amounts(budget, amounts)
        replace_labels(budget.metadata, label)

    await BUDGETS.change(connection, name, change, etag, output)


add_delete(
    budgets,
    BUDGETS,
    question="Delete the budget {name}? Requests are no longer limited by it.",
    about="Delete a budget. What was spent stays counted until the period ends.",
    examples=("fairway budgets delete acme-ci", "fairway budgets delete acme-ci --yes"),
)
