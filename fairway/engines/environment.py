"""Where an engine's environment is, and how a process starts in it.

The marker is written last, so an interrupted installation is none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

MARKER: Final = "fairway-engine.json"
ROOT: Final = Path(__file__).resolve().parents[2]  # the folder that has the product's packages
PINS: Final = Path(__file__).parent
FOLDER_VARIABLE: Final = "FAIRWAY_VLLM_DIR"
_SIOCGIFADDR: Final = 0x8915  # Linux's ioctl for an interface's address


@dataclass(frozen=True, slots=True)
class Installed:
    """What the marker of an environment says."""

    engine: str
    version: str
    device: str  # "cpu" or "cuda"
    pins: str  # sha256 of the file of pins


def default_folder(engine: str, state_dir: Path, environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of an engine's environment in the user's data folder (XDG base directories).

    It is below ``state_dir`` for a user without a home.
    """
    found = os.environ if environ is None else environ
    named = found.get("XDG_DATA_HOME", "")
    try:
        data = Path(named) if named.startswith("/") else Path.home() / ".local" / "share"
    except RuntimeError:  # no HOME, and the user is not in the passwd file
        return state_dir.absolute() / "engines" / engine
    return data / "fairway" / "engines" / engine


def installed_in(folder: Path) -> Installed | None:
    """Return what is installed there whole, or None."""
    try:
        found = json.loads((folder / MARKER).read_bytes())
        return Installed(**{name: str(found[name]) for name in Installed.__slots__})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def mark(folder: Path, installed: Installed) -> None:
    """Write the marker. Raises OSError."""
    (folder / MARKER).write_text(json.dumps(asdict(installed)) + "\n", encoding="utf-8")


def interpreter_of(folder: Path | None) -> Path | None:
    """Return the interpreter of a whole environment, or None."""
    if folder is None or installed_in(folder) is None:
        return None
    python = folder / "bin" / "python"
    return python if os.access(python, os.X_OK) else None


# What vLLM reads when it is imported: it sends nothing, fetches nothing, and leaves threads where they are.
_VLLM: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # ranks import what ties them to their engine
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


def engine_variables(
    environ: Mapping[str, str] | None = None,
    *,
    threads: int = 0,
    splits_kv: bool = False,
    address: str = "",
) -> dict[str, str]:
    """Return the variables of a process there: the product's packages, nothing else of this Python.

    ``threads``: of each rank; 0: torch's default. ``splits_kv``: attention on a CPU may split the KV of a
    sequence by what else is in the step, so that results depend on it. ``address``: of this machine, to which
    ranks of several nodes bind; empty: all are here. Raises OSError where no interface has it.
    """
    found = os.environ if environ is None else environ
    kept = {name: value for name, value in found.items() if not name.startswith("PYTHON")}
    kept.pop("VIRTUAL_ENV", None)
    own = {"PYTHONPATH": str(ROOT), "PYTHONNOUSERSITE": "1", "VLLM_CPU_ATTN_SPLIT_KV": str(int(splits_kv))}
    if address:
        name = _interface_of(address)
        own |= {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
        # torch's ranks then look for a store that is there, and none listens on every address.
        own |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    return kept | _VLLM | own | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


def _interface_of(address: str) -> str:
    """Return the network interface whose IPv4 address it is. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # this one has no IPv4 address
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    raise OSError(
        errno.EADDRNOTAVAIL, f"no network interface has the address {address}: FAIRWAY_RANKS_ADDRESS"
    )
