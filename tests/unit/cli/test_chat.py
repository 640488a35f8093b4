"""`fairway chat` while it waits for a line."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COMMAND = ["-m", "fairway.cli.main", "chat", "--grpc", "127.0.0.1:9", "--api-key", "k", "--model", "m"]


def test_interrupt_at_the_prompt_ends_it_at_once() -> None:
    with subprocess.Popen(
        [sys.executable, *COMMAND],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.read(2) == b"> "
        try:
            # A signal between the prompt and the system call that reads is seen with the next one.
            for _ in range(30):
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
                    break
            assert process.wait(timeout=1) == 130
        finally:
            process.kill()
