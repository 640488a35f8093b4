"""Record a chat whose model calls a tool, as an animated picture.

    .venv/bin/python -m scripts.record_chat docs/chat.svg

Starts an installation with SmolLM2 in a temporary folder and types into `fairway chat --tools` on a
terminal: a question, and what the called tool returns. The picture shows what the terminal
received, at its times. Exit code 1, and no picture, when the model called no tool or did not answer.
"""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from scripts import terminal_picture
from scripts.terminal_picture import COLUMNS, Line, Piece

ROOT: Final = Path(__file__).resolve().parents[1]
FAIRWAY: Final = ROOT / ".venv" / "bin" / "fairway"
TOOLS: Final = "models/smollm2/tools.json"
# What is typed, and what the terminal shows once it has been answered.
INPUTS: Final = (
    ("What is the weather in Paris?", "Enter what get_weather returns."),
    ("18 degrees and sunny", "tokens/s)"),
)
COMMAND: Final = ("chat", "--temperature", "0", "--tools", TOOLS, "--tool-choice", "get_weather")
KEY_S: Final = 0.04  # time between two keys
PAUSE_S: Final = 1.2  # time before a line is typed
LONGEST_S: Final = 120.0
LINES: Final = 14
_CONTROLS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\x07")


class Terminal:
    """`fairway chat` on a terminal of its own; ``pieces`` are what it received."""

    def __init__(self, state: list[str]) -> None:
        self.pieces: list[Piece] = []
        self._began_s = time.monotonic()
        ours, theirs = pty.openpty()
        self._terminal = ours
        self._process = subprocess.Popen(
            [FAIRWAY, *COMMAND, *state],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, start_new_session=True,
            env=os.environ | {"TERM": "xterm", "COLUMNS": str(COLUMNS)},
        )  # fmt: skip
        os.close(theirs)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def type_line(self, text: str) -> None:
        self._read(PAUSE_S)
        for key in text + "\r":
            os.write(self._terminal, key.encode())
            self._read(KEY_S, "dim")

    def wait_for(self, text: str, beyond: int = 0) -> None:
        """Receive until ``text`` is among what came after ``beyond`` characters. Raises TimeoutError."""
        deadline = time.monotonic() + LONGEST_S
        while text not in self.text[beyond:]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{text!r} did not appear:\n{self.text}")
            self._read(0.1)

    def close(self) -> None:
        os.write(self._terminal, b"\x04")
        self._read(1.0)
        self._process.terminate()
        self._process.wait()
        os.close(self._terminal)

    def _read(self, span_s: float, style: str = "text") -> None:
        deadline = time.monotonic() + span_s
        while (left_s := deadline - time.monotonic()) > 0:
            if select.select([self._terminal], [], [], left_s)[0]:
                try:
                    data = os.read(self._terminal, 65536)
                except OSError:  # the program has ended
                    return
                self.pieces.append(Piece(self.elapsed_s, _CONTROLS.sub("", data.decode()), style))


def main(path: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        state = ["--state-dir", folder]
        up: list[str | Path] = [FAIRWAY, "up", "--detach", "--model", "smollm2", *state]
        subprocess.run(up, check=True, stdout=subprocess.DEVNULL)
        try:
            terminal = Terminal(state)
            try:
                terminal.wait_for("> ")
                for text, shown in INPUTS:
                    beyond = len(terminal.text)
                    terminal.type_line(text)
                    terminal.wait_for(shown, beyond)
            except TimeoutError as error:
                print(error, file=sys.stderr)
                return 1
            finally:
                terminal.close()
        finally:
            subprocess.run([FAIRWAY, "down", *state], check=False, stdout=subprocess.DEVNULL)
    lines = [
        Line(0.0, 0, 0, f"$ fairway {' '.join(COMMAND)}", "dim"),
        *terminal_picture.placed(terminal.pieces, first_row=1, rows=LINES),
    ]
    path.write_text(
        terminal_picture.picture(lines, rows=LINES + 1, end_s=terminal.elapsed_s), encoding="utf-8"
    )
    print(terminal.text)
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(Path(sys.argv[1])))
