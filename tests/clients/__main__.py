"""`make clients`: what public clients are served. Exits 0 if nothing is wrong and 95 % of cells are served.

Installs each client into an environment of its own (minutes at first), starts one installation, runs the
clients one after another, and writes the matrix to ``docs/reference/clients.md``. The last line is
``RESULT {json}``. ``--only NAME`` runs some clients and leaves the page alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fairway.v1 import worker_pb2
from tests.clients.catalog import CLIENTS, ENVIRONMENTS, ROOT, SCRIPTS, Client
from tests.clients.features import FEATURES
from tests.clients.install import command_of, installed
from tests.clients.matrix import (
    REFUSED,
    SERVED,
    WRONG,
    Outcome,
    Report,
    is_good,
    page_of,
    read_outcomes,
    result_of,
)
from tests.clients.models import CHECKPOINT, versions
from tests.clients.scripted import scripted_version
from tests.support.command_line import CommandLine
from tests.support.stack import Stack

PAGE: Final = ROOT / "docs" / "reference" / "clients.md"
CLIENT_S: Final = 420.0
REST_S: Final = 15.0
SETTINGS: Final = {"FAIRWAY_SHEDDING": "false"}
# Requests a minute of the tenants whose keys are rejected: always, and often enough for a retry.
RATES: Final = {"limited": 1, "paced": 30}


@dataclass(frozen=True, slots=True)
class Served:
    """An installation with the models of the matrix; ``keys`` by tenant."""

    stack: Stack
    keys: dict[str, str]

    def target(self, scratch: Path) -> dict[str, str]:
        """Return what a script receives about the installation."""
        return {
            "url": self.stack.http.rstrip("/"),
            "key": self.stack.api_key,
            "model": self.stack.model,
            "agent": "agent",
            "scripted": "scripted",
            "embedder": "embedder",
            "reranker": "reranker",
            "limited_key": self.keys["limited"],
            "paced_key": self.keys["paced"],
            "checkpoint": str(CHECKPOINT),
            "scratch": str(scratch),
        }


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Served]:
    """Start an installation below ``folder`` and deploy the models."""
    with Stack.started(folder / "state", workers=1, replicas=1, settings=SETTINGS) as stack:
        cli = CommandLine(stack.state)
        for name, files in (versions(folder) | {"scripted": scripted_version(folder / "scripted")}).items():
            cli("models", "publish", str(files), "--name", name)
            cli("deployments", "create", name, "--wait")
        keys = {}
        for tenant, rate in RATES.items():
            cli("tenants", "create", tenant, "--requests-per-minute", str(rate))
            keys[tenant] = cli("keys", "create", f"{tenant}-key", "--tenant", tenant).out.strip()
        yield Served(stack, keys)


def run(client: Client, on: Served, scratch: Path) -> Report:
    """Return what a client found."""
    report = Report(client.name, client.version)
    scratch.mkdir(parents=True)
    script = SCRIPTS / client.script
    if client.is_node:  # Node finds packages beside a script only
        script = ENVIRONMENTS / client.environment / client.script
        script.write_bytes((SCRIPTS / client.script).read_bytes())
    command = [*command_of(client, script), json.dumps(on.target(scratch))]
    programs = ENVIRONMENTS / client.environment / "node_modules" / ".bin"
    environment = {
        "PATH": f"{Path(command[0]).parent}:{programs}:{os.environ['PATH']}",
        "HOME": str(scratch),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    log = scratch / "stderr"
    with log.open("wb") as errors:
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=scratch, timeout=CLIENT_S
            )
            out, ended = done.stdout, f"exit code {done.returncode}"
        except subprocess.TimeoutExpired as late:
            out, ended = late.stdout or b"", f"not ended within {CLIENT_S:g} s"
    report.outcomes = read_outcomes(out.decode().splitlines(), f"{ended}; see {log}", FEATURES)
    rest = asyncio.run(_rests(on.stack))
    report.outcomes.setdefault("at_rest", rest)
    return report


async def _rests(stack: Stack) -> Outcome:
    try:
        await stack.wait_workers(_holds_nothing, REST_S)
    except AssertionError as error:
        return Outcome(WRONG, str(error)[:400])
    return Outcome(SERVED)


def _holds_nothing(workers: dict[str, worker_pb2.GetWorkerResponse]) -> bool:
    versions = [version for worker in workers.values() for version in worker.versions]
    return not any(one.kv_blocks_reserved or one.running or one.waiting for one in versions)


def show(report: Report, took_s: float) -> None:
    """Print what a client found, and the evidence of what is not served."""
    outcomes = [one.outcome for one in report.outcomes.values()]
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in (SERVED, REFUSED, WRONG))
    print(f"{report.name} ({report.version}): {report.missing or counts}, {took_s:.0f} s", flush=True)
    for name, found in report.outcomes.items():
        if found.outcome != SERVED:
            print(f"  {found.outcome} {name}: {found.evidence}", flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="clients", description=__doc__)
    parser.add_argument("--only", action="append", choices=[client.environment for client in CLIENTS])
    parser.add_argument("--keep", type=Path, help="a new folder for what the clients print")
    options = parser.parse_args(arguments)
    chosen = [one for one in CLIENTS if not options.only or one.environment in options.only]
    missing = {client.environment: installed(client) for client in chosen}
    reports = []
    with tempfile.TemporaryDirectory(prefix="fairway-clients-") as temporary, served(Path(temporary)) as on:
        for client in chosen:
            began_s = time.monotonic()
            report = Report(client.name, client.version, missing=missing[client.environment])
            if not report.missing:
                report = run(client, on, (options.keep or Path(temporary)) / client.script)
            show(report, time.monotonic() - began_s)
            reports.append(report)
    if not options.only:
        PAGE.write_text(page_of(reports, FEATURES))
    result = result_of(reports)
    print("RESULT", json.dumps(result))
    return 0 if is_good(result) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
