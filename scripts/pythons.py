"""Run tests on the oldest and the newest Python of this machine, each in an environment of its own.

    python3 scripts/pythons.py floor|all [PYTEST ARGUMENTS]

``floor`` runs the part whose behaviour depends on the interpreter, in an environment without torch; ``all``
runs the whole suite. The oldest counts where its exception groups and timeouts behave as those of 3.11.0 do,
which is below 3.11.4. Prints which interpreters were found, and which kind is missing. Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from glob import glob
from typing import Final, NamedTuple

ROOT: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OLDEST: Final = (3, 11, 0)
FLOOR_BELOW: Final = (3, 11, 4)
NEWEST_MINOR: Final = (3, 13)  # the constraints have wheels up to here
FOLDERS: Final = ("/usr/local/bin", "/usr/bin", "~/.pyenv/versions/*/bin", "~/.local/share/uv/python/*/bin")
NAMES: Final = ("python3", "python3.11", "python3.12", "python3.13")
# Error groups, cancellation, timeouts and signals: what asyncio and the language do, and what hangs on it.
FLOOR_TESTS: Final = (
    "tests/unit/core",
    "tests/unit/runtime",
    "tests/unit/rpc",
    "tests/unit/adapters",
    "tests/unit/client",
    "tests/unit/gateway/requests/test_request.py",
    "tests/unit/gateway/requests/test_request_credit.py",
    "tests/integration/test_grpc_gateway.py",
    "tests/integration/test_grpc_session.py",
    "tests/contract/test_placement_stream.py",
    "tests/contract/test_worker_stream.py",
    "tests/contract/test_report_links.py",
    "tests/tidy/test_house_rules.py",
)
PROBE: Final = "import ensurepip, venv, ctypes, ssl, sys; print('.'.join(map(str, sys.version_info[:3])))"


class Python(NamedTuple):
    version: tuple[int, ...]
    path: str

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))


def main(argv: Sequence[str]) -> int:
    """Return 0 when the tests pass on every interpreter that was found."""
    if not argv or argv[0] not in ("floor", "all"):
        print(__doc__, file=sys.stderr)
        return 2
    floor, newest = chosen(probed(candidates()))
    print(f"pythons: below 3.11.4: {shown(floor)}; newest of up to 3.13: {shown(newest)}", flush=True)
    failed = [
        python.name
        for python in dict.fromkeys(each for each in (floor, newest) if each)
        if run(python, argv[0], argv[1:])
    ]
    if failed:
        print(f"pythons: failed on {' and '.join(failed)}", flush=True)
    return 1 if failed else 0


def candidates() -> list[str]:
    """Return the interpreters of the PATH and of the folders where others are kept, each once."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    folders += [found for folder in FOLDERS for found in sorted(glob(os.path.expanduser(folder)))]
    paths = (os.path.join(folder, name) for folder in folders for name in NAMES)
    return list(dict.fromkeys(os.path.realpath(path) for path in paths if os.access(path, os.X_OK)))


def probed(paths: Iterable[str]) -> list[Python]:
    """Return those that run and can make environments."""
    found = []
    for path in paths:
        try:
            answer = subprocess.run(
                [path, "-c", PROBE], capture_output=True, encoding="utf-8", timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if answer.returncode == 0:
            found.append(Python(tuple(map(int, answer.stdout.strip().split("."))), path))
    return found


def chosen(found: Iterable[Python]) -> tuple[Python | None, Python | None]:
    """Return the oldest below 3.11.4, and the newest that the constraints have wheels for."""
    usable = sorted(each for each in found if each.version >= OLDEST and each.version[:2] <= NEWEST_MINOR)
    floor = next((each for each in usable if each.version < FLOOR_BELOW), None)
    return floor, usable[-1] if usable else None


def shown(python: Python | None) -> str:
    return f"{python.name} ({python.path})" if python else "none is here, not tested"


def run(python: Python, part: str, arguments: Sequence[str]) -> int:
    """Run a part of the suite; return its exit status."""
    full = part == "all"
    folder = f".venv-py{python.name}" + ("" if full else "-floor")
    # Of its own also beside a .venv of the same minor version: what is installed depends on the micro one.
    setup = [python.path, os.path.join("scripts", "setup_env.py"), "--venv", folder]
    done = subprocess.call([*setup, "--dev" if full else "--test"], cwd=ROOT)
    if done:
        return done
    processes = os.environ.get("TEST_PROCESSES", "4")
    tests = [os.path.join(folder, "bin", "python"), "-m", "pytest", "-n", processes, "-q"]
    print(f"pythons: {'the suite' if full else 'the floor tests'} on {python.name}", flush=True)
    chosen_tests = ["--hypothesis-profile=default"] if full else FLOOR_TESTS
    return subprocess.call([*tests, *chosen_tests, *arguments], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
