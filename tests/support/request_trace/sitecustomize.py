"""Loaded by every process of an installation under test: records which files a request passes, and when.

SIGUSR2 begins, SIGURG ends and writes ``$REQUEST_TRACE_FOLDER/PID.json``: each project file with the time of
its first call, in seconds of the machine's monotonic clock. Only the main thread is traced.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

_FOLDER = os.environ.get("REQUEST_TRACE_FOLDER", "")
_ROOT = f"{Path(__file__).resolve().parents[3]}/"
_first_s: dict[str, float] = {}


def _profile(frame: FrameType, event: str, argument: Any) -> None:
    name = frame.f_code.co_filename
    if event == "call" and name.startswith(_ROOT) and name not in _first_s:
        _first_s[name] = time.monotonic()


def _begin(number: int, frame: FrameType | None) -> None:
    _first_s.clear()
    sys.setprofile(_profile)


def _end(number: int, frame: FrameType | None) -> None:
    sys.setprofile(None)
    path = Path(_FOLDER, f"{os.getpid()}.json")
    path.with_suffix(".new").write_text(
        json.dumps({name.removeprefix(_ROOT): at_s for name, at_s in _first_s.items()})
    )
    path.with_suffix(".new").rename(path)


if _FOLDER:
    signal.signal(signal.SIGUSR2, _begin)
    signal.signal(signal.SIGURG, _end)
