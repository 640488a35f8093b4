"""What an installation costs at rest: processor time of each of its processes, in percent of one core.

``make bench-idle`` starts an installation of its own with the bundled model, lets it settle, and reads the
processor time of every process before and after a period without requests. Processor time holds on a machine
that others use too. ``--supervisor PID`` measures a running installation instead.

The last line is ``RESULT {json}``: ``total_percent``, and ``percent`` by process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.results import print_result

SETTLE_S = 60.0
MEASURE_S = 120.0


def name_of(process: psutil.Process) -> str:
    """Return the role of a process, or its program."""
    words = [str(word) for word in process.cmdline()]
    if "-m" not in words:
        return str(process.name())
    module, *rest = words[words.index("-m") + 1 :]
    return rest[0] if module == "services" else module.removeprefix("services.")


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(supervisor_pid: int, seconds: float) -> dict[str, float]:
    """Return the percentage of one core that each process of the installation takes."""
    supervisor = psutil.Process(supervisor_pid)
    processes = [supervisor, *supervisor.children(recursive=True)]
    names = [name_of(process) for process in processes]
    before_s, began_s = [cpu_s(process) for process in processes], time.monotonic()
    time.sleep(seconds)
    used_s, passed_s = [cpu_s(process) for process in processes], time.monotonic() - began_s
    found: dict[str, float] = {}
    for name, before, after in zip(names, before_s, used_s, strict=True):
        found[name] = found.get(name, 0.0) + 100.0 * (after - before) / passed_s
    return found


def run(settle_s: float, seconds: float) -> dict[str, float]:
    """Measure an installation that is started for it."""
    with tempfile.TemporaryDirectory(prefix="fairway-bench-") as folder:
        at = ("--state-dir", str(Path(folder) / "state"))
        command = [sys.executable, "-m", "fairway.cli.main"]
        try:
            subprocess.run([*command, "up", "--detach", "--model", "tiny", *at], check=True)
            time.sleep(settle_s)
            endpoints = json.loads((Path(folder) / "state" / "endpoints.json").read_text())
            return measure(endpoints["supervisor_pid"], seconds)
        finally:
            subprocess.run([*command, "down", *at], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--settle", type=float, default=SETTLE_S, help="seconds before the measurement")
    parser.add_argument("--seconds", type=float, default=MEASURE_S, help="length of the measurement")
    parser.add_argument("--supervisor", type=int, help="process of a running installation")
    options = parser.parse_args()
    if options.supervisor is None:
        found = run(options.settle, options.seconds)
    else:
        found = measure(options.supervisor, options.seconds)
    for name, percent in found.items():
        print(f"{name:36s} {percent:6.2f} %")
    rounded = {name: round(value, 2) for name, value in found.items()}
    print_result({"total_percent": round(sum(found.values()), 2), "percent": rounded})


if __name__ == "__main__":
    main()
