"""Record a stream that survives the loss of its worker, as an animated picture.

    .venv/bin/python -m scripts.record_recovery docs/recovery.svg

Starts an installation with two workers in a temporary folder, streams one sampled completion, kills the
worker that runs it with SIGKILL, and streams the same completion again without a kill. The picture shows
what the client received, at the times of the recording. Exit code 1, and no picture, when the texts differ.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fairway.cli.state import Endpoints, StateDir
from fairway.client import AdminClient, Client, Finished, Options, Tokens
from scripts import terminal_picture
from scripts.terminal_picture import Line, Piece

ROOT: Final = Path(__file__).resolve().parents[1]
FAIRWAY: Final = ROOT / ".venv" / "bin" / "fairway"
PROMPT: Final = "class Stack:\n    def __init__(self):\n"
SEED: Final = 11
TOKENS: Final = 480
KILL_AFTER: Final = 80  # tokens
LINES: Final = 30  # of the streamed text


@dataclass
class Recording:
    """One stream: times are seconds from the request."""

    # (time, text) of each message of the client.
    pieces: list[tuple[float, str]] = field(default_factory=list)
    # Worker that was killed; empty without a kill.
    killed: str = ""
    killed_s: float = 0.0
    # Tokens received before the kill.
    tokens_before: int = 0
    # Largest gap between two messages after the kill.
    gap_s: float = 0.0
    finished_s: float = 0.0
    tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.pieces)


def main(path: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        state = ["--state-dir", folder]
        up: list[str | Path] = [
            FAIRWAY,
            "up",
            "--detach",
            "--model",
            "tiny",
            "--workers",
            "2",
            "--replicas",
            "2",
            *state,
        ]
        subprocess.run(up, check=True, stdout=subprocess.DEVNULL)
        try:
            endpoints = Endpoints.load(StateDir.at(Path(folder)).endpoints)
            assert endpoints is not None
            whole = asyncio.run(record(endpoints, kill=False))
            killed = asyncio.run(record(endpoints, kill=True))
        finally:
            subprocess.run([FAIRWAY, "down", *state], check=False, stdout=subprocess.DEVNULL)
    if killed.text != whole.text or killed.tokens != TOKENS or not killed.killed:
        print(
            "no worker was killed in time, or the text after the kill differs from that without one",
            file=sys.stderr,
        )
        return 1
    path.write_text(picture(killed), "utf-8")
    print(f"{path}: {killed.killed} killed after {killed.tokens_before} tokens, gap {killed.gap_s:.2f} s")
    return 0


async def record(endpoints: Endpoints, kill: bool) -> Recording:
    """Stream the completion; if ``kill``, kill its worker after ``KILL_AFTER`` tokens or a few more."""
    recording = Recording()
    options = Options(max_output_tokens=TOKENS, temperature=0.6, seed=SEED, ignore_eos=True)
    async with Client([endpoints.grpc], api_key=endpoints.api_key) as client:
        worker = asyncio.create_task(running_worker(endpoints)) if kill else None
        began = last = time.monotonic()
        async with client.generate(endpoints.model, PROMPT, options) as stream:
            async for event in stream:
                now = time.monotonic()
                match event:
                    case Tokens():
                        recording.pieces.append((now - began, event.text))
                        recording.tokens += len(event.ids)
                        if recording.killed:
                            recording.gap_s = max(recording.gap_s, now - last)
                        last = now
                    case Finished():
                        recording.finished_s = now - began
                if worker is not None and worker.done() and recording.tokens >= KILL_AFTER:
                    recording.killed, worker = worker.result(), None
                    os.kill(endpoints.pids[recording.killed], signal.SIGKILL)
                    recording.killed_s, recording.tokens_before = time.monotonic() - began, recording.tokens
    return recording


async def running_worker(endpoints: Endpoints) -> str:
    """Return the worker that runs a sequence, once the scheduler reports one."""
    async with AdminClient(endpoints.controlplane, admin_key=endpoints.admin_key) as admin:
        while True:
            for worker in await admin.placements.workers():
                if any(pool.running for pool in worker.pools):
                    return str(worker.worker_id)


def picture(recording: Recording) -> str:
    """Return an SVG that plays the recording and repeats it."""
    end_s, bottom = recording.finished_s, 3 + LINES
    result = (
        f"{recording.tokens} tokens in {end_s:.1f} s, {recording.tokens_before} of them before the kill. "
        f"Longest gap: {recording.gap_s:.2f} s."
    )
    killed_s = recording.killed_s if recording.killed else end_s
    pieces = [Piece(at_s, piece, "late" if at_s > killed_s else "text") for at_s, piece in recording.pieces]
    lines = [
        Line(0.0, 0, 0, f"$ fairway complete --max-tokens {TOKENS}    # two workers, one stream", "dim"),
        Line(recording.killed_s, 0, 1, f"$ kill -9 {recording.killed}    # it runs the stream", "red"),
        *terminal_picture.placed(pieces, first_row=3, rows=LINES),
        Line(end_s, 0, bottom + 1, result, "green"),
        Line(end_s, 0, bottom + 2, "The text equals that of a run without the kill.", "green"),
    ]
    return terminal_picture.picture(lines, rows=bottom + 3, end_s=end_s)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(Path(sys.argv[1])))
