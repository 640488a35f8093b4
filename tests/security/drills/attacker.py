"""An attacker's process: one attack on the installation that standard input describes, niced.

The last line of its output is what it found.
"""

from __future__ import annotations

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import asyncio
import json
import resource
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tests.security.drills.attacks import ATTACKS
from tests.security.drills.judge import Found
from tests.security.drills.target import Attack, Gateway, Target
from tests.support.local_servers import die_with_parent
from tests.support.stack import ROOT


async def run_attack(attack: Attack, target: Target) -> Found:
    """Return what all processes of an attack report together."""
    shares = [replace(target, share=(number, attack.processes)) for number in range(attack.processes)]
    total = Found()
    for found in await asyncio.gather(*(_run(attack, share) for share in shares)):
        total.add(found)
    return total


async def _run(attack: Attack, target: Target) -> Found:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.security.drills.attacker", attack.name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        async with asyncio.timeout(attack.limit_s + 20.0):
            out, _ = await process.communicate(json.dumps(asdict(target), default=str).encode())
    except TimeoutError:
        process.kill()
        await process.wait()
        return Found(wrong=[f"the attacker did not end within {attack.limit_s:g} s"])
    if process.returncode:
        return Found(wrong=[f"the attacker ended with {process.returncode}"])
    return Found(**json.loads(out.splitlines()[-1]))


def parse_target(text: str) -> Target:
    raw = json.loads(text)
    raw["gateways"] = [Gateway(**gateway) for gateway in raw["gateways"]]
    raw["state"], raw["share"] = Path(raw["state"]), tuple(raw["share"])
    return Target(**raw)


async def _attack(attack: Attack, target: Target) -> Found:
    try:
        async with asyncio.timeout(attack.limit_s):
            return await attack.act(target)
    except TimeoutError:
        return Found(wrong=[f"the attack was not over within {attack.limit_s:g} s"])
    except Exception as error:  # an attacker that breaks has attacked nothing
        traceback.print_exc()
        return Found(wrong=[f"the attacker broke: {type(error).__name__} {error}"[:300]])


def main(arguments: Sequence[str]) -> None:
    os.nice(19)
    die_with_parent()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    target = parse_target(sys.stdin.read())
    attack = next(attack for attack in ATTACKS if attack.name == arguments[0])
    found = asyncio.run(_attack(attack, target))
    sys.stdout.write("\n" + json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
