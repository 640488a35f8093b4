"""Write the bill of materials, CycloneDX 1.6, and the OpenVEX document of the pinned packages.

    python scripts/sbom.py [FOLDER]

Names and versions are those of constraints.txt; licences and edges those of installed packages. The same tree
and environment give the same bytes: no time of writing is stated, and the serial number is of the content.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from email.message import Message
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final, cast

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[1]
STATUSES: Final = ("not_affected", "affected", "fixed", "under_investigation")
JUSTIFICATIONS: Final = (
    "component_not_present",
    "vulnerable_code_not_present",
    "vulnerable_code_not_in_execute_path",
    "vulnerable_code_cannot_be_controlled_by_adversary",
    "inline_mitigations_already_exist",
)
_PIN: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.+!_-]+)")
_LONG_LICENCE: Final = 100  # characters: more is the text of a licence, not its name


class BadStatement(Exception):
    """A statement of deploy/vex.json that OpenVEX does not allow, or about a package that is not pinned."""


def pinned(constraints: str) -> dict[str, str]:
    """Return the version of each package, by its canonical name. Raises ValueError for a line without one."""
    found: dict[str, str] = {}
    for line in constraints.splitlines():
        text = line.partition("#")[0].partition(";")[0].strip()
        if not text:
            continue
        if not (pin := _PIN.fullmatch(text)):
            raise ValueError(f"constraints.txt: {text!r} pins no version")
        found[canonicalize_name(pin[1])] = pin[2]
    return found


def bill_of(pins: Mapping[str, str], project: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bill of materials of a project's table in pyproject.toml."""
    named = _named(project["name"], project["version"])
    root = {"type": "application", **named, "licenses": [{"expression": project["license"]}]}
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    edges = {named["purl"]: _edges(wanted, pins, but=project["name"])}
    components = []
    for name in sorted(pins):
        installed = _installed(name)
        found: dict[str, Any] = {"type": "library", **_named(name, pins[name])}
        if licences := _licences(installed):
            found["licenses"] = licences
        components.append(found)
        edges[found["purl"]] = _edges((installed and installed.requires) or (), pins, but=name)
    content = {
        "metadata": {"component": root},
        "components": components,
        "dependencies": [{"ref": ref, "dependsOn": edges[ref]} for ref in sorted(edges)],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    form = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    return {**form, "serialNumber": f"urn:uuid:{serial}", **content}


def vex_of(source: Mapping[str, Any], pins: Mapping[str, str], project: Mapping[str, Any]) -> dict[str, Any]:
    """Return the OpenVEX document of the statements. Raises BadStatement."""
    product = _named(project["name"], project["version"])["purl"]
    statements = []
    for one in source["statements"]:
        package, status = one["package"], one["status"]
        where = f"{one['vulnerability']} of {package}"
        if package not in pins:
            raise BadStatement(f"{where}: the package is not pinned, so the statement says nothing")
        if status not in STATUSES:
            raise BadStatement(f"{where}: status is none of {', '.join(STATUSES)}")
        if status == "not_affected" and one.get("justification") not in JUSTIFICATIONS:
            raise BadStatement(f"{where}: justification is none of {', '.join(JUSTIFICATIONS)}")
        if status == "affected" and not one.get("action_statement"):
            raise BadStatement(f"{where}: an action_statement is missing")
        kept = ("timestamp", "status", "justification", "impact_statement", "action_statement")
        subject = {"@id": product, "subcomponents": [{"@id": _named(package, pins[package])["purl"]}]}
        statements.append(
            {
                "vulnerability": {"name": one["vulnerability"]},
                "products": [subject],
                **{key: one[key] for key in kept if key in one},
            }
        )
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(statements, sort_keys=True))
    return {
        "@context": "https://openvex.dev/ns/v0.2.0",
        "@id": f"urn:uuid:{serial}",
        "author": source["author"],
        "timestamp": max(one["timestamp"] for one in statements),
        "version": source["version"],
        "statements": statements,
    }


def main(argv: Sequence[str]) -> None:
    folder = Path(argv[0]) if argv else ROOT / "dist"
    folder.mkdir(parents=True, exist_ok=True)
    pins = pinned((ROOT / "constraints.txt").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    vex = json.loads((ROOT / "deploy" / "vex.json").read_text("utf-8"))
    documents = {
        "fairway.cdx.json": bill_of(pins, project),
        "fairway.openvex.json": vex_of(vex, pins, project),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", "utf-8")
        sys.stdout.write(f"{folder / name}\n")


def _named(name: str, version: str) -> dict[str, str]:
    purl = f"pkg:pypi/{canonicalize_name(name)}@{version}"
    return {"bom-ref": purl, "name": name, "version": version, "purl": purl}


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _licences(installed: Distribution | None) -> list[dict[str, Any]]:
    """Return the SPDX expression of a package, else the names that its metadata has."""
    if installed is None:
        return []
    metadata = cast(Message, installed.metadata)
    if expression := metadata.get("License-Expression"):
        return [{"expression": expression}]
    named = [one for one in metadata.get_all("Classifier", []) if one.startswith("License :: ")]
    names = sorted({one.rpartition(" :: ")[2] for one in named} - {"OSI Approved"})
    text = (metadata.get("License") or "").strip()
    if not names and text and len(text) <= _LONG_LICENCE and "\n" not in text:
        names = [text]
    return [{"license": {"name": name}} for name in names]


def _edges(requirements: Iterable[str], pins: Mapping[str, str], *, but: str) -> list[str]:
    """Return the pinned packages that the requirements name on this platform, without extras."""
    found = set()
    for line in requirements:
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        if name in pins and name != but and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            found.add(_named(name, pins[name])["purl"])
    return sorted(found)


if __name__ == "__main__":
    main(sys.argv[1:])
