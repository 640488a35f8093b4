"""`fairway policies`: safety packs, who obeys them, and what they find."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from google.protobuf.timestamp_pb2 import Timestamp

from fairway.cli import completion
from fairway.cli.calls import PHASE_VERBS, checked, client_error, publish_folder
from fairway.cli.commands.accounts import TENANTS
from fairway.cli.commands.complete import TimeoutOption, open_client, read_file
from fairway.cli.connection import Connection, Server, command
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import EtagOption, Format, NameArgument, OutputOption
from fairway.cli.targets import DEFAULT_STATE_DIR, ApiKeyOption, GrpcOption, StateDirOption
from fairway.cli.terminal.cells import short_digest
from fairway.cli.terminal.formats import DOCUMENTS, write_document
from fairway.cli.terminal.output import Bars, err, out, plain
from fairway.cli.terminal.table import Column, show_rows
from fairway.client import Client, FairwayError, NotFound
from fairway.client.publish.publish import PublishProgress
from fairway.client.values import Moderated, Moderation
from fairway.v1 import controlplane_pb2 as cp

app = typer.Typer(help="Safety packs: what inputs and outputs are judged by.", no_args_is_help=True)

PackOption = Annotated[
    str,
    typer.Option("--pack", help="Deployment of the safety pack.", autocompletion=completion.deployments),
]
_ANSWER_S: Final = 60.0
# Bounds of one call.
_MAX_TEXTS: Final = 128
_MAX_CHARS: Final = 262_144


@command(
    app,
    "create",
    to=Server.REGISTRY,
    examples=(
        "fairway policies create strict.json --name strict",
        "fairway policies create strict.json --name strict --tag v2",
    ),
)
async def create(
    connection: Connection,
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A safety policy in JSON.")],
    name: Annotated[str, typer.Option("--name", help="Name of the pack.")],
    tag: Annotated[str, typer.Option("--tag", help="Tag to point at the version; '': none.")] = "latest",
    output: OutputOption = Format.TABLE,
) -> None:
    """Publish a safety pack as an immutable version. It applies once it is assigned, or rolled out."""
    with Bars() as bars:

        def report(progress: PublishProgress) -> None:
            bars.update(PHASE_VERBS[progress.phase], progress.done_ratio, str(file))

        done = await publish_folder(connection.admin, file, name, tag, report=report, kind="safety-pack")
    if output in DOCUMENTS:
        found = {"model": done.model, "digest": done.digest, "tag": tag, "created": done.created}
        write_document(found, output)
        return
    plain(out(), done.digest)
    plain(
        err(),
        f"{'published' if done.created else 'was published before'}; assign it with "
        f"`fairway policies assign --tenant TENANT --pack {name}`, or where it is deployed, "
        f"`fairway rollouts start {name}`",
    )


@command(
    app,
    "assign",
    to=Server.CONTROLPLANE,
    examples=(
        "fairway policies assign --tenant acme --pack strict",
        "fairway policies assign --tenant acme --none",
    ),
)
async def assign(
    connection: Connection,
    tenant: Annotated[str, typer.Option("--tenant", help="Tenant whose requests obey it.")],
    pack: PackOption = "",
    none: Annotated[
        bool, typer.Option("--none", help="Its requests obey their versions' packs alone.")
    ] = False,
    version: Annotated[
        str, typer.Option("--version", help="Version of a pack that is not deployed yet: a digest or a tag.")
    ] = "latest",
    etag: EtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Let the requests of a tenant obey a safety pack, from the next one on.

    A pack that is not deployed yet is deployed first, under its own name. It makes the pack of a request's
    version stricter, never weaker.
    """
    if bool(pack) == none:
        raise typer.BadParameter("name a pack, or --none", param_hint="--pack")
    if pack:
        await _deployed(connection, pack, version)

    def change(found: cp.Tenant) -> None:
        found.safety_pack = pack

    what = f"cannot assign {pack or 'no pack'} to the tenant {tenant}"
    changed = await checked(connection.admin.tenants.change(tenant, change, etag=etag), what=what)
    TENANTS.write_one(changed, output)


async def _deployed(connection: Connection, pack: str, version: str) -> None:
    """Return once the pack has a deployment. Raises CliError."""
    what = f"cannot deploy the safety pack {pack}"
    try:
        await connection.admin.deployments.get(pack)
    except NotFound:
        wanted = cp.Deployment(metadata=cp.Metadata(name=pack), model=pack, version=version)
        wanted.executor = "gateway"
        await checked(connection.admin.deployments.create(wanted), what=what)
        plain(err(), f"deployed {pack} at {version}")
    except FairwayError as error:
        raise client_error(error, what=what) from error


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """One line of a pack's history."""

    time: datetime
    what: str
    who: str  # the rollout or the tenant; empty: the deployment itself
    message: str


_CHANGES: Final[tuple[Column[PolicyChange], ...]] = (
    Column("time", lambda one: one.time.isoformat("T", "seconds") + "Z"),
    Column("what", lambda one: one.what),
    Column("of", lambda one: one.who),
    Column("message", lambda one: one.message, least=40),
)


@command(app, "history", to=Server.CONTROLPLANE, examples=("fairway policies history strict",))
async def history(connection: Connection, name: NameArgument, output: OutputOption = Format.TABLE) -> None:
    """Show the versions that a pack had, its rollouts, and who was assigned to it, the newest first.

    Assignments are shown for as long as events are retained; the audit log has every change of a tenant.
    """
    admin, what = connection.admin, f"cannot show the history of the safety pack {name}"
    revisions = await checked(admin.deployments.history(name), what=what)
    rollouts = await checked(admin.rollouts.list(), what=what)
    events = await checked(admin.events.list(kinds=[cp.RESOURCE_KIND_TENANT], limit=None), what=what)
    changes = sorted(
        (*_versions(revisions), *_rollouts(rollouts, name), *_assignments(events, name)),
        key=lambda one: one.time,
        reverse=True,
    )
    tenants = await checked(admin.tenants.list(), what=what)
    assigned = sorted(one.metadata.name for one in tenants if one.safety_pack == name)
    if output in DOCUMENTS:
        lines = [{**asdict(one), "time": f"{one.time.isoformat()}Z"} for one in changes]
        write_document({"changes": lines, "tenants": assigned}, output)
        return
    show_rows(_CHANGES, changes)
    plain(err(), f"assigned to {', '.join(assigned) or 'no tenant'}")


def _versions(revisions: Iterable[cp.DeploymentRevision]) -> Iterator[PolicyChange]:
    for one in revisions:
        message = f"{one.deployment.version} {short_digest(one.deployment.version_digest)}"
        yield PolicyChange(_time(one.time), one.cause, "", message)


def _rollouts(rollouts: Iterable[cp.Rollout], name: str) -> Iterator[PolicyChange]:
    for rollout in rollouts:
        for entry in rollout.history if rollout.deployment == name else ():
            yield PolicyChange(_time(entry.time), entry.what, rollout.metadata.name, entry.message)


def _assignments(events: Iterable[cp.Event], name: str) -> Iterator[PolicyChange]:
    for event in events:
        if event.reason == "SAFETY_PACK_ASSIGNED" and repr(name) in event.message:
            yield PolicyChange(_time(event.time), event.reason, event.resource, event.message)


def _time(time: Timestamp) -> datetime:
    return time.ToDatetime(UTC).replace(tzinfo=None)


class ExpectedText(msgspec.Struct, frozen=True):
    """One line of the file of `policies test`."""

    text: str
    expected: tuple[str, ...] = ()


@dataclass(slots=True)
class CategoryTable:
    """How often a category was found and expected."""

    category: str
    hits: int = 0  # found and expected
    false_alarms: int = 0  # found, not expected
    misses: int = 0  # expected, not found
    rest: int = 0  # neither

    def add(self, *, found: bool, expected: bool) -> None:
        self.hits += found and expected
        self.false_alarms += found and not expected
        self.misses += expected and not found
        self.rest += not (found or expected)

    @property
    def precision(self) -> float | None:
        return self.hits / total if (total := self.hits + self.false_alarms) else None

    @property
    def recall(self) -> float | None:
        return self.hits / total if (total := self.hits + self.misses) else None


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


_TABLE: Final[tuple[Column[CategoryTable], ...]] = (
    Column("category", lambda one: one.category),
    Column("hits", lambda one: str(one.hits)),
    Column("false alarms", lambda one: str(one.false_alarms)),
    Column("misses", lambda one: str(one.misses)),
    Column("rest", lambda one: str(one.rest)),
    Column("precision", lambda one: _share(one.precision)),
    Column("recall", lambda one: _share(one.recall)),
)


@app.command("test")
def judge_file(
    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help='Lines of {"text", "expected": [category]}.')
    ],
    pack: PackOption = "",
    outputs: Annotated[bool, typer.Option("--outputs", help="Judge by the rules of outputs.")] = False,
    timeout: TimeoutOption = _ANSWER_S,
    grpc_address: GrpcOption = "",
    api_key: ApiKeyOption = "",
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    output: OutputOption = Format.TABLE,
) -> None:
    """Judge the texts of a file by a pack, and show how often each category was found and expected.

    Without --pack it is that of the key's tenant.

    \b
    Examples:
      fairway policies test cases.jsonl --pack strict
      fairway policies test cases.jsonl --pack strict --outputs -o json
    """
    cases = _cases(file)
    client = open_client(grpc_address, api_key, state_dir, answer_s=timeout)
    found = asyncio.run(_judged(client, cases, pack, outputs=outputs, timeout_s=timeout))
    table = confusion(cases, [result for answer in found for result in answer.results])
    if output in DOCUMENTS:
        rows = [{**asdict(one), "precision": one.precision, "recall": one.recall} for one in table]
        digests = {"pack": found[0].pack, "pack_digest": found[0].pack_digest}
        write_document({**digests, "skipped": list(found[0].skipped), "categories": rows}, output)
        return
    show_rows(_TABLE, table)
    plain(err(), f"{len(cases)} texts by {found[0].pack} {short_digest(found[0].pack_digest)}")
    if found[0].skipped:
        plain(err(), f"not asked, since they judge generations alone: {', '.join(found[0].skipped)}")


def confusion(cases: Sequence[ExpectedText], results: Sequence[Moderation]) -> list[CategoryTable]:
    """Return the table of each category of the pack, by name. Raises CliError for an unknown category."""
    names = [category.name for category in results[0].categories]
    table = {name: CategoryTable(name) for name in names}
    for number, (case, result) in enumerate(zip(cases, results, strict=True), 1):
        if unknown := sorted(set(case.expected) - table.keys()):
            raise CliError(
                "UNKNOWN_CATEGORY",
                f"line {number} expects {unknown[0]!r}, which is no category of the pack",
                next_step=f"use one of {', '.join(names)}",
                exit_code=ExitCode.USAGE,
            )
        for category in result.categories:
            table[category.name].add(found=category.flagged, expected=category.name in case.expected)
    return list(table.values())


def _cases(file: Path) -> list[ExpectedText]:
    """Return the lines of a file. Raises CliError."""
    found: list[ExpectedText] = []
    for number, line in enumerate(read_file(file).splitlines(), 1):
        try:
            found += [msgspec.json.decode(line, type=ExpectedText)] if line.strip() else []
        except (msgspec.DecodeError, RecursionError) as error:
            raise CliError(
                "NOT_A_CASE",
                f"line {number} of {file} is no text with its categories: {error}",
                next_step='write {"text": "...", "expected": ["category"]}',
                exit_code=ExitCode.USAGE,
            ) from error
    if not found:
        raise CliError("NO_CASES", f"{file} has no lines", next_step="add some", exit_code=ExitCode.USAGE)
    return found


async def _judged(
    client: Client, cases: Sequence[ExpectedText], pack: str, *, outputs: bool, timeout_s: float
) -> list[Moderated]:
    answers: list[Moderated] = []
    async with client:
        for texts in _calls([case.text for case in cases]):
            try:
                answers.append(await client.moderate(texts, pack=pack, outputs=outputs, timeout_s=timeout_s))
            except FairwayError as error:
                raise client_error(error, what="cannot judge the texts") from error
    return answers


def _calls(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in calls within their bounds."""
    call: list[str] = []
    for text in texts:
        if call and (len(call) == _MAX_TEXTS or sum(map(len, call)) + len(text) > _MAX_CHARS):
            yield call
            call = []
        call.append(text)
    yield call
