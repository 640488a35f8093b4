"""The command line under test: in this process for its answer alone, else as a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fairway.cli.main import main

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Said:
    """What a command wrote and exited with."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def yaml(self) -> Any:
        return yaml.safe_load(self.out)

    @property
    def rows(self) -> list[list[str]]:
        """Cells of the lines of a table without a terminal."""
        return [line.split("\t") for line in self.out.splitlines()]


@dataclass(frozen=True, slots=True)
class CommandLine:
    """`fairway` with its options for one installation."""

    state: Path

    def __call__(self, *arguments: str, code: int = 0) -> Said:
        """Run a command in this process and return its output; fail unless it exits with ``code``."""
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main([*arguments, "--state-dir", str(self.state)])
        except SystemExit as end:
            ended = int(end.code or 0)
        else:
            raise AssertionError("main returned")
        said = Said(ended, out.getvalue(), err.getvalue())
        assert said.code == code, f"fairway {' '.join(arguments)}: {said}"
        assert "Traceback" not in said.err
        assert (said.code == 0) == ("error " not in said.err), said.err
        return said

    @contextlib.contextmanager
    def process(
        self, *arguments: str, settings: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[str]]:
        """Run a command as a process with pipes; it is killed at the end unless it ended."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("FAIRWAY_")}
        with subprocess.Popen(
            [sys.executable, "-m", "fairway.cli.main", *arguments, "--state-dir", str(self.state)],
            cwd=ROOT,
            env=kept | dict(settings or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()
