"""`fairway deployments`: versions to run, and on how many workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer

from fairway.cli import completion
from fairway.cli.calls import checked
from fairway.cli.connection import Connection, OptionGroup, Server, command
from fairway.cli.flags import (
    EtagOption,
    Format,
    LabelOption,
    NameArgument,
    OutputOption,
    PriorityName,
    WaitOption,
    key_values,
    optional,
    optional_money,
    optional_span,
    replace_labels,
    span_s,
)
from fairway.cli.terminal.cells import age, enum_name, labels, moment, priority, short_digest, show_money
from fairway.cli.terminal.formats import DOCUMENTS, document_of, write_document
from fairway.cli.terminal.listing import Resource, add_delete, add_list, add_show, metadata_columns, resource
from fairway.cli.terminal.output import Bars, err, plain
from fairway.cli.terminal.table import Column, show_rows
from fairway.cli.watch import show_replicas, until_deployed
from fairway.client.admin.watch import wanted_replicas
from fairway.v1 import controlplane_pb2 as cp
from fairway.v1 import worker_pb2

app = typer.Typer(help="Deployments: which versions are kept running.", no_args_is_help=True)

ReplicasOption = Annotated[
    int | None, typer.Option("--replicas", min=0, max=10000, help="Number of workers.")
]
SelectorOption = Annotated[
    list[str] | None,
    typer.Option("--selector", metavar="KEY=VALUE", help="A label that the workers must have. Repeatable."),
]
PriorityOption = Annotated[
    PriorityName | None,
    typer.Option("--priority", help="Which deployment gets workers first when not all fit."),
]
ExecutorOption = Annotated[
    str,
    typer.Option(
        "--executor",
        help='"torch", "vllm", or "null" to measure without weights; default: what serves the version.',
    ),
]
TensorParallelOption = Annotated[
    int, typer.Option("--tensor-parallel", min=0, max=64, help="Devices that share each layer, of vllm.")
]
PipelineParallelOption = Annotated[
    int, typer.Option("--pipeline-parallel", min=0, max=64, help="Groups of devices in a row, of vllm.")
]


def _no_handoff(_: object) -> None:
    raise typer.BadParameter(
        "every replica prefills and decodes. To bound what prefills add between tokens, create an "
        "objective with --itl and --shape; docs/decisions/0088 has the reasons."
    )


PrefillReplicasOption = Annotated[
    None, typer.Option("--prefill-replicas", parser=_no_handoff, hidden=True, help="Refused.")
]
TenantOption = Annotated[
    str | None,
    typer.Option("--tenant", help="Run it on the nodes of this dedicated or partitioned tenant; '': shared."),
]
OutputFormOption = Annotated[
    str | None,
    typer.Option(
        "--output-form",
        help="How it writes calls and reasoning, such as hermes+think.",
    ),
]


def _in_place(text: str | float) -> float:
    """Return the seconds; those below 0 stand for off."""
    return OFF if text in ("off", OFF) else span_s(text)


InPlaceOption = Annotated[
    float | None,
    typer.Option(
        "--in-place",
        parser=_in_place,
        metavar="TIME|off",
        help="Updates replace weights in the running engines; requests have this long to finish. 0s: none.",
    ),
]


OFF: Final = -1.0
PRICES: Final = OptionGroup(
    "price",
    "",
    {
        "input_price": optional_money("--input-price", "Price of a million prompt tokens."),
        "cached_price": optional_money(
            "--cached-price", "The same for cached ones. Default: the input price."
        ),
        "output_price": optional_money("--output-price", "Price of a million output tokens."),
    },
)


def _set_price(deployment: cp.Deployment, price: Mapping[str, int]) -> None:
    """Set the prices that were given. A new input price without another applies to cached tokens too."""
    given = dict(price)
    if "input_price" in given:
        given.setdefault("cached_price", given["input_price"])
    for name, micros in given.items():
        setattr(deployment.price, name.replace("_price", "_micros"), micros)


SCALING: Final = OptionGroup(
    "scaling",
    "",
    {
        "min_replicas": optional(
            int, "--min-replicas", "Least replicas; 0: none while idle.", min=0, max=10000
        ),
        "max_replicas": optional(
            int, "--max-replicas", "Most; the replicas follow the load.", min=1, max=10000
        ),
        "idle": optional_span(
            "--idle", "Without a request before the last replica leaves; default: 10m.", "TIME"
        ),
        "max_cost_per_hour": optional(
            float, "--max-cost-per-hour", "What its nodes may cost together; 0: no bound.", min=0
        ),
        "fixed": optional(bool, "--fixed", "No bounds: --replicas holds again."),
    },
)


def _set_scaling(deployment: cp.Deployment, given: Mapping[str, Any]) -> None:
    """Set the bounds that were given. First bounds include the present number of replicas, and not 0."""
    if given.get("fixed"):
        deployment.ClearField("scaling")
        return
    if given and not deployment.HasField("scaling"):
        least = given.get("min_replicas", 1)
        deployment.scaling.min_replicas = least
        deployment.scaling.max_replicas = max(1, least, deployment.replicas)
    for name, value in given.items():
        if name == "idle":
            deployment.scaling.idle.FromMilliseconds(round(value * 1000))
        else:
            setattr(deployment.scaling, name, value)


def _set_in_place(deployment: cp.Deployment, seconds: float | None) -> None:
    if seconds == OFF:
        deployment.ClearField("in_place")
    elif seconds is not None:
        deployment.in_place.FromMilliseconds(round(seconds * 1000))


def _prices(deployment: cp.Deployment) -> str:
    price = deployment.price
    amounts = (price.input_micros, price.cached_micros, price.output_micros)
    return "/".join(map(show_money, amounts)) if any(amounts) else ""


def _version(deployment: cp.Deployment) -> str:
    tag = "" if deployment.version.startswith("sha256:") else f"{deployment.version}@"
    moved = deployment.status.tag_digest not in ("", deployment.version_digest)
    return f"{tag}{short_digest(deployment.version_digest)}" + (" (tag moved)" if moved else "")


def _engine(deployment: cp.Deployment) -> str:
    sizes = (max(1, deployment.tensor_parallel), max(1, deployment.pipeline_parallel))
    return deployment.executor + ("" if sizes == (1, 1) else f" {sizes[0]}x{sizes[1]}")


def _scaling(deployment: cp.Deployment) -> str:
    if not deployment.HasField("scaling"):
        return ""
    bounds = deployment.scaling
    return f"{bounds.min_replicas}-{bounds.max_replicas}" + (" frozen" if bounds.frozen else "")


def _capabilities(deployment: cp.Deployment) -> str:
    """Return what every replica that serves promises."""
    serving = [one for one in deployment.status.replicas if one.state == worker_pb2.VERSION_STATE_READY]
    common = set[str].intersection(*(set(one.capabilities) for one in serving)) if serving else set()
    return ",".join(sorted(common))


DEPLOYMENTS: Final[Resource[cp.Deployment]] = resource(
    "deployment",
    (
        Column("model", lambda deployment: deployment.model, drop=2),
        Column("version", _version, drop=1),
        Column("ready", lambda found: f"{found.status.ready_replicas}/{wanted_replicas(found)}"),
        Column("scaling", _scaling, drop=3),
        Column("message", lambda deployment: deployment.status.message, least=40),
        Column("workers", lambda found: ",".join(r.worker_id for r in found.status.replicas), wide=True),
        Column("executor", _engine, wide=True),
        Column("promises", _capabilities, wide=True),
        Column("priority", lambda deployment: priority(deployment.priority), wide=True),
        Column(
            "selector",
            lambda found: ",".join(f"{k}={v}" for k, v in sorted(found.node_selector.items())),
            wide=True,
        ),
        Column("tenant", lambda deployment: deployment.tenant, wide=True),
        Column("price in/cached/out", _prices, wide=True),
        Column("labels", lambda deployment: labels(deployment.metadata), wide=True),
        Column("digest", lambda deployment: deployment.version_digest, wide=True),
        Column("age", lambda deployment: age(deployment.metadata), wide=True),
        Column("etag", lambda deployment: deployment.metadata.etag, wide=True),
    ),
    lambda admin: admin.deployments,
)
add_list(app, DEPLOYMENTS, about="List the deployments and how many replicas are ready.")
add_show(app, DEPLOYMENTS, about="Show a deployment with the state of each replica.")


@command(
    app,
    "create",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway deployments create my-model --wait",
        "fairway deployments create chat --model my-model --version v2 --replicas 3 --selector gpu=h100",
        "fairway deployments create chat --min-replicas 0 --max-replicas 4 --idle 15m",
        "fairway deployments create chat --input-price 0.50 --cached-price 0.05 --output-price 1.50",
    ),
    groups=(PRICES, SCALING),
)
async def create(
    connection: Connection,
    name: NameArgument,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="Name in the registry; default: the name of the deployment.",
            autocompletion=completion.models,
        ),
    ] = "",
    version: Annotated[
        str, typer.Option("--version", help="A digest or a tag.", autocompletion=completion.versions)
    ] = "latest",
    replicas: ReplicasOption = 1,
    selector: SelectorOption = None,
    priority: PriorityOption = None,
    executor: ExecutorOption = "",
    tensor_parallel: TensorParallelOption = 1,
    pipeline_parallel: PipelineParallelOption = 1,
    prefill_replicas: PrefillReplicasOption = None,
    output_form: OutputFormOption = None,
    tenant: TenantOption = None,
    in_place: InPlaceOption = None,
    label: LabelOption = None,
    wait: WaitOption = False,
    output: OutputOption = Format.TABLE,
    *,
    price: Mapping[str, int],
    scaling: Mapping[str, Any],
) -> None:
    """Run a version on a number of workers. A tag is resolved once; later moves have no effect."""
    wanted = cp.Deployment(
        metadata=cp.Metadata(name=name, labels=key_values(label, flag="--label")),
        model=model or name,
        version=version,
        replicas=replicas or 0,
        executor=executor,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        output_form=output_form or "",
        tenant=tenant or "",
        node_selector=key_values(selector, flag="--selector"),
        priority=priority.proto if priority else 0,  # type: ignore[arg-type]
    )
    _set_price(wanted, price)
    _set_scaling(wanted, scaling)
    _set_in_place(wanted, in_place)
    creation = connection.admin.deployments.create(wanted)
    made = await checked(creation, what=f"cannot create the deployment {name}")
    await _show(connection, made, wait, output)


@command(
    app,
    "update",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway deployments update chat --version v3 --wait",
        "fairway deployments update chat --version latest    # follow a tag that moved",
        "fairway deployments update chat --selector gpu=h100 --priority interactive",
        "fairway deployments update chat --output-price 2",
        "fairway deployments update chat --version v4 --in-place 20s",
        "fairway deployments update chat --min-replicas 1 --max-replicas 6",
    ),
    groups=(PRICES, SCALING),
)
async def update(
    connection: Connection,
    name: NameArgument,
    model: Annotated[
        str, typer.Option("--model", help="Another model of the registry.", autocompletion=completion.models)
    ] = "",
    version: Annotated[
        str, typer.Option("--version", help="A digest or a tag.", autocompletion=completion.versions)
    ] = "",
    replicas: ReplicasOption = None,
    selector: SelectorOption = None,
    priority: PriorityOption = None,
    executor: ExecutorOption = "",
    tensor_parallel: TensorParallelOption = 0,
    pipeline_parallel: PipelineParallelOption = 0,
    output_form: OutputFormOption = None,
    tenant: TenantOption = None,
    in_place: InPlaceOption = None,
    label: LabelOption = None,
    etag: EtagOption = "",
    wait: WaitOption = False,
    output: OutputOption = Format.TABLE,
    *,
    price: Mapping[str, int],
    scaling: Mapping[str, Any],
) -> None:
    """Change the given fields and keep the rest. Without --version the running version stays.

    --selector and --label replace all present entries.
    """
    if model and not version:
        raise typer.BadParameter("--model needs --version: the present version belongs to the old model")

    def change(deployment: cp.Deployment) -> None:
        deployment.model = model or deployment.model
        deployment.version = version or deployment.version
        if replicas is not None:
            deployment.replicas = replicas
        if selector is not None:
            deployment.node_selector.clear()
            deployment.node_selector.update(key_values(selector, flag="--selector"))
        if priority is not None:
            deployment.priority = priority.proto
        if executor:
            deployment.executor = executor
        deployment.tensor_parallel = tensor_parallel or deployment.tensor_parallel
        deployment.pipeline_parallel = pipeline_parallel or deployment.pipeline_parallel
        if output_form is not None:
            deployment.output_form = output_form
        if tenant is not None:
            deployment.tenant = tenant
        _set_price(deployment, price)
        _set_scaling(deployment, scaling)
        _set_in_place(deployment, in_place)
        replace_labels(deployment.metadata, label)

    changed = connection.admin.deployments.change(name, change, etag=etag)
    changed_to = await checked(changed, what=f"cannot change the deployment {name}")
    await _show(connection, changed_to, wait, output)


@command(
    app,
    "scale",
    to=Server.CONTROLPLANE,
    examples=("fairway deployments scale chat 4 --wait", "fairway deployments scale chat 0"),
)
async def scale(
    connection: Connection,
    name: NameArgument,
    replicas: Annotated[int, typer.Argument(min=0, max=10000, help="Number of workers.")],
    etag: EtagOption = "",
    wait: WaitOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Run the same version on another number of workers."""

    scaling = connection.admin.deployments.scale(name, replicas, etag=etag)
    scaled = await checked(scaling, what=f"cannot change the deployment {name}")
    if scaled.HasField("scaling"):
        hint = f"`fairway scaling override {name} {replicas}` sets them"
        plain(err(), f"warning: the replicas of {name} follow the load within its bounds; {hint}")
    await _show(connection, scaled, wait, output)


_REVISIONS: Final[tuple[Column[cp.DeploymentRevision], ...]] = (
    Column("revision", lambda one: one.name),
    Column("time", lambda one: moment(one.time)),
    Column("cause", lambda one: one.cause),
    Column("version", lambda one: _version(one.deployment)),
    Column("replicas", lambda one: str(one.deployment.replicas)),
    Column("price in/cached/out", lambda one: _prices(one.deployment), drop=1),
)


@command(app, "history", to=Server.CONTROLPLANE, examples=("fairway deployments history chat",))
async def history(connection: Connection, name: NameArgument, output: OutputOption = Format.TABLE) -> None:
    """Show the states that a deployment had, the newest first."""
    what = f"cannot show the history of the deployment {name}"
    found = await checked(connection.admin.deployments.history(name), what=what)
    if output in DOCUMENTS:
        write_document({"revisions": [document_of(one) for one in found]}, output)
    else:
        show_rows(_REVISIONS, found)


@command(
    app,
    "rollback",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway deployments rollback chat --wait",
        "fairway deployments rollback chat --to 01788000000000000",
    ),
)
async def rollback(
    connection: Connection,
    name: NameArgument,
    to: Annotated[
        str, typer.Option("--to", help="A revision of `history`. Default: the last other state.")
    ] = "",
    etag: EtagOption = "",
    wait: WaitOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Give a deployment an earlier state again, except for its replicas. The present version serves
    meanwhile.
    """
    going_back = connection.admin.deployments.rollback(name, to, etag=etag)
    changed = await checked(going_back, what=f"cannot roll back the deployment {name}")
    await _show(connection, changed, wait, output)


add_delete(
    app,
    DEPLOYMENTS,
    question="Delete the deployment {name}? Its model is no longer served then.",
    about="Delete a deployment; its workers finish the running sequences and unload the model.",
    examples=("fairway deployments delete chat", "fairway deployments delete chat --yes"),
)


async def _show(connection: Connection, deployment: cp.Deployment, wait: bool, output: Format) -> None:
    """Print the deployment; with ``wait``, once it is READY."""
    if wait:
        name = deployment.metadata.name
        with Bars() as bars:
            report = show_replicas(bars.update)
            deployment = await until_deployed(connection.admin, name, report, timeout_s=connection.wait_s)
    DEPLOYMENTS.write_one(deployment, output)


objectives = typer.Typer(
    help="Objectives: what requests are promised, and error budgets.", no_args_is_help=True
)


def _ratio(text: str | float) -> float:
    """Return an option's share; `99.9%` is 0.999. Raises BadParameter."""
    number, percent, _ = str(text).partition("%")
    try:
        found = round(float(number) / (100 if percent else 1), 12)
    except ValueError as exc:
        raise typer.BadParameter(f"{text!r} is no share such as 0.999 or 99.9%") from exc
    if not 0 <= found < 1:
        raise typer.BadParameter("a share is at least 0 and below 1")
    return found


def _share(flag: str, help_: str) -> object:
    return optional(float, flag, help_, parser=_ratio, metavar="SHARE")


_PROMISED: Final = OptionGroup(
    "promised",
    "",
    {
        "availability": _share("--availability", "Requests without our errors. 0: none."),
        "completion": _share("--completion", "Begun streams that we do not break. 0: none."),
        "ttft": optional_span("--ttft", "Time to first token. 0s: none.", "TIME"),
        "itl": optional_span("--itl", "Time between tokens. 0s: none.", "TIME"),
        "total": optional_span("--total", "Time from the first byte to the end. 0s: none.", "TIME"),
        "quantile": _share("--quantile", "Of the latencies; 0.95 by default."),
        "shapes_serving": optional(
            bool,
            "--shape/--observe",
            "Whether its latencies replace the targets of admission, shedding, degrading and prefill.",
        ),
    },
)


def _set_promised(objective: cp.Objective, promised: Mapping[str, Any]) -> None:
    """Set the promises that were given; the others stay."""
    for name, value in promised.items():
        match name:
            case "ttft" | "itl" | "total":
                getattr(objective, name).seconds = value
            case "quantile":
                for target in (objective.ttft, objective.itl, objective.total):
                    target.quantile = value
            case _:
                setattr(objective, name, value)


def _write_objective(made: cp.Objective, output: Format) -> None:
    """Print the objective, and on stderr what it does to requests."""
    for warning in made.warnings:
        plain(err(), f"warning: {warning}")
    OBJECTIVES.write_one(made, output)


def _promises(found: cp.Objective) -> str:
    parts = []
    if found.availability:
        parts.append(f"available {found.availability:.5g}")
    if found.completion:
        parts.append(f"complete {found.completion:.5g}")
    for name, target in (("ttft", found.ttft), ("itl", found.itl), ("total", found.total)):
        if target.seconds:
            parts.append(f"{name} p{100 * target.quantile:g} {target.seconds:g}s")
    if found.shapes_serving:
        parts.append("shapes serving")
    return ", ".join(parts)


def _by_sli(show: Callable[[cp.SliStatus], str]) -> Callable[[cp.Objective], str]:
    def cell(found: cp.Objective) -> str:
        parts = [(enum_name(cp.Sli.Name, one.sli, "SLI_"), show(one)) for one in found.status.slis]
        return ", ".join(f"{name} {text}" for name, text in parts if text) or "-"

    return cell


def _alert(one: cp.SliStatus) -> str:
    found = enum_name(cp.BurnAlert.Name, one.alert, "BURN_ALERT_")
    return "" if found == "none" else found


OBJECTIVES: Final[Resource[cp.Objective]] = resource(
    "objective",
    (
        Column("model", lambda found: found.model),
        Column("class", lambda found: priority(found.priority)),
        Column("promise", _promises),
        Column("budget left", _by_sli(lambda one: f"{one.budget_left_ratio:.1%}")),
        Column("burning", _by_sli(_alert)),
        Column("bad events", _by_sli(lambda one: f"{one.bad_events}/{one.events}"), wide=True),
        *metadata_columns(),
    ),
    lambda admin: admin.objectives,
)
add_list(objectives, OBJECTIVES, about="List the objectives and what is left of their error budgets.")
add_show(objectives, OBJECTIVES, about="Show an objective with all that was measured of it.")


@command(
    objectives,
    "create",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway objectives create chat --model chat --availability 99.9% --ttft 2s --itl 100ms",
        "fairway objectives create chat-batch --model chat --class batch --completion 0.99",
    ),
    groups=(_PROMISED,),
)
async def create_objective(
    connection: Connection,
    name: NameArgument,
    *,
    model: Annotated[
        str, typer.Option("--model", help="The deployment.", autocompletion=completion.deployments)
    ],
    priority_class: Annotated[
        PriorityName, typer.Option("--class", help="Class of the requests.")
    ] = PriorityName.STANDARD,
    promised: Mapping[str, Any],
    label: LabelOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Promise something to the requests of a model and class. It is measured, alerts and stops rollouts.

    With --shape its latencies also decide who is refused, shed and degraded.
    """
    wanted = cp.Objective(
        metadata=cp.Metadata(name=name, labels=key_values(label, flag="--label")),
        model=model,
        priority=priority_class.proto,
        ttft=cp.LatencyTarget(),
        itl=cp.LatencyTarget(),
        total=cp.LatencyTarget(),
    )
    _set_promised(wanted, promised)
    made = connection.admin.objectives.create(wanted)
    _write_objective(await checked(made, what=f"cannot create the objective {name}"), output)


@command(
    objectives,
    "update",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway objectives update chat --availability 99.95%",
        "fairway objectives update chat --itl 0s",
        "fairway objectives update chat --shape",
    ),
    groups=(_PROMISED,),
)
async def update_objective(
    connection: Connection,
    name: NameArgument,
    promised: Mapping[str, Any],
    label: LabelOption = None,
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Change the promises and keep the rest. What was counted before stays as it was counted.

    --label replaces all present labels.
    """

    def change(found: cp.Objective) -> None:
        _set_promised(found, promised)
        replace_labels(found.metadata, label)

    changed = connection.admin.objectives.change(name, change, etag=etag)
    _write_objective(await checked(changed, what=f"cannot change the objective {name}"), output)


add_delete(
    objectives,
    OBJECTIVES,
    question="Delete the objective {name}? Its alerts end.",
    about="Delete an objective.",
    examples=("fairway objectives delete chat", "fairway objectives delete chat --yes"),
)
