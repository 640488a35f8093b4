"""`make security`: inputs that must do no harm, at each face of a live installation. Exits 0 when none did.

make security ARGS="--only grammars --only 'across*'"

A cell is unexpected when the server fails, serves what must be refused, answers late, or names its inside.
After each input the canaries are served with the same texts, and every process is still the same: else it
is a crash. The fuzzers send what the OpenAPI document and the messages describe, whole and damaged.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # read when grpc is imported: it starts processes
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import argparse
import asyncio
import fnmatch
import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from tests.security.drills.canary import TENANT, Canaries
from tests.security.drills.installation import Installation
from tests.security.table.cells import Answer, Cell, Outcome, Tally, grouped
from tests.security.table.faces import generation_cells
from tests.security.table.fuzz import fuzz_http, fuzz_messages
from tests.security.table.inputs import INPUTS
from tests.security.table.others import (
    artifact_cells,
    framing_cells,
    name_cells,
    pickle_cells,
    publish_cells,
    route_cells,
    rpc_cells,
)
from tests.support.stack import processes

_HEAL_S: Final = 45.0
_FUZZERS: Final = ("fuzz HTTP", "fuzz messages")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Table:
    """Sends cells to one installation and judges what comes back."""

    def __init__(self, installation: Installation, canaries: Canaries) -> None:
        self.tally = Tally()
        self._installation = installation
        self._canaries = canaries
        self._engines = self._running()

    async def run(self, cells: Sequence[Cell]) -> None:
        """Send the cells, those of one input at once; check after each input that nothing ended."""
        for (group, name), faces in grouped(cells).items():
            for cell, answer in zip(faces, await asyncio.gather(*map(_answer, faces)), strict=True):
                if found := self.tally.add(cell, answer):
                    say(f"  {found}")
            await self.check(f"{group}, {name}")

    async def check(self, what: str) -> None:
        """Note what is lost since the last check as crashes after ``what``."""
        lost = self._installation.take_lost(())
        engines = self._running()
        lost += [f"an engine, {pid}" for pid in self._engines - engines]
        self._engines = engines
        if not await self._canaries.serve(_HEAL_S):
            lost.append("the canaries")
        _, _, failed = self._canaries.take()
        for each in (*lost, *failed):
            self.tally.crashes.append(f"after {what}: {each}")
            say(f"  {self.tally.crashes[-1]}")

    def _running(self) -> set[int]:
        return {
            each.pid
            for each in processes(self._installation.target.state)
            if "services.worker.engine" in " ".join(each.info["cmdline"])
        }


async def _answer(cell: Cell) -> Answer:
    try:
        return await cell.send()
    except Exception as error:  # a client that breaks has observed something that it does not expect
        return Answer(Outcome.FAILED, type(error).__name__, f"{error}"[:200])


async def run(only: Sequence[str], root: Path, examples: int) -> Tally:
    async with Installation.started(root / "installation", workers=1, gateways=1) as installation:
        target = installation.target
        canaries = Canaries(target.gateways, target.model, target.keys[TENANT])
        await asyncio.sleep(1.0)  # gateways receive a key a moment after it was made
        await canaries.learn()
        async with canaries.running():
            table = Table(installation, canaries)
            cells = [
                *generation_cells(target, (each for each in INPUTS if wanted(each.group, only))),
                *framing_cells(target),
                *route_cells(target),
                *name_cells(target),
                *rpc_cells(target),
                *pickle_cells(target, root),
                *artifact_cells(target),
                *publish_cells(target),
            ]
            await table.run([cell for cell in cells if wanted(cell.group, only)])
            for group, count in table.tally.cells.items():
                say(f"{count:>5} {group}")
            for name, fuzz in zip(_FUZZERS, (fuzz_http, fuzz_messages), strict=True):
                if wanted(name, only):
                    sent, unexpected = await fuzz(target, examples)
                    table.tally.unexpected += unexpected
                    say("\n  ".join((f"{name}: {sent} requests, {len(unexpected)} unexpected", *unexpected)))
                    await table.check(name)
    return table.tally


def wanted(group: str, only: Sequence[str]) -> bool:
    return not only or any(fnmatch.fnmatchcase(group, each) for each in only)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.security.table")
    parser.add_argument("--only", action="append", default=[], help="a group or pattern; may be given often")
    parser.add_argument("--examples", type=int, default=20, help="requests of each operation and method")
    options = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    root = Path(tempfile.mkdtemp(prefix="fairway-table-"))
    root.chmod(0o755)
    try:
        tally = asyncio.run(run(options.only, root, options.examples))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    say(tally.result)
    return 0 if tally.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
