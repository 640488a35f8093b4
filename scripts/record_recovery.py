"""Record a stream that survives the loss of its worker, as an animated picture.

    .venv/bin/python scripts/record_recovery.py docs/recovery.svg

Starts an installation with two workers in a temporary folder, streams one sampled completion, kills the
worker that runs it with SIGKILL, and streams the same completion again without a kill. The picture shows
what the client received, at the times of the recording. Exit code 1, and no picture, when the texts differ.
"""

from __future__ import annotations

import asyncio
import html
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

ROOT: Final = Path(__file__).resolve().parents[1]
FAIRWAY: Final = ROOT / ".venv" / "bin" / "fairway"
PROMPT: Final = "class Stack:\n    def __init__(self):\n"
SEED: Final = 11
TOKENS: Final = 480
KILL_AFTER: Final = 80  # tokens
COLUMNS: Final = 84
LINES: Final = 30  # of the streamed text
LINE_PX: Final = 17
COLUMN_PX: Final = 8.4
STYLE: Final = (
    "text{font:14px ui-monospace,Menlo,Consolas,monospace;fill:#d8dee9}"
    ".dim{fill:#88c0d0}.red{fill:#ff6b6b}.green{fill:#a3be8c}.late{fill:#ebcb8b}"
)
HOLD_S: Final = 4.0  # the last picture stays, then the recording starts again


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


@dataclass(frozen=True)
class Line:
    """Text that appears in the picture."""

    at_s: float  # from the start of the recording
    column: int
    row: int
    text: str
    style: str  # class in the style sheet


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


def placed(recording: Recording, first_row: int) -> list[Line]:
    """Lay out the streamed text; what does not fit into ``LINES`` rows is left out."""
    lines: list[Line] = []
    row = column = 0
    for at_s, piece in recording.pieces:
        style = "late" if recording.killed and at_s > recording.killed_s else "text"
        for number, part in enumerate(piece.split("\n")):
            if number:
                row, column = row + 1, 0
            while part and row < LINES:
                shown, part = part[: COLUMNS - column], part[COLUMNS - column :]
                if shown.strip():
                    lines.append(Line(at_s, column, first_row + row, shown, style))
                column += len(shown)
                if column == COLUMNS:
                    row, column = row + 1, 0
    return lines


def picture(recording: Recording) -> str:
    """Return an SVG that plays the recording and repeats it."""
    end_s, bottom = recording.finished_s, 3 + LINES
    result = (
        f"{recording.tokens} tokens in {end_s:.1f} s, {recording.tokens_before} of them before the kill. "
        f"Longest gap: {recording.gap_s:.2f} s."
    )
    lines = [
        Line(0.0, 0, 0, f"$ fairway complete --max-tokens {TOKENS}    # two workers, one stream", "dim"),
        Line(recording.killed_s, 0, 1, f"$ kill -9 {recording.killed}    # it runs the stream", "red"),
        *placed(recording, first_row=3),
        Line(end_s, 0, bottom + 1, result, "green"),
        Line(end_s, 0, bottom + 2, "The text equals that of a run without the kill.", "green"),
    ]
    total_s = end_s + HOLD_S
    styles = "".join(
        animation(number, 100 * line.at_s / total_s, total_s) for number, line in enumerate(lines)
    )
    texts = [
        f'<text id="t{number}" class="{line.style}" x="{14 + line.column * COLUMN_PX:.1f}" '
        f'y="{26 + line.row * LINE_PX}" xml:space="preserve">{html.escape(line.text)}</text>'
        for number, line in enumerate(lines)
    ]
    width, height = 28 + COLUMNS * COLUMN_PX, 26 + (bottom + 3) * LINE_PX
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}">',
            f"<style>{STYLE}{styles}</style>",
            '<rect width="100%" height="100%" rx="8" fill="#1e222a"/>',
            *texts,
            "</svg>",
            "",
        ]
    )


def animation(number: int, percent: float, total_s: float) -> str:
    """Return the style that shows text ``number`` from ``percent`` of the recording on."""
    frames = f"0%{{opacity:0}}{percent:.2f}%,100%{{opacity:1}}" if percent else "0%,100%{opacity:1}"
    return (
        f"@keyframes k{number}{{{frames}}}#t{number}{{animation:k{number} {total_s:.2f}s step-end infinite}}"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(Path(sys.argv[1])))
