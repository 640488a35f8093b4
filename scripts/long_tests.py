"""List the tests that `make test` leaves out for their time: `make test-long` runs them.

    python scripts/long_tests.py REPORT

``REPORT`` is what ``make test-all ARGS=--junitxml=REPORT`` wrote. A test function is long if all its cases
together took more than ``LONG_S`` seconds, in one of six processes on two cores. Writes
``tests/long_tests.txt``. Standard library only.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
LIST: Final = ROOT / "tests" / "long_tests.txt"
LONG_S: Final = 7.0
# Kept whatever they take: the house rules, the start of an installation, and one loss of each role that runs.
KEPT: Final = (
    "tests/tidy/",
    "tests/unit/cli/test_up.py::test_detached_life",
    "tests/e2e/test_cli.py::",
    "tests/integration/client/test_gateways.py::test_a_killed_gateway_costs_no_token_and_doubles_none",
    "tests/integration/worker/test_rows.py::test_a_killed_process_loses_no_row_and_condemns_none",
    "tests/integration/test_batch_takeover.py::",
    "tests/sim/lab/test_outcomes.py::test_nothing_is_lost_when_the_leading_scheduler_is_killed",
)


def name_of(class_name: str, case: str) -> str:
    """Return FILE::FUNCTION, or FILE::CLASS, of a case in a report."""
    parts = class_name.split(".")
    inner = [part for part in parts if part[:1].isupper()]
    path = "/".join(part for part in parts if part not in inner) + ".py"
    return f"{path}::{inner[0] if inner else case.partition('[')[0]}"


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(argv[0]).iter("testcase"):
        seconds[name_of(case.get("classname", ""), case.get("name", ""))] += float(case.get("time", "0"))
    found = sorted(name for name, took_s in seconds.items() if took_s > LONG_S and not name.startswith(KEPT))
    LIST.write_text("\n".join(found) + "\n", "utf-8")
    kept_s = sum(took_s for name, took_s in seconds.items() if name not in found)
    all_s = sum(seconds.values())
    print(f"{len(found)} of {len(seconds)} tests are long; the others took {kept_s:.0f} of {all_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
