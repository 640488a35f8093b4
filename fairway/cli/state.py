"""The state folder of one local installation: its paths, its endpoints, and the writing of its files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from fairway.cli.errors import CliError

PRIVATE_UMASK: Final = 0o077
# The secrets of an installation and what each begins with.
_SECRETS: Final = (
    ("admin_key", "fw_admin_"),
    ("internal_token", ""),
    ("ticket_key", ""),
    ("record_keys", ""),
    ("audit_key", ""),
)
# Valid unquoted for etcd's client, Redis' client and a socket; macOS limits a socket's path to 103 bytes.
_SOCKET_FOLDER: Final = re.compile(r"/[A-Za-z0-9_./+@-]{1,90}")


@dataclass(frozen=True, slots=True)
class StateDir:
    """Paths of everything under ``.fairway/``. ``root`` is absolute."""

    root: Path

    @classmethod
    def at(cls, path: Path) -> StateDir:
        return cls(path.expanduser().absolute())

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def imports(self) -> Path:
        """Fetched and converted models; it may be deleted while no import runs."""
        return self.root / "imports"

    @property
    def secrets(self) -> Path:
        return self.root / "secrets"

    @property
    def certs(self) -> Path:
        """The certificate authority, and a folder with the certificate of each process."""
        return self.root / "certs"

    @property
    def operator_certs(self) -> Path:
        """The certificate of this machine's command line."""
        return self.certs / "operator"

    @property
    def sockets(self) -> Path:
        """Folder of the stores' Unix sockets: below /tmp if the installation's path is unsuitable."""
        inside = self.root / "sockets"
        if _SOCKET_FOLDER.fullmatch(str(inside)):
            return inside
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:16]
        return Path("/tmp") / f"fairway-{os.geteuid()}-{digest}"

    def remove_temporary(self) -> None:
        """Remove the sockets' folder if it is below /tmp. Nothing of the installation runs."""
        if self.sockets.parent != self.root:
            shutil.rmtree(self.sockets, ignore_errors=True)

    @property
    def etcd_address(self) -> str:
        """Address of etcd's socket: the server makes names of the form host:port."""
        return f"unix:{self.sockets}/etcd:0"

    @property
    def redis_address(self) -> str:
        return f"unix:{self.sockets}/redis"

    @property
    def redis_url(self) -> str:
        return f"unix://{self.sockets}/redis?db=0"

    @property
    def nodes(self) -> Path:
        """Socket on which the supervisor starts and stops the workers that control planes order."""
        return self.sockets / "nodes"

    @property
    def control(self) -> Path:
        """Socket of the supervisor of the running installation."""
        return self.sockets / "control"

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

    @property
    def options(self) -> Path:
        """Options of the running installation, or of the last one that was ready."""
        return self.root / "options.json"

    @property
    def created(self) -> Path:
        """Names of the deployments that bootstrap created: a deleted one is not created again."""
        return self.root / "created.json"

    def data(self, name: str) -> Path:
        """Data folder of the process ``name``."""
        return self.root / "state" / name

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def secret(self, name: str) -> Path:
        return self.secrets / name

    def create(self) -> None:
        """Create the folders, accessible to this user only, as is their later content.

        Raises CliError when that is not possible, or another user owns one of them.
        """
        inside = (self.logs, self.secrets, self.certs, self.root / "state", self.root / "sockets")
        with self.writing():
            open_before = self.root.exists() and _is_open(self.root)
            if open_before and not self._is_installation():
                raise OSError(errno.EEXIST, "it contains other files or files of other users", str(self.root))
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(self.root)
            for folder in (*inside, self.sockets):
                folder.mkdir(mode=0o700, exist_ok=True)
                was_open = open_before or _is_open(folder)
                _make_private(folder)
                if was_open:
                    _make_contents_private(folder)
            for path in (self.ports, self.endpoints, self.lock, self.fleet, self.options, self.created):
                if path.exists():
                    _make_private(path)

    def _is_installation(self) -> bool:
        """Whether the folder is, or may become, an installation's: modes of other folders are not changed."""
        if self.root.stat().st_mode & stat.S_ISVTX:
            return False
        own = {"certs", "logs", "secrets", "sockets", "state"}
        found = {path.name for path in self.root.iterdir()}
        return self.root.name == ".fairway" or "secrets" in found or found <= own

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Convert an OSError inside into a CliError with the file, the cause and the next step."""
        try:
            yield
        except OSError as exc:
            raise CliError(
                "STATE_DIR_UNUSABLE",
                f"cannot use the state folder {self.root}: {exc.strerror} ({exc.filename or 'writing'})",
                next_step="free some space, or choose a folder of your own with --state-dir",
            ) from exc


def _is_open(path: Path) -> bool:
    """Whether other users have any permission."""
    return bool(path.stat().st_mode & 0o077)


def _make_private(path: Path) -> None:
    """Restrict a file or folder to this user. Raises OSError if another user owns it."""
    for found in (path.lstat(), path.stat()):
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to the user {found.st_uid}", str(path))
    if _is_open(path):
        path.chmod(path.stat().st_mode & 0o700)


def _make_contents_private(folder: Path) -> None:
    """Restrict all content of a folder to this user. Links are not changed. Raises OSError."""
    for at, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(at, name)
            if not path.is_symlink():
                _make_private(path)


def write_private(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step, readable by its owner only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in ``path``, or None if it is missing or unreadable."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace ``path`` by the JSON of ``value`` in one step, readable by its owner only."""
    write_private(path, json.dumps(value, indent=2) + "\n")


def ensure_secrets(state: StateDir) -> None:
    """Create the missing secrets; each is mode 0600 afterwards."""
    for name, prefix in _SECRETS:
        path = state.secret(name)
        if path.exists() and len(path.read_text("utf-8").strip()) >= 32:
            path.chmod(0o600)
        else:
            write_private(path, prefix + secrets.token_hex(32) + "\n")


def read_secret(state: StateDir, name: str) -> str:
    """Return a secret's text, or "" when it does not exist."""
    try:
        return state.secret(name).read_text("utf-8").strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses are host:port, except ``http``.

    If a role has several processes, the singular field has the first one and the plural field all of them.
    """

    # URL without a path.
    http: str
    grpc: str  # the first gateway
    api_key: str  # for the data plane
    admin_key: str  # for the control plane and the registry
    # "": none is deployed.
    model: str
    registry: str = ""  # gRPC server
    controlplane: str = ""  # the first control plane
    scheduler: str = ""  # the first scheduler
    workers: tuple[str, ...] = ()  # gRPC servers of all workers
    gateways: tuple[str, ...] = ()  # gRPC servers of all gateways
    # URLs of all gateways, in the same order.
    gateways_http: tuple[str, ...] = ()
    schedulers: tuple[str, ...] = ()  # gRPC servers of all schedulers
    controlplanes: tuple[str, ...] = ()  # gRPC servers of all control planes
    console: str = ""  # URL of the first control plane's console
    # By process: the server of /metrics, /healthz and /readyz.
    metrics: dict[str, str] = field(default_factory=dict)
    supervisor_pid: int = 0  # 0: unknown
    # Folder of the operator's certificate; "": roles serve without TLS.
    tls_dir: str = ""
    # By process.
    pids: dict[str, int] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write the file in one step, mode 0600."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> Endpoints | None:
        """Return the content of ``path``, or None without a complete file of the right types."""
        raw = read_json(path)
        try:
            return None if raw is None else msgspec.convert(raw, cls)
        except msgspec.ValidationError:
            return None
