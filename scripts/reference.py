"""Write the pages under docs/reference from the code: errors, metrics, settings, commands, routes, access.

python scripts/reference.py            writes the pages
python scripts/reference.py --check    exits 1 and names the pages that differ from the code
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args, get_origin

import typer
from google.protobuf.descriptor import ServiceDescriptor

import fairway.inference
import fairway.keda
import fairway.v1
from fairway.cli.main import app as cli_app
from fairway.v1 import options_pb2
from scripts.metric_list import ALL, metric_list
from services.core import errors
from services.core.faults import ERRORS, FINISHED, Fault
from services.core.records import KeyRole
from services.gateway.faces.description.document import NOT_OFFERED, document_of, path_of
from services.gateway.faces.openai.errors import HttpProblem
from services.gateway.faces.openai.exchange import REQUEST_HEADERS, BodyReader, HttpLimits
from services.gateway.faces.openai.routes import endpoints_of
from services.gateway.faces.responses.background import ResponseParts
from services.rpc.status import grpc_code, http_status
from services.runtime.config import PREFIX, Settings

ROOT: Final = Path(__file__).parents[1]
FOLDER: Final = ROOT / "docs" / "reference"
_MADE: Final = "<!-- Written by `make reference` from {source}. Do not edit. -->"
_FAULTS: Final = {
    Fault.OURS: "The platform is at fault: counts against availability",
    Fault.CLIENT: "The client is at fault, its tenant's limits included",
    Fault.NONE: "No one is at fault",
}
_ROLES: Final = ("gateway", "scheduler", "worker", "registry", "controlplane")
_ROLE_TITLES: Final = {
    ALL: "All roles",
    "gateway": "Gateway",
    "scheduler": "Scheduler",
    "worker": "Worker",
    "gateway and worker": "Gateway and worker",
    "registry": "Registry",
    "controlplane": "Control plane",
}
_CALLERS: Final = {
    str(role): options_pb2.Access.Value(f"ACCESS_{role.name}")
    for role in sorted(KeyRole, key=lambda role: role.of_tenant)
} | {"services": options_pb2.ACCESS_INTERNAL, "certificate": options_pb2.ACCESS_CERTIFICATE}
_COMMON_USES: Final = 5  # an option of so many commands is explained once


def main(argv: list[str]) -> int:
    """Write the pages, or with ``--check`` compare them. Return the exit code."""
    if argv == ["--check"]:
        stale = stale_pages()
        for name in stale:
            sys.stderr.write(f"docs/reference/{name} differs from the code: run `make reference`\n")
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), "utf-8")
    return 0


def stale_pages() -> list[str]:
    """Return the names of the pages that differ from the code or are missing."""
    return [
        name
        for name, page in PAGES.items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text("utf-8") != page()
    ]


def kinds(base: type[errors.FairwayError] = errors.FairwayError) -> list[type[errors.FairwayError]]:
    """Return every imported error class below ``base``."""
    return [found for child in base.__subclasses__() for found in (child, *kinds(child))]


def errors_page() -> str:
    """Raises KeyError for a reason of the table that no error class has."""
    head = """\
Each error has a `reason`: in `ErrorInfo` over gRPC, in lower case as `code` over HTTP (a few codes use
OpenAI's name). The sections are the values `ours`, `client` and `none` of the label `fault` of
`fairway_gateway_requests_total`, from which the [alerts](../../deploy/prometheus/fairway.yml) compute the
error ratio. Where a retry helps, the error carries the time to wait: `RetryInfo` or `retry-after`.
"""
    by_reason = {kind.reason: kind for kind in kinds()}
    parts = [_head("Errors", "services/core/faults.py", head)]
    for fault, title in _FAULTS.items():
        rows = []
        for reason, (whose, advice) in ERRORS.items():
            if whose is not fault or reason == FINISHED:
                continue
            kind = by_reason[reason]
            if kind is HttpProblem:
                rows.append((reason, "", "400 to 503", advice))
            else:
                rows.append((reason, grpc_code(kind("")).name, str(http_status(kind(""))), advice))
        parts.append(_section(title, ("reason", "gRPC", "HTTP", "what the caller does"), rows))
    return "".join(parts)


def metrics_page() -> str:
    head = """\
Each process serves `/metrics` at `FAIRWAY_METRICS_LISTEN`. The labels `tenant` (1,000 values) and `model`
(200 deployment names) count further values as `other`. Logs, traces and health checks are in
[observability.md](../operations/observability.md).
"""
    found = metric_list()
    parts = [_head("Metrics", "the modules that register them", head)]
    for role, title in _ROLE_TITLES.items():
        rows = [
            (f"`{metric.name}`", f"{metric.kind}, {metric.unit}", ", ".join(metric.labels), metric.text)
            for metric in found
            if metric.role == role
        ]
        parts.append(_section(title, ("metric", "type, unit", "labels", "meaning"), rows))
    return "".join(parts)


def settings_page() -> str:
    head = """\
A role reads these environment variables once at its start. An unknown `FAIRWAY_` variable or a bad value
stops the start. `fairway up --set ROLE:VARIABLE=VALUE` sets one. Addresses are host:port, sizes are given in
bytes, times in seconds, lists and pairs with commas.
"""
    about, read_by = _field_comments(), _readers()
    parts = [_head("Settings", "services/runtime/config.py", head)]
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name, field in Settings.model_fields.items():
        roles = read_by[name]
        row = (f"`{PREFIX}{name.upper()}`", _type(field.annotation), _default(field, name), about[name])
        groups.setdefault(", ".join(roles), []).append(row)
    for names, rows in sorted(groups.items(), key=lambda item: (item[0] != ALL, item[0].count(","), item[0])):
        title = " and ".join(_ROLE_TITLES[role] for role in names.split(", "))
        parts.append(_section(title.capitalize(), ("variable", "type", "default", "meaning"), rows))
    return "".join(parts)


def cli_page() -> str:
    head = """\
`fairway COMMAND --help` explains all options and has examples. Exit codes, output formats and addresses are
in [operations/cli.md](../operations/cli.md).
"""
    commands = list(_commands(typer.main.get_command(cli_app), ()))
    uses = Counter(_meaning(each) for _, command in commands for each in _options(command))
    common = {meaning for meaning, count in uses.items() if count >= _COMMON_USES}
    rows = []
    for path, command in commands:
        own = " ".join(f"`{_flag(each)}`" for each in _options(command) if _meaning(each) not in common)
        rows.append((f"`{_usage(path, command)}`", (command.help or "").split("\n")[0], own))
    shared = [(f"`{flag}`", text) for flag, text in sorted(common)]
    parts = [
        _head("Commands", "the command line itself", head),
        _section("Commands", ("command", "what it does", "own options"), rows),
        _section("Options of many commands", ("option", "meaning"), shared),
    ]
    return "".join(parts)


def http_page() -> str:
    head = """\
The gateway serves this API at `FAIRWAY_HTTP_LISTEN`. The caller `tenant` sends an API key or a token of
the role `tenant` or `tenant-admin`. Bodies are
JSON of at most `FAIRWAY_MAX_BODY_BYTES`. Each answer has `x-request-id`. Served and
rejected (429) answers have OpenAI's `x-ratelimit-*` for the rates that were checked; not those under an
idempotency key and those decided on a [slice](../architecture/metering.md#leased-rates). See also
[errors](errors.md).
"""
    parts = [_head("HTTP API", "services/gateway/faces", head)]
    nothing = cast(Any, None)
    responses = ResponseParts(nothing, nothing, str, 0.0)
    # Only the table is read.
    endpoints = endpoints_of(*(nothing,) * 4, HttpLimits(0), str, b"", responses, bodies=BodyReader(0))
    routes = [(f"`{each.method} {path_of(each)}`", str(each.access), each.accepts) for each in endpoints]
    parts.append(_section("Routes", ("route", "caller", "accepts"), routes))
    headers = [(f"`{name}`", text) for name, text in REQUEST_HEADERS.items()]
    parts.append(_section("Request headers", ("header", "meaning"), headers))
    schemas = document_of(endpoints, REQUEST_HEADERS, version="")["components"]["schemas"]
    text = (
        "\nThese sections are made from the OpenAPI document, which the gateway serves at `/openapi.json`. A "
        "field that is not offered is accepted at null and at the values in brackets. Other values and "
        "unknown fields are rejected by name. The bodies of the Responses and Messages APIs are in the "
        "document alone.\n"
    )
    parts.append(f"\n## Bodies\n{text}")
    shown: dict[str, None] = {}
    for kind in dict.fromkeys(each.body for each in endpoints if each.body is not None):
        if kind.__module__.startswith(_OWN_DIALECT):
            parts += _body_section(kind.__name__, schemas, shown)
    return "".join(parts)


def access_page() -> str:
    head = """\
The roles of keys and tokens that may call each method, by the `(access)` options of the protos. `services`
are other processes of the installation, `certificate` is one of the role `autoscaler` without a key or token.
Routes of the HTTP API take `tenant` and `tenant-admin`, except the public ones of [http.md](http.md).
[operations/access.md](../operations/access.md) describes the roles.
"""
    parts = [_head("Access", "protos/fairway", head)]
    for service in _services():
        found: dict[str, list[str]] = {}
        for method in service.methods:
            rule = method.GetOptions().Extensions[options_pb2.access]
            callers = [caller for caller, access in _CALLERS.items() if access in rule]
            found.setdefault(", ".join(callers), []).append(f"`{method.name}`")
        rows = [(callers, " ".join(methods)) for callers, methods in found.items()]
        parts.append(_section(service.name, ("callers", "methods"), rows))
    return "".join(parts)


def _services() -> list[ServiceDescriptor]:
    """Return the services of all protos, sorted by their names."""
    modules = (
        importlib.import_module(f"{package.__name__}.{found.name}")
        for package in (fairway.v1, fairway.inference, fairway.keda)
        for found in pkgutil.iter_modules(package.__path__)
        if found.name.endswith("_pb2")
    )
    services = (each for module in modules for each in module.DESCRIPTOR.services_by_name.values())
    return sorted(services, key=lambda service: str(service.name))


def _body_section(name: str, schemas: dict[str, Any], shown: dict[str, None]) -> list[str]:
    """Return the section of a schema and of those that it refers to, each once."""
    if name in shown:
        return []
    shown[name] = None
    schema = schemas[name]
    rows: list[tuple[str, ...]] = []
    unserved: list[str] = []
    within: list[str] = []
    for field, found in schema["properties"].items():
        if found.get("description") == NOT_OFFERED:
            values = ", ".join(json.dumps(value) for value in found["enum"] if value is not None)
            unserved.append(f"`{field}`" + (f" ({values})" if values else ""))
            continue
        required = " (required)" if field in schema["required"] else ""
        rows.append((f"`{field}`{required}", _schema_type(found, within), found.get("description", "")))
    parts = [f"\n### {name}\n\n", _row(("field", "type", "meaning")), _row(("---",) * 3)]
    parts += map(_row, rows)
    if unserved:
        parts.append(f"\nNot offered: {'; '.join(unserved)}.\n")
    for other in within:
        parts += _body_section(other, schemas, shown)
    return parts


def _schema_type(schema: dict[str, Any], within: list[str]) -> str:
    """Return a schema in a few words; the names of the schemas that it refers to are added to ``within``."""
    if "anyOf" in schema:
        kinds = [each for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(_schema_type(each, within) for each in kinds)
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        within.append(name)
        return name
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_schema_type(schema.get('items', {}), within)}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"map of {_schema_type(schema['additionalProperties'], within)}"
    return str(schema.get("type", "any"))


_OWN_DIALECT: Final = "services.gateway.faces.openai"
PAGES: Final[dict[str, Callable[[], str]]] = {
    "errors.md": errors_page,
    "metrics.md": metrics_page,
    "settings.md": settings_page,
    "cli.md": cli_page,
    "http.md": http_page,
    "access.md": access_page,
}


def _head(title: str, source: str, text: str) -> str:
    return f"# {title}\n\n{_MADE.format(source=source)}\n\n{text}"


def _section(title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]], text: str = "") -> str:
    lines = [f"\n## {title}\n{text}\n", _row(header), _row(("---",) * len(header))]
    return "".join((*lines, *map(_row, rows)))


def _row(cells: Iterable[str]) -> str:
    return " | ".join(cell.replace("|", "\\|") for cell in cells).rstrip() + "\n"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _field_comments() -> dict[str, str]:
    """Return the comment of one or more lines above each field of Settings. Raises KeyError without one."""
    source = (ROOT / "services" / "runtime" / "config.py").read_text("utf-8")
    found = re.findall(r"^    # ((?:.+\n    # )*.+)\.\n    ([a-z0-9_]+): ", source, re.MULTILINE)
    return {name: text.replace("\n    # ", " ") for text, name in found}


def _readers() -> dict[str, tuple[str, ...]]:
    """Return the roles whose modules read each setting; ("all",) where the common parts read it."""
    modules = ROOT / "services" / "app"
    shared = _read_by_function(modules / "roles" / "shared.py")
    found: dict[str, set[str]] = {name: set() for name in Settings.model_fields}
    for role in _ROLES:
        parts = (modules / "roles" / f"{role}.py", *sorted((modules / "roles").glob(f"{role}_*.py")))
        source = "".join(part.read_text("utf-8") for part in parts)
        used = set(re.findall(r"\bsettings\.([a-z0-9_]+)", source))
        for function, fields in shared.items():
            used |= fields if f"{function}(" in source else set()
        if "open_bucket(settings" in source:
            used |= {name for name in found if name.startswith("s3_")}
        for name in used & found.keys():
            found[name].add(role)
    for path in modules.glob("*.py"):
        for name in re.findall(r"\bsettings\.([a-z0-9_]+)", path.read_text("utf-8")):
            if name in found:
                found[name] = set(_ROLES)
    whole = {name: roles or set(_ROLES) for name, roles in found.items()}
    return {
        name: (ALL,) if len(roles) == len(_ROLES) else tuple(role for role in _ROLES if role in roles)
        for name, roles in whole.items()
    }


def _read_by_function(path: Path) -> dict[str, set[str]]:
    source = path.read_text("utf-8")
    return {
        node.name: set(re.findall(r"\bsettings\.([a-z0-9_]+)", ast.get_source_segment(source, node) or ""))
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return "list"
    if get_origin(annotation) is dict:
        return "pairs"
    inner = [each for each in get_args(annotation) if each is not type(None)]
    return (
        _type(inner[0])
        if inner
        else {"Path": "path", "str": "text"}.get(annotation.__name__, annotation.__name__)
    )


def _default(field: Any, name: str) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    if name.endswith("_bytes"):
        unit, size = ("GiB", 1024**3) if value % 1024**3 == 0 else ("MiB", 1024**2)
        return f"{value // size} {unit}"
    if value is None or value in ("", {}):
        return ""
    return f"{value:g}" if isinstance(value, float) and value < 1e5 else str(value)


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command
        return
    for name, each in below.items():
        yield from _commands(each, (*path, name))


def _options(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "option" and not each.hidden]


def _flag(option: Any) -> str:
    return str(max(option.opts, key=len))


def _meaning(option: Any) -> tuple[str, str]:
    return _flag(option), option.help or ""


def _usage(path: tuple[str, ...], command: Any) -> str:
    names = [
        (each.name.upper(), each.required) for each in command.params if each.param_type_name == "argument"
    ]
    return " ".join(("fairway", *path, *(name if required else f"[{name}]" for name, required in names)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
