"""Signatures in `fairway models`: sign and verify versions, and name who may sign those of a model."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from fairway.cli.calls import checked
from fairway.cli.commands.models import ModelArgument, VersionArgument, app, resolve, usable
from fairway.cli.connection import Connection, Server, command
from fairway.cli.errors import CliError, ExitCode
from fairway.cli.flags import EtagOption, Format, OutputOption, parse_future
from fairway.cli.terminal.cells import short_digest
from fairway.cli.terminal.listing import write_shown
from fairway.cli.terminal.output import out, plain
from fairway.formats.signatures import (
    MANIFEST_NAME,
    Signer,
    SignerPolicy,
    distrust,
    key_id,
    policy_from_proto,
    policy_to_proto,
    public_key_of,
)

__all__ = ["app"]
_NEXT: Final = "`fairway models signers` shows who may sign; `fairway models sign` adds a signature"


@command(
    app,
    "sign",
    to=Server.REGISTRY,
    examples=(
        "fairway models sign llama v1 --key key.pem",
        "fairway models sign llama v1 --bundle made-in-ci.json",
    ),
)
async def sign(
    connection: Connection,
    model: ModelArgument,
    version: VersionArgument = "latest",
    key: Annotated[
        Path | None, typer.Option("--key", exists=True, dir_okay=False, help="A private EC key, PEM.")
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            exists=True,
            dir_okay=False,
            help="A bundle that model_signing made of the exported version.",
        ),
    ] = None,
) -> None:
    """Add a signature to a version: one made here with a key, or a bundle made elsewhere, as with sigstore.

    `fairway models verify --export` writes what model_signing signs elsewhere.
    """
    if (key is None) == (bundle is None):
        raise typer.BadParameter("give one of --key and --bundle")
    digest = await resolve(connection, model, version)
    what = f"cannot sign {model} {short_digest(digest)}"
    if bundle is not None:
        adding = connection.admin.models.add_signature(model, digest, usable(_text_of, bundle))
    else:
        assert key is not None
        usable(public_key_of, key)
        adding = connection.admin.models.sign(model, digest, key)
    added = await checked(adding, what=what)
    plain(out(), f"{digest}\t{'signed' if added else 'was signed before'}")


@command(
    app,
    "verify",
    to=Server.REGISTRY,
    examples=(
        "fairway models verify llama v1",
        "fairway models verify llama v1 --public-key ci.pub",
        "fairway models verify llama v1 --export ./signed",
    ),
)
async def verify(
    connection: Connection,
    model: ModelArgument,
    version: VersionArgument = "latest",
    public_key: Annotated[
        Path | None,
        typer.Option(
            "--public-key", exists=True, dir_okay=False, help="Verify by this key, not by the policy."
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export", help="Write the signed folder and the bundles here, for `model_signing verify`."
        ),
    ] = None,
) -> None:
    """Verify the signatures of a version by its model's signer policy, as workers do before each load."""
    digest = await resolve(connection, model, version)
    what = f"cannot verify {model} {short_digest(digest)}"
    found = await checked(connection.admin.models.get(model, digest), what=what)
    if export is not None:
        manifest = await checked(connection.admin.models.manifest_json(digest), what=what)
        (export / "version").mkdir(parents=True, exist_ok=True)
        (export / "version" / MANIFEST_NAME).write_bytes(manifest)
        for number, bundle in enumerate(found.signatures, start=1):
            (export / f"signature-{number}.json").write_text(bundle, "utf-8")
    if public_key is not None:
        policy = SignerPolicy(model, (Signer(usable(_text_of, public_key)),), required=True)
    else:
        stored = await checked(connection.admin.models.signer_policy(model), what=what)
        policy = policy_from_proto(stored.policy)
    why = distrust(tuple(found.signatures), digest, policy, now_unix_s=datetime.now(UTC).timestamp())
    if why is not None:
        raise CliError(why.reason, f"{what}: {why.message}", next_step=_NEXT, exit_code=ExitCode.REFUSED)
    plain(out(), f"{digest}\t{'verified' if found.signatures else 'not signed, and need not be'}")


@command(
    app,
    "update",
    to=Server.REGISTRY,
    examples=(
        "fairway models update llama --signer ci.pub --required",
        "fairway models update llama --signer ci.pub,until=2027-06-30 --signer release.pub --required",
        "fairway models update llama --signer ci@acme.com,issuer=https://id.acme --trust-config acme.json",
        "fairway models update llama --no-signers",
    ),
)
async def update(
    connection: Connection,
    model: ModelArgument,
    signer: Annotated[
        list[str] | None,
        typer.Option(
            "--signer",
            metavar="WHO[,issuer=URL][,until=TIME]",
            help="File of a public EC key, PEM, or an identity with its issuer. Repeatable.",
        ),
    ] = None,
    no_signers: Annotated[bool, typer.Option("--no-signers", help="Remove the policy.")] = False,
    required: Annotated[
        bool, typer.Option("--required/--optional", help="Whether versions without a signature are refused.")
    ] = False,
    trust_config: Annotated[
        Path | None,
        typer.Option("--trust-config", exists=True, dir_okay=False, help="Sigstore's client trust, JSON."),
    ] = None,
    etag: EtagOption = "",
) -> None:
    """Replace who may sign the versions of a model. Versions that run go on; later loads follow it."""
    if bool(signer) == no_signers:
        raise typer.BadParameter("give --signer, or --no-signers")
    signers = tuple(map(_signer, signer or ()))
    trusted = usable(_text_of, trust_config) if trust_config is not None else ""
    policy = policy_to_proto(SignerPolicy(model, signers, required, trusted))
    what = f"cannot update the signers of {model}"
    etag = await checked(connection.admin.models.update_signer_policy(policy, etag=etag), what=what)
    plain(out(), f"{model}\t{len(signers)} signers\tetag {etag}")


@command(
    app,
    "signers",
    to=Server.REGISTRY,
    examples=("fairway models signers llama", "fairway models signers llama -o json | jq -r .etag"),
)
async def signers(connection: Connection, model: ModelArgument, output: OutputOption = Format.TABLE) -> None:
    """Show who may sign the versions of a model."""
    finding = connection.admin.models.signer_policy(model)
    write_shown(await checked(finding, what=f"cannot show the signers of {model}"), output)


def _signer(text: str) -> Signer:
    """Return the signer of an option. Raises BadParameter, and CliError for an unreadable file."""
    who, *parts = text.split(",")
    named = dict(part.partition("=")[::2] for part in parts)
    if unknown := named.keys() - {"issuer", "until"}:
        raise typer.BadParameter(f"{min(unknown)!r} is neither issuer nor until", param_hint="--signer")
    until_unix_s = parse_future(named["until"]).timestamp() if "until" in named else 0.0
    if "issuer" in named:
        return Signer(identity=who, issuer=named["issuer"], expire_unix_s=until_unix_s)
    return Signer(usable(_public_key_in, Path(who)), expire_unix_s=until_unix_s)


def _text_of(path: Path) -> str:
    return path.read_text("utf-8")


def _public_key_in(path: Path) -> str:
    text = _text_of(path)
    key_id(text)
    return text
