"""Loaded by every process of an installation under test: records which files a request passes, and when.

SIGUSR2 begins, SIGURG ends and writes ``$REQUEST_TRACE_FOLDER/PID.json``: each function of the project, as
``file:name``, with the time of its first call in seconds of the machine's monotonic clock. Only the main
thread is traced.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_FOLDER = os.environ.get("REQUEST_TRACE_FOLDER", "")
_ROOT = f"{Path(__file__).resolve().parents[3]}/"
_first_s: dict[CodeType, float] = {}


def _profile(frame: FrameType, event: str, argument: Any) -> None:
    code = frame.f_code
    if event == "call" and code not in _first_s and code.co_filename.startswith(_ROOT):
        _first_s[code] = time.monotonic()


def _begin(number: int, frame: FrameType | None) -> None:
    _first_s.clear()
    sys.setprofile(_profile)


def _end(number: int, frame: FrameType | None) -> None:
    sys.setprofile(None)
    path = Path(_FOLDER, f"{os.getpid()}.json")
    found = {
        f"{code.co_filename.removeprefix(_ROOT)}:{code.co_qualname}": at_s for code, at_s in _first_s.items()
    }
    path.with_suffix(".new").write_text(json.dumps(found))
    path.with_suffix(".new").rename(path)


if _FOLDER:
    signal.signal(signal.SIGUSR2, _begin)
    signal.signal(signal.SIGURG, _end)
