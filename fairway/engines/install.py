"""Installs an engine into an environment of its own, by pins that are resolved already.

The marker is written last: what an interrupted installation left is none, and the next removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fairway.engines.environment import (
    PINS,
    Installed,
    engine_variables,
    installed_in,
    interpreter_of,
    mark,
)

CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
OLDEST: Final = (3, 11)  # Fairway's, which runs there too; vLLM's is 3.10
NEWEST: Final = (3, 13)
NEEDED_BYTES: Final = {"cpu": 6 * 1024**3, "cuda": 20 * 1024**3}
PIP_S: Final = 3600.0
CHECK_S: Final = 300.0
_BEGUN: Final = "fairway-engine.begun"  # marks a folder as an installation's, whole or not
_PROBE: Final = """
import importlib.metadata as m, json, sys
pins = json.loads(sys.argv[1])
found = {}
for name in pins:
    try:
        found[name] = m.version(name).partition("+")[0]
    except m.PackageNotFoundError:
        found[name] = ""
for name in json.loads(sys.argv[2]):
    __import__(name)
print("\\n" + json.dumps({"python": sys.version.split()[0], "found": found}))
"""
# What the engine's process imports there.
NEEDED: Final = ("vllm", "torch", "services.worker.engine.process")


class EngineProblem(Exception):
    """An engine cannot be installed or does not work. ``next_step`` is what the user can do about it."""

    def __init__(self, message: str, next_step: str) -> None:
        super().__init__(message)
        self.next_step = next_step


def pins_of(path: Path) -> dict[str, str]:
    """Return the pinned versions by package. Raises OSError."""
    lines = (line.partition(";")[0].strip() for line in path.read_text("utf-8").splitlines())
    pairs = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.strip(): version.strip() for name, _, version in pairs}


def pins_file(device: str) -> Path:
    """Return the pins of vLLM for a device."""
    return PINS / f"vllm-{device}.txt"


def install(
    folder: Path,
    device: str,
    report: Callable[[str], object],
    *,
    pins: Path,
    python: str = sys.executable,
    needed: tuple[str, ...] = NEEDED,
    needed_bytes: int | None = None,
) -> Installed:
    """Return what ``folder`` has, whole, from now on. Raises EngineProblem, OSError."""
    digest = hashlib.sha256(pins.read_bytes()).hexdigest()
    version = next((found for name, found in pins_of(pins).items() if name.startswith("vllm")), "")
    wanted = Installed("vllm", version, device, digest)
    known = installed_in(folder) is not None or (folder / _BEGUN).exists()
    if not known and folder.exists() and any(folder.iterdir()):
        raise EngineProblem(f"{folder} has files of something else", "name another folder with --dir")
    _require_python(python)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if installed_in(folder) == wanted and interpreter_of(folder) is not None:
            report(f"vLLM {version} is in {folder} already")
            return wanted
        least = NEEDED_BYTES[device] if needed_bytes is None else needed_bytes
        if (free := shutil.disk_usage(folder.parent).free) < least:
            raise EngineProblem(
                f"{free / 1024**3:.1f} GiB are free in {folder.parent}; vLLM needs {least / 1024**3:.0f} GiB",
                "free some space, or name another folder with --dir",
            )
        # Scripts of an environment name its folder, so it is made in its place; without a marker it is none.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / _BEGUN).touch()
        report(f"creating the environment in {folder}")
        _run([python, "-m", "venv", str(folder)], "the environment cannot be created")
        _fill(str(folder / "bin" / "python"), device, pins, report)
        report("checking what was installed")
        check(folder, pins=pins, needed=needed)
        mark(folder, wanted)
        return wanted


def check(folder: Path, *, pins: Path, needed: tuple[str, ...] = NEEDED) -> dict[str, str]:
    """Return the versions that the environment's interpreter finds, by package, and its own.

    Raises EngineProblem where something cannot be imported or is not as pinned.
    """
    wanted = {name: version.partition("+")[0] for name, version in pins_of(pins).items()}
    optional = {name for name in wanted if name.startswith("intel-") or name == "triton"}
    with tempfile.TemporaryDirectory() as nowhere:
        done = _call(
            [str(folder / "bin/python"), "-P", "-c", _PROBE, json.dumps(list(wanted)), json.dumps(needed)],
            CHECK_S,
            engine_variables(),
            nowhere,
        )
    again = "run `fairway engines install vllm` again"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EngineProblem(f"vLLM in {folder} does not start: {last[:300]}", again)
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    found: dict[str, str] = answer["found"]
    wrong = [
        f"{name} is {found[name] or 'missing'}, pinned is {version}"
        for name, version in wanted.items()
        if found[name] != version and not (name in optional and not found[name])
    ]
    if wrong:
        raise EngineProblem(f"{'; '.join(wrong[:5])}; {len(wrong)} in all differ", again)
    return {"python": answer["python"], **found}


def _fill(python: str, device: str, pins: Path, report: Callable[[str], object]) -> None:
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--progress-bar=off"]
    torch = pins_of(pins).get("torch")
    if torch is not None and device == "cpu":
        report("installing torch from PyTorch's CPU index")
        own = [*pip, "--no-deps", "--index-url", CPU_INDEX, "--timeout", "30", "--retries", "1"]
        with tempfile.TemporaryDirectory() as nothing:
            # These two keep an index or folder of the user's configuration out of this one step.
            env = dict(os.environ, PIP_EXTRA_INDEX_URL=CPU_INDEX, PIP_FIND_LINKS=nothing)
            if _call([*own, f"torch=={torch}"], PIP_S, env).returncode:
                report("that index cannot be used from here: taking torch from pip's own index")
    elif torch is not None:
        report("installing torch with CUDA's libraries (some GB)")
        _run([*pip, f"torch=={torch}"], "torch cannot be installed")
    report(f"installing {len(pins_of(pins))} pinned packages")
    _run([*pip, "--no-deps", "--requirement", str(pins)], "pip could not install the pinned packages")


def _require_python(python: str) -> None:
    code = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
    done = _call([python, "-c", code], 30.0)
    found = tuple(map(int, done.stdout.split())) if not done.returncode else ()
    if not OLDEST <= found <= NEWEST:
        what = ".".join(map(str, found)) if found else "not a Python with venv"
        raise EngineProblem(
            f"{python} is {what}: vLLM's environment needs Python "
            f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}",
            "name one: fairway engines install vllm --python python3.12",
        )


def _run(command: list[str], what: str) -> None:
    done = _call(command, PIP_S)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if "ERROR" in line or "rror:" in line] or lines
        last = errors[-1].strip()[:300] if errors else f"exit code {done.returncode}"
        step = "most often the network, a proxy or the disk: see the line above, then run it again"
        if "No space left" in done.stderr:
            step = "free some space, or name another folder with --dir, then run it again"
        raise EngineProblem(f"{what}: {last}", step)


def _call(
    command: list[str], most_s: float, env: dict[str, str] | None = None, folder: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command; one that is not there or takes too long fails as others do."""
    try:
        return subprocess.run(
            command,
            env=env,
            cwd=folder,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=most_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"it took more than {most_s:g} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]}: {error.strerror}")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder's installation. Raises EngineProblem while another process has it."""
    lock = os.open(folder.with_name(folder.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            step = "wait for it, then run `fairway engines list`"
            raise EngineProblem(f"another process installs into {folder}", step) from error
        yield
    finally:
        os.close(lock)
