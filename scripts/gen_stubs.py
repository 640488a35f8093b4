"""Generate the stubs of protos/ into fairway/, or with --check report whether they are current."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
STUBS = Path("fairway")


def generate(into: Path) -> None:
    """Write the modules and type stubs of every proto file under ``into``."""
    tools = Path(sys.executable).parent
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"--proto_path={PROTOS}",
        f"--python_out={into}",
        f"--grpc_python_out={into}",
        f"--mypy_out={into}",
        f"--mypy_grpc_out={into}",
        *(str(path.relative_to(PROTOS)) for path in sorted(PROTOS.rglob("*.proto"))),
    ]
    path = os.pathsep.join([str(tools), os.environ.get("PATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, encoding="utf-8", timeout=120
    )
    if done.returncode != 0:
        sys.exit(f"protoc failed:\n{done.stdout}{done.stderr}")


def stub_files(root: Path) -> dict[str, str]:
    """Return the text of each generated file under ``root``, by its path there."""
    return {
        path.relative_to(root).as_posix(): path.read_text("utf-8")
        for path in sorted((root / STUBS).glob("*/*_pb2*.py*"))
    }


def stale_stubs() -> list[str]:
    """Return the names of stubs that are missing, outdated or left over."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = stub_files(Path(folder))
    committed = stub_files(ROOT)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def lint() -> int:
    """Return buf's exit code for the proto files."""
    buf = Path(sys.executable).parent / "buf"
    return subprocess.run([str(buf), "lint"], cwd=PROTOS, check=False, timeout=120).returncode


def main() -> int:
    """Return 0 when the stubs are current, or were written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; fail when a stub is not current"
    )
    arguments = parser.parse_args()
    if lint() != 0:
        return 1
    if arguments.check:
        stale = stale_stubs()
        if stale:
            sys.stderr.write(f"stubs are not current: {', '.join(stale)}; run `make stubs`\n")
        return 1 if stale else 0
    for name in stub_files(ROOT):
        (ROOT / name).unlink()
    generate(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
