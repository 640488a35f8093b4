"""`fairway models`: the versions in the registry, and the tags that point at them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from fairway.cli.bars import Bars
from fairway.cli.changes import confirm, show_deleted
from fairway.cli.connection import Connection, Server, command
from fairway.cli.durations import show_bytes
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format, OutputOption, YesOption
from fairway.cli.fleet.publishing import VERB, publish_folder
from fairway.cli.formats import DOCUMENTS, write_document
from fairway.cli.listing import PAGE, Resource, add_list
from fairway.cli.output import err, out, plain
from fairway.cli.table import Column
from fairway.cli.watch import polled
from fairway.cli.words import moment, short_digest
from fairway.client.publish import Published, PublishProgress
from fairway.v1 import registry_pb2 as rg

app = typer.Typer(help="Models: immutable versions in the registry, and tags.", no_args_is_help=True)

ModelArgument = Annotated[str, typer.Argument(help="Name of the model.")]
VersionArgument = Annotated[
    str, typer.Argument(help="A tag, a digest, or the beginning of a digest that only one version has.")
]
_MIN_PREFIX = 6


async def _models_page(connection: Connection, token: str) -> tuple[Sequence[rg.RegisteredModel], str]:
    request = rg.ListRegisteredModelsRequest(page_size=PAGE, page_token=token)
    what = "cannot list the models"
    answer = await connection.call(connection.registry.ListRegisteredModels, request, what=what)
    return answer.models, answer.next_page_token


async def _all_models(connection: Connection) -> list[rg.RegisteredModel]:
    return await MODELS.all(connection)


def _tags(model: rg.RegisteredModel) -> str:
    return " ".join(f"{tag}={short_digest(digest)}" for tag, digest in sorted(model.tags.items()))


MODELS: Final[Resource[rg.RegisteredModel]] = Resource(
    singular="model",
    plural="models",
    server=Server.REGISTRY,
    columns=(
        Column("name", lambda model: model.name),
        Column("versions", lambda model: str(model.versions)),
        Column("tags", _tags),
        Column("digests", lambda m: " ".join(f"{tag}={d}" for tag, d in sorted(m.tags.items())), wide=True),
    ),
    page=_models_page,
    watch=polled("model", "the models", lambda model: model.name, _all_models),
)
VERSION_COLUMNS: Final[tuple[Column[rg.Version], ...]] = (
    Column("digest", lambda version: version.digest),
    Column("tags", lambda version: ",".join(sorted(version.tags))),
    Column("size", lambda version: show_bytes(version.size_bytes)),
    Column("created", lambda version: moment(version.create_time)),
    Column("model", lambda version: version.model, wide=True),
)
add_list(app, MODELS, about="List the models of the registry with their tags.")


@command(
    app,
    "publish",
    to=Server.REGISTRY,
    examples=(
        "fairway models publish ./llama-3.2-1b --name llama --tag v1",
        "fairway models publish ./llama-3.2-1b --name llama --tag '' -o json",
    ),
)
async def publish(
    connection: Connection,
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A checkpoint folder.")],
    name: Annotated[str, typer.Option("--name", help="Name of the model.")],
    tag: Annotated[str, typer.Option("--tag", help="Points at it afterwards; '': none does.")] = "latest",
    output: OutputOption = Format.TABLE,
) -> None:
    """Publish a checkpoint folder as an immutable version, point a tag at it, and print its digest.

    Only what the registry lacks is uploaded; an upload that was interrupted goes on where it was.
    """
    with Bars() as bars:

        def tell(progress: PublishProgress) -> None:
            bars.update(VERB[progress.phase], progress.done_ratio, str(folder))

        done = await publish_folder(
            connection.channel, folder, name, tag, admin=connection.metadata, report=tell
        )
    _show_published(done, tag, output)


def _show_published(done: Published, tag: str, output: Format) -> None:
    if output in DOCUMENTS:
        found = {
            "model": done.model,
            "digest": done.digest,
            "tag": tag,
            "created": done.created,
            "size_bytes": str(done.size_bytes),
            "uploaded_bytes": str(done.uploaded_bytes),
            "uploaded_chunks": done.uploaded_chunks,
        }
        write_document(found, output)
        return
    plain(out(), done.digest)
    sent = f"{show_bytes(done.uploaded_bytes)} of {show_bytes(done.size_bytes)} uploaded"
    plain(err(), f"{'published' if done.created else 'was there already'}: {sent}")
    if sys.stderr.isatty():
        plain(err(), f"serve it with `fairway deployments create {done.model} --wait`")


@command(
    app,
    "versions",
    to=Server.REGISTRY,
    examples=(
        "fairway models versions llama",
        "fairway models versions llama -o json | jq -r '.versions[].digest'",
    ),
)
async def versions(connection: Connection, model: ModelArgument, output: OutputOption = Format.TABLE) -> None:
    """List the versions of a model, with the tags that point at each."""
    found = await _versions(connection, model)
    resource = Resource("version", "versions", Server.REGISTRY, VERSION_COLUMNS, _no_page)
    resource.write_list(sorted(found, key=lambda version: -version.create_time.seconds), output)


@command(
    app,
    "show",
    to=Server.REGISTRY,
    examples=("fairway models show llama", "fairway models show llama v1 -o json | jq .manifest.files"),
)
async def show(
    connection: Connection,
    model: ModelArgument,
    version: VersionArgument = "latest",
    output: OutputOption = Format.YAML,
) -> None:
    """Show a version with its manifest: every file with its size and digest."""
    digest = await _resolve(connection, model, version)
    request = rg.GetVersionRequest(model=model, version=digest)
    what = f"cannot show {model} {version}"
    found = (await connection.call(connection.registry.GetVersion, request, what=what)).version
    Resource("version", "versions", Server.REGISTRY, VERSION_COLUMNS, _no_page).write_one(found, output)


@command(
    app,
    "tag",
    to=Server.REGISTRY,
    examples=("fairway models tag llama v1 stable", "fairway models tag llama 3f1c9a stable"),
)
async def tag(
    connection: Connection,
    model: ModelArgument,
    version: VersionArgument,
    tag: Annotated[str, typer.Argument(help="The tag that points at it afterwards.")],
    output: OutputOption = Format.TABLE,
) -> None:
    """Point a tag at a version. Deployments stay at what they run until they are updated."""
    digest = await _resolve(connection, model, version)
    request = rg.SetTagRequest(model=model, tag=tag, digest=digest)
    await connection.call(connection.registry.SetTag, request, what=f"cannot tag {model} {version}")
    if output in DOCUMENTS:
        write_document({"model": model, "tag": tag, "digest": digest}, output)
    else:
        plain(out(), f"{tag}\t{digest}")


@command(app, "untag", to=Server.REGISTRY, examples=("fairway models untag llama stable",))
async def untag(
    connection: Connection,
    model: ModelArgument,
    tag: Annotated[str, typer.Argument(help="The tag to remove.")],
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Remove a tag. The version that it points at stays."""
    confirm(f"Remove the tag {tag} of {model}?", yes=yes)
    request = rg.DeleteTagRequest(model=model, tag=tag)
    await connection.call(connection.registry.DeleteTag, request, what=f"cannot untag {model} {tag}")
    show_deleted(tag, output)


@command(
    app,
    "delete",
    to=Server.REGISTRY,
    examples=("fairway models delete llama 3f1c9a", "fairway models delete llama 3f1c9a --yes"),
)
async def delete(
    connection: Connection,
    model: ModelArgument,
    version: VersionArgument,
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Delete a version that no tag and no deployment uses."""
    digest = await _resolve(connection, model, version)
    confirm(f"Delete {model} {digest}?", yes=yes)
    request = rg.DeleteVersionRequest(model=model, digest=digest)
    what = f"cannot delete {model} {short_digest(digest)}"
    await connection.call(connection.registry.DeleteVersion, request, what=what)
    show_deleted(digest, output)


async def _versions(connection: Connection, model: str) -> list[rg.Version]:
    found: list[rg.Version] = []
    token = ""
    while True:
        request = rg.ListVersionsRequest(model=model, page_size=PAGE, page_token=token)
        what = f"cannot list the versions of {model}"
        answer = await connection.call(connection.registry.ListVersions, request, what=what)
        found.extend(answer.versions)
        token = answer.next_page_token
        if not token:
            return found


async def _resolve(connection: Connection, model: str, version: str) -> str:
    """Return the digest that a tag, a digest or the beginning of one names. Raises CliError."""
    if version.startswith("sha256:") and len(version) == 71:
        return version
    known = await _versions(connection, model)
    tagged = [found.digest for found in known if version in found.tags]
    begun = [
        found.digest
        for found in known
        if found.digest.removeprefix("sha256:").startswith(version.removeprefix("sha256:"))
    ]
    matching = tagged or (begun if len(version.removeprefix("sha256:")) >= _MIN_PREFIX else [])
    if len(matching) == 1:
        return matching[0]
    why = (
        f"{len(matching)} versions of {model} begin with {version}"
        if matching
        else f"{model} has no {version}"
    )
    raise CliError(
        "NOT_FOUND",
        f"{why}: neither a tag nor a digest that is unique",
        next_step=f"`fairway models versions {model}` lists them"
        if known
        else "`fairway models list` lists what is there",
        exit_code=ExitCode.REFUSED,
    )


async def _no_page(_: Connection, __: str) -> tuple[Sequence[rg.Version], str]:
    raise AssertionError("versions are listed by model")
