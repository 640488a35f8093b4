"""`make chaos`: the matrix of drills against real processes. Exits 0 when every drill passed, else 1.

make chaos ARGS="--seed 7 --drill worker-stop"
make chaos ARGS="--list"
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # read when grpc is imported: it starts processes
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import argparse
import asyncio
import fnmatch
import logging
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from tests.chaos.drills import Drill, matrix
from tests.chaos.driver import Bench, state_root
from tests.chaos.fleet import Fleet, Shape
from tests.chaos.load import CLIENT_TIMEOUT_S, Client, make_specs, references
from tests.chaos.report import Row, failures, line, result
from tests.support.stack import ROOT

SUITES: Final = {
    "suite-kill-32-streams": "tests/chaos/test_kill.py",
    "suite-kv-pressure": "tests/chaos/test_pressure.py",
    "suite-gateway-keys": "tests/chaos/test_gateway_keys.py",
    "suite-whale": "tests/chaos/test_whale.py",
    "suite-failover": "tests/chaos/test_failover.py",
}
SUITE_S: Final = 900
FIGURES: Final = re.compile(r"figures: (.+)")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def run_drills(drills: Sequence[Drill], options: argparse.Namespace, root: Path) -> list[Row]:
    """Run drills on as few fleets as possible: a new one after each failure."""
    rows: list[Row] = []
    left = list(drills)
    while left:
        folder = root / f"fleet-{len(rows)}"
        async with Fleet.started(folder, Shape()) as fleet:
            await run_on(fleet, left, rows, options)
        found = fleet.found_processes()
        if found:
            rows[-1].leaks.append(f"left after the fleet's end: {found}")
    return rows


async def run_on(fleet: Fleet, left: list[Drill], rows: list[Row], options: argparse.Namespace) -> None:
    """Take drills from ``left`` until one fails or none is left."""
    keys = await fleet.create_tenants([drill.name for drill in left] + ["reference"])
    client = Client(fleet.gateways, fleet.options.model_name, timeout_s=CLIENT_TIMEOUT_S * options.patience)
    watching: list[asyncio.Task[None]] = []
    specs = make_specs()
    try:
        await asyncio.sleep(1.0)  # a key is known to the gateways a moment after it was made
        known = await references(client, specs, keys["reference"])
        bench = Bench(fleet, client, specs, known, keys, options.seed, options.rate, options.patience)
        while left:
            drill = left.pop(0)
            row = await bench.run(drill)
            rows.append(row)
            say(line(row))
            for what in row.what if options.verbose else ():
                say(f"    {what}")
            for failure in failures(row):
                say(failure)
            if not row.skipped:
                watching.append(asyncio.create_task(bench.slots_free(drill, row)))
            if not row.passed and not options.keep_going:
                break
    finally:
        if watching:
            await asyncio.wait(watching)
        await client.close()


def run_suite(name: str, path: str) -> Row:
    """Run a file of pytest as one drill, on an installation of its own; say the figures that it prints."""
    row = Row(name)
    began_s = time.monotonic()
    command = [sys.executable, "-m", "pytest", path, "-x", "-q", "-s", "-p", "no:cacheprovider"]
    command += ["--timeout", str(SUITE_S), "-o", f"faulthandler_timeout={SUITE_S}"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SUITE_S, check=False)
        row.what = FIGURES.findall(done.stdout)
        if done.returncode:
            row.wrong = done.stdout.splitlines()[-30:]
    except subprocess.TimeoutExpired:
        row.wrong = [f"not done after {SUITE_S} s"]
    row.heal_s = time.monotonic() - began_s
    say(f"{name:<28} {'ok' if row.passed else 'FAILED'} in {row.heal_s:.0f} s")
    for figures in row.what:
        say(f"    {figures}")
    for failure in failures(row, most=30):
        say(failure)
    return row


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=1, help="of the traffic; the same one sends the same requests"
    )
    parser.add_argument("--drill", action="append", default=[], help="name or pattern; may be given often")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    parser.add_argument(
        "--patience", type=float, default=1.0, help="factor on every time limit: a busy machine"
    )
    parser.add_argument("--keep-going", action="store_true", help="use the fleet on after a failure")
    parser.add_argument(
        "--state-dir", default="", help="keep logs and state here; by default they are removed"
    )
    parser.add_argument("--list", action="store_true", help="print the drills and suites and end")
    parser.add_argument("--verbose", action="store_true", help="say what each fault hit")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> tuple[list[Drill], list[str]]:
    """Return the drills and the suites that were asked for, in their order."""

    def wanted(name: str) -> bool:
        return not options.drill or any(fnmatch.fnmatchcase(name, pattern) for pattern in options.drill)

    return [drill for drill in matrix() if wanted(drill.name)], [name for name in SUITES if wanted(name)]


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    drills, suites = chosen(options)
    if options.list:
        for drill in matrix():
            limits = f"silence {drill.silence_s:>4g} s, healed {drill.heal_s:>3g} s"
            say(f"{drill.name:<28} {limits}  {drill.faults}")
        for name, path in SUITES.items():
            say(f"{name:<28} {path}")
        return 0
    if not drills and not suites:
        say(f"no drill is named {options.drill}; --list tells which there are")
        return 2
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    began_s = time.monotonic()
    rows: list[Row] = []
    with state_root(options.state_dir, "chaos") as root:
        rows += asyncio.run(run_drills(drills, options, root))
    rows += [run_suite(name, SUITES[name]) for name in suites]
    say(f"\n{'=' * 40} {len(rows)} drills, seed {options.seed}, {time.monotonic() - began_s:.0f} s")
    for row in rows:
        say(line(row))
        for failure in failures(row):
            say(failure)
    say(result(rows))
    return 0 if all(row.passed for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
