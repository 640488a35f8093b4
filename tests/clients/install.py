"""Environments of the clients: Python's by pip, Node's by npm, from where these are configured to look."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench.engines.peers.catalog import has_stamp, python_of
from bench.engines.peers.install import install, install_cpu_torch
from scripts.setup_env import pip
from tests.clients.catalog import ENVIRONMENTS, Client

INSTALL_S: Final = 900.0
OLDEST_NODE: Final = 20


def command_of(client: Client, script: Path) -> list[str]:
    """Return the command that runs a script in the client's environment, without its arguments."""
    if client.is_node:
        return ["node", str(script)]
    python = sys.executable if client.is_program else str(python_of(ENVIRONMENTS, client.environment))
    return [python, str(script)]


def installed(client: Client) -> str:
    """The client's environment is whole; return why not, empty where it is."""
    there = ENVIRONMENTS / client.environment
    stamp = " ".join(client.packages)
    if has_stamp(there, stamp):
        return ""
    try:
        if client.is_node or client.is_program:
            _install_node(there, client)
            (there / "installed").write_text(stamp)
        else:
            install(there, stamp, lambda python, _: _install_python(python, client))
    except (subprocess.SubprocessError, SystemExit, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"[:200]
    return ""


def _install_python(python: str, client: Client) -> None:
    if client.needs_torch:
        install_cpu_torch(python)
    pip(python, ["install", *client.packages])


def _install_node(there: Path, client: Client) -> None:
    found = shutil.which("node")
    version = subprocess.run(
        [found or "node", "--version"], capture_output=True, text=True, check=True
    ).stdout
    if int(version.lstrip("v").partition(".")[0]) < OLDEST_NODE:
        raise ValueError(f"Node {version.strip()} is older than {OLDEST_NODE}")
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir(parents=True)
    print(f"{there.name}: installing {' '.join(client.packages)}", flush=True)
    options = ["--silent", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
    subprocess.run(
        ["npm", "install", *options, "--prefix", str(there), *client.packages], check=True, timeout=INSTALL_S
    )
