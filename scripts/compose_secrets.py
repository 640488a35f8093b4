"""Make the secrets of docker-compose.yml, the folders for its certificates, and the .env with their owner.

Standard library only: a container makes the certificates.

    python3 scripts/compose_secrets.py [--state DIR] [--env FILE]

Existing files stay. The containers run as the owner of the files: the user of this command, and
for root the user 10001, so that they are never root.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
STATE: Final = ROOT / ".fairway" / "compose"
CONTAINER_ID: Final = 10001
BYTES: Final = 32
# A folder that does not exist when it is mounted would be made by the engine, for root.
CERTIFICATES: Final = (
    "registry",
    "controlplane",
    "controlplane-1",
    "scheduler",
    "scheduler-1",
    "gateway",
    "gateway-1",
    "worker-0",
    "worker-1",
    "worker-2",
    "worker-3",
    "worker-vllm",
    "operator",
    "monitor",
    "etcd",
    "redis",
)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Make the secrets of docker-compose.yml.")
    parser.add_argument("--state", type=Path, default=STATE, help="folder of the secrets and the endpoints")
    parser.add_argument("--env", type=Path, default=ROOT / ".env", help="file of the compose variables")
    options = parser.parse_args(argv)
    owner = (os.getuid(), os.getgid()) if os.getuid() else (CONTAINER_ID, CONTAINER_ID)
    made = make_secrets(options.state, owner)
    variables = {"COMPOSE_PROJECT_NAME": "fairway", "FLEET_UID": str(owner[0]), "FLEET_GID": str(owner[1])}
    if options.state != STATE:
        variables["FLEET_STATE"] = str(options.state.absolute())
    added = add_variables(options.env, variables)
    sys.stdout.write(f"secrets in {options.state}: {', '.join(made) or 'all there already'}\n")
    sys.stdout.write(f"variables in {options.env}: {', '.join(added) or 'all there already'}\n")


def make_secrets(state: Path, owner: tuple[int, int]) -> list[str]:
    """Return the names of the secrets that were made. Each is mode 0600 and the owner's afterwards."""
    folder, certs = state / "secrets", state / "certs"
    for each in (state, folder, certs, *(certs / name for name in CERTIFICATES)):
        each.mkdir(parents=True, exist_ok=True)
        each.chmod(0o700)
        _give(each, owner)
    made = []
    for name, text in _texts(folder).items():
        path = folder / name
        if not path.is_file():
            write_private(path, text() + "\n")
            made.append(name)
        path.chmod(0o600)
        _give(path, owner)
    return made


def redis_acl(password: str) -> str:
    """Return Redis' users: the services by the password's hash, and one that can only send PING."""
    hashed = hashlib.sha256(password.encode()).hexdigest()
    return f"user default reset on #{hashed} ~* &* +@all\nuser health reset on nopass -@all +ping"


def add_variables(path: Path, variables: dict[str, str]) -> list[str]:
    """Return the names that were added to an env file. A variable that has a line keeps it."""
    text = path.read_text("utf-8") if path.exists() else ""
    known = {line.partition("=")[0].strip() for line in text.splitlines()}
    missing = [name for name in variables if name not in known]
    if missing:
        start = text if not text or text.endswith("\n") else text + "\n"
        path.write_text(start + "".join(f"{name}={variables[name]}\n" for name in missing), "utf-8")
    return missing


def write_private(path: Path, text: str) -> None:
    """Create ``path``, readable by its owner only. Raises FileExistsError rather than replace one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def _texts(folder: Path) -> dict[str, Callable[[], str]]:
    """The secrets in the order in which they are made: the users of Redis follow from its password."""

    def random() -> str:
        return secrets.token_hex(BYTES)

    return {
        "admin_key": lambda: f"fw_admin_{random()}",
        "internal_token": random,
        "ticket_key": random,
        "record_keys": random,
        "audit_key": random,
        "redis_password": random,
        "redis_acl": lambda: redis_acl((folder / "redis_password").read_text("utf-8").strip()),
        "grafana_password": random,
    }


def _give(path: Path, owner: tuple[int, int]) -> None:
    if os.getuid() == 0:
        os.chown(path, *owner)


if __name__ == "__main__":
    main(sys.argv[1:])
