"""Documents of `-o json` and `-o yaml`. The shapes are stable; docs/operations/cli.md lists them."""

from __future__ import annotations

import json
from typing import Any, Final

import yaml
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from fairway.cli.flags import Format
from fairway.cli.terminal.output import out, plain

DOCUMENTS: Final = (Format.JSON, Format.YAML)


def document_of(message: Message) -> dict[str, Any]:
    """Return a message in protobuf's JSON mapping, with the proto's field names and with unset values."""
    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


def write_document(value: dict[str, Any], output: Format) -> None:
    """Print one document to stdout. ``output`` is JSON or YAML."""
    assert output in DOCUMENTS
    plain(out(), text_of(value, output), end="")


def write_part(value: dict[str, Any], output: Format) -> None:
    """Print one document of a stream: a line of JSON, or YAML after a `---`."""
    assert output in DOCUMENTS
    if output is Format.JSON:
        plain(out(), json.dumps(value, ensure_ascii=False))
    else:
        plain(out(), "---\n" + text_of(value, output), end="")


def text_of(value: dict[str, Any], output: Format) -> str:
    """Return a document's text, which ends with a newline."""
    if output is Format.JSON:
        return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=False)
    return text


def show_deleted(name: str, output: Format) -> None:
    """Print that ``name`` was deleted."""
    if output in DOCUMENTS:
        write_document({"name": name, "deleted": True}, output)
    else:
        plain(out(), name)
