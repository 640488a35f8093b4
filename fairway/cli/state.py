"""The state folder of one local installation, and how files get into it."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairway.cli.errors import CliError


@dataclass(frozen=True, slots=True)
class StateDir:
    """Names of everything under ``.fairway/``. ``root`` is absolute."""

    root: Path

    @classmethod
    def at(cls, path: Path) -> StateDir:
        return cls(path.expanduser().absolute())

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def ports(self) -> Path:
        return self.root / "ports.json"

    @property
    def endpoints(self) -> Path:
        return self.root / "endpoints.json"

    @property
    def lock(self) -> Path:
        return self.root / "supervisor.lock"

    @property
    def fleet(self) -> Path:
        """Record of the supervisor and its children: ids and start times."""
        return self.root / "fleet.json"

    def data(self, name: str) -> Path:
        """Folder that the process ``name`` keeps its data in."""
        return self.root / "state" / name

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def secret(self, name: str) -> Path:
        return self.secrets / name

    def create(self) -> None:
        """Make the folders. Raises CliError when that is not possible."""
        with self.writing():
            self.root.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            self.secrets.mkdir(mode=0o700, exist_ok=True)
            self.secrets.chmod(0o700)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what the system refuses inside into a CliError that says which file, why, and what to do."""
        try:
            yield
        except OSError as exc:
            raise CliError(
                "STATE_DIR_UNUSABLE",
                f"cannot use the state folder {self.root}: {exc.strerror} ({exc.filename or 'writing'})",
                next_step="free some space, or choose a folder that you may write to with --state-dir",
            ) from exc


def write_private(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step, readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in ``path``, or None when there is none that can be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace ``path`` by the JSON of ``value`` in one step, readable by its owner only."""
    write_private(path, json.dumps(value, indent=2) + "\n")


def ensure_secrets(state: StateDir) -> None:
    """Create what is missing of admin_key, internal_token and ticket_key; each is mode 0600 afterwards."""
    for name, prefix in (("admin_key", "fw_admin_"), ("internal_token", ""), ("ticket_key", "")):
        path = state.secret(name)
        if path.exists() and len(path.read_text().strip()) >= 32:
            path.chmod(0o600)
        else:
            write_private(path, prefix + secrets.token_hex(32) + "\n")


def read_secret(state: StateDir, name: str) -> str:
    """Return a secret's text, or "" when it does not exist."""
    try:
        return state.secret(name).read_text().strip()
    except OSError:
        return ""
