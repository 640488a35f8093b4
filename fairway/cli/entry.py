"""The console script: runs ``fairway.cli.main``. Ctrl-C during its import prints one line and exits."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Run one command and exit with its code."""
    try:
        from fairway.cli.main import main as run  # takes most of a second
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    run()


if __name__ == "__main__":
    main()
