"""`make security-drills`: attacks on a live installation with canaries. Exits 0 when all held, else 1.

make security-drills ARGS="--only http-trailers --only 'grpc-*'"
make security-drills ARGS="--list"
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # read when grpc is imported: it starts processes
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import argparse
import asyncio
import contextlib
import fnmatch
import logging
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from services.runtime.clock import SystemClock
from tests.security.drills.attacker import run_attack
from tests.security.drills.attacks import ATTACKS
from tests.security.drills.canary import TENANT, Canaries
from tests.security.drills.installation import Installation
from tests.security.drills.judge import Counted, Found, Row, Total, line, missing_settlements, result
from tests.security.drills.target import Attack

_CALM_S: Final = 5.0
_TAIL_S: Final = 2.0
_HEAL_S: Final = 45.0
_MOST_PROBLEMS: Final = 15
now_s = SystemClock().monotonic_s


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Drills:
    """Runs attacks on one installation and measures each."""

    def __init__(self, installation: Installation, canaries: Canaries, total: Total) -> None:
        self._installation = installation
        self._canaries = canaries
        self._total = total
        self._attackers = Found()
        self._charged_before: dict[str, Counted] = {}
        self._seen_before: dict[str, Counted] = {}

    async def run(self, attacks: Sequence[Attack], rest_s: float) -> None:
        """Run the attacks that end no process, let the roles rest, then run the others."""
        gentle = [attack for attack in attacks if not attack.kills]
        await self._calm()
        self._installation.growths(anew=True)
        for attack in gentle:
            await self._row(attack)
        if gentle:
            await asyncio.sleep(rest_s)
            self._total.growths |= self._installation.growths()
        for attack in attacks:
            if attack.kills:
                await self._row(attack)
        if not any(attack.ends for attack in attacks):
            await self._audit()

    async def _calm(self) -> None:
        """Let the canaries run by themselves, so that what comes later is due to the attacks."""
        if not await self._canaries.serve(_HEAL_S):
            raise RuntimeError("the canaries are not served by an installation that nobody attacks")
        self._canaries.take()
        await asyncio.sleep(_CALM_S)
        gap_s, _, failed = self._canaries.take()
        say(f"calm: gap {gap_s:.2f} s, {len(failed)} failed")

    async def _row(self, attack: Attack) -> None:
        if attack.stores:
            await self._audit()
        installation, canaries = self._installation, self._canaries
        before_mib, finished, began_s = installation.growths(), canaries.finished, now_s()
        canaries.take()
        for probing in installation.probes.values():
            probing.forget()
        async with canaries.paused() if attack.pauses else contextlib.nullcontext():
            found = await run_attack(attack, installation.target)
        self._attackers.add(found)
        took_s = now_s() - began_s
        if not attack.ends:
            await asyncio.sleep(_TAIL_S)
        gap_s, gap_by, failed = canaries.take()
        row = Row(
            attack.name, found, took_s, canaries.finished - finished, failed, gap_s, gap_by, attack.max_gap_s
        )
        row.silences = {
            name: probing.take()
            for name, probing in installation.probes.items()
            if not attack.ends and not name.startswith(attack.kills)
        }
        row.lost_roles = installation.take_lost(attack.kills)
        grown = installation.growths()
        row.growth_mib = max((mib - before_mib.get(name, 0.0) for name, mib in grown.items()), default=0.0)
        if not attack.ends and not (await canaries.serve(_HEAL_S) and await installation.healthy(_HEAL_S)):
            found.wrong.append(f"not every face serves again {_HEAL_S:g} s after the attack")
        if attack.stores and not attack.ends:
            await self._rebase()
        self._total.rows.append(row)
        say(line(row))
        for note in row.found.did:
            say(f"    {note}")
        for problem, times in Counter(row.problems).most_common(_MOST_PROBLEMS):
            say(f"    {problem}" + (f" ({times} times)" if times > 1 else ""))

    async def _audit(self) -> None:
        """Compare what clients saw with what was charged since the last time."""
        async with self._canaries.paused():
            seen = self._seen()
            least = {name: self._charged_before.get(name, Counted()) + each for name, each in seen.items()}
            charged = await self._installation.settled(least)
            since = {name: charged[name] - self._charged_before.get(name, Counted()) for name in seen}
            lost = missing_settlements(seen, since)
        say(f"settlements: {sum(each.requests for each in seen.values())} seen, {len(lost)} lost")
        for finding in sorted(set(lost)):
            say(f"    {lost.count(finding)} times {finding}")
        self._total.lost += lost
        await self._rebase()

    async def _rebase(self) -> None:
        async with self._canaries.paused():
            for name, each in self._seen().items():
                self._seen_before[name] = self._seen_before.get(name, Counted()) + each
            self._charged_before = await self._installation.settled(
                dict.fromkeys(self._seen_before, Counted())
            )

    def _seen(self) -> dict[str, Counted]:
        accepted = {name: Counted(*counts) for name, counts in self._attackers.accepted.items()}
        accepted[TENANT] = self._canaries.sees
        return {name: each - self._seen_before.get(name, Counted()) for name, each in accepted.items()}


async def run(attacks: Sequence[Attack], root: Path, rest_s: float) -> Total:
    total = Total()
    async with Installation.started(root / "installation") as installation:
        target = installation.target
        canaries = Canaries(target.gateways, target.model, target.keys[TENANT])
        await asyncio.sleep(1.0)  # gateways receive a key a moment after it was made
        await canaries.learn()
        async with installation.probed(), canaries.running():
            await Drills(installation, canaries, total).run(attacks, rest_s)
    return total


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.security.drills")
    parser.add_argument("--only", action="append", default=[], help="name or pattern; may be given often")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds before the growth is measured")
    parser.add_argument("--list", action="store_true", help="print the attacks and end")
    parser.add_argument("--state-dir", default="", help="keep the state here; by default it is removed")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    wanted = [
        attack
        for attack in ATTACKS
        if not options.only or any(fnmatch.fnmatchcase(attack.name, each) for each in options.only)
    ]
    if options.list:
        for attack in ATTACKS:
            say(f"{attack.name:<24} {attack.what}; {attack.holds}")
        return 0
    if not wanted:
        say(f"no attack is named {options.only}; --list prints the names")
        return 2
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            ending, signal.default_int_handler
        )  # the installation is stopped, whoever ends the drills
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    root = Path(options.state_dir or tempfile.mkdtemp(prefix="fairway-drills-"))
    root.chmod(0o755)  # what keeps another user out has to be the installation's own modes
    began_s = now_s()
    try:
        total = asyncio.run(run(wanted, root, options.rest))
    finally:
        if not options.state_dir:
            shutil.rmtree(root, ignore_errors=True)
    say(f"\n{'=' * 40} {len(total.rows)} attacks, {now_s() - began_s:.0f} s")
    for row in total.rows:
        if not row.passed:
            say(line(row))
    for name, grown_mib in sorted(total.growths.items(), key=lambda each: -each[1])[:3]:
        say(f"{name} grew by {grown_mib:.1f} MiB")
    say(result(total))
    return 0 if total.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
