"""`fairway version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import grpc

from fairway.cli.flags import Format, OutputOption
from fairway.cli.terminal.formats import DOCUMENTS, write_document
from fairway.cli.terminal.output import out, plain


def fairway_version() -> str:
    """Return the version of the installed package, "unknown" in a bare source tree."""
    try:
        return version("fairway")
    except PackageNotFoundError:
        return "unknown"


def show_version(output: OutputOption = Format.TABLE) -> None:
    """Show the version of this command.

    \b
    Examples:
      fairway version
      fairway version -o json
    """
    found = {"fairway": fairway_version(), "python": platform.python_version(), "grpc": grpc.__version__}
    if output in DOCUMENTS:
        write_document(found, output)
    elif output is Format.WIDE:
        plain(out(), "  ".join(f"{name} {value}" for name, value in found.items()))
    else:
        plain(out(), f"fairway {found['fairway']}")
