"""Write docs/benchmarks.md from the records below bench/records.

python scripts/benchmarks.py            writes the page
python scripts/benchmarks.py --check    exits 1 where the page differs
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.store.page import TEMPLATE, page
from bench.store.records import BenchStore, StoreError

PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_HEAD: Final = "<!-- Made from bench/records by `make reference`. -->\n"


def is_stale() -> bool:
    """Whether the page differs from its records. Raises StoreError where it cannot be made."""
    return PAGE.read_text("utf-8") != made()


def made() -> str:
    return _HEAD + page(BenchStore(TEMPLATE.parent))


def main(arguments: Sequence[str]) -> int:
    try:
        if list(arguments) == ["--check"]:
            if is_stale():
                print("docs/benchmarks.md differs from bench/records: run `make reference`", file=sys.stderr)
                return 1
            return 0
        PAGE.write_text(made(), "utf-8")
    except StoreError as error:
        print(f"error: {error}; {error.next_step}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
