"""``python -m simulator``: the commands of ``COMMANDS``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final

# Each command is a module with ``main(arguments) -> exit status``; it is imported only when it runs.
COMMANDS: Final = {
    "sim": ("simulator.invariants.seeds", "run seeds of mixed faults and check every invariant"),
    "rollouts": ("simulator.rollouts.seeds", "roll out versions on fleets under mixed faults"),
    "scaling": ("simulator.scaling.seeds", "scale a fleet on ordered nodes under mixed faults"),
    "tiers": ("simulator.lab.tiers", "burst and lose nodes among tenants of every isolation tier"),
    "scale": ("simulator.fleet.scale", "run a thousand workers and a million requests in one run"),
    "simulate": ("simulator.lab.runner", "run a scenario and report latencies, goodput and fairness"),
    "window": ("simulator.lab.window", "replay a window of requests with and without a suspect"),
    "compare": ("simulator.lab.compare", "run traces on this scheduler and on simpler ones"),
    "handoff": ("simulator.handoff.map", "map where prefill and decode apart serve more"),
    "batching": ("simulator.batcher.sweep", "compare the derived batch window with fixed ones"),
    "weights": ("simulator.lab.weights", "distribute a version to a thousand nodes from a thin source"),
    "elastic": ("simulator.elastic.day", "run a day of two pools under four scalers"),
    "capacity": ("simulator.capacity.plan", "plan the nodes that a load needs"),
    "calibrate": ("simulator.engine.calibrate", "fit a cost model to measured steps"),
}


def main(arguments: Sequence[str]) -> int:
    """Run a command and return its exit status."""
    if not arguments or arguments[0] not in COMMANDS:
        for name, (_, text) in COMMANDS.items():
            print(f"  python -m simulator {name:10} {text}")
        return 0 if arguments and arguments[0] in ("-h", "--help") else 2
    command: Callable[[Sequence[str]], int] = import_module(COMMANDS[arguments[0]][0]).main
    return command(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
