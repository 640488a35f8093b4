"""What a burst freed goes back to the system, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, ctypes, gc, sys
from services.runtime.process import free_memory
from services.runtime.clock import SystemClock

free_memory._PAUSE_S = 0.1
gc.disable()

async def main(trims):
    base = free_memory.resident_bytes()
    task = asyncio.create_task(free_memory.return_free_memory(SystemClock())) if trims else None
    await asyncio.sleep(0)
    pieces = [bytes(1000) for _ in range(200_000)]
    kept = pieces[::500]  # one in 500 keeps the heap from shrinking by itself
    grown = free_memory.resident_bytes() - base
    pieces.append(pieces)  # only the collector frees them
    del pieces
    for _ in range(100):
        await asyncio.sleep(0.05)
        left = free_memory.resident_bytes() - base
        if left < grown // 3:
            break
    print(grown > 150_000_000, left < grown // 3)

asyncio.run(main(sys.argv[1] == "trims"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps freed memory, and Linux shows it")
@pytest.mark.parametrize(("mode", "returned"), [("trims", "True"), ("leaves", "False")])
def test_memory_of_a_burst_is_returned(mode: str, returned: str) -> None:
    """``leaves`` shows that the test can fail: without the task the memory stays."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONMALLOC": "malloc", "PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.split() == ["True", returned], done.stdout


LARGE = """
import sys
from services.runtime.process import free_memory

if sys.argv[1] == "mapped":
    free_memory.limit_fragmentation()
bytes(8_000_000)  # glibc keeps blocks of up to this size on its heap from when such a one was freed
base, large, kept = free_memory.resident_bytes(), [], []
for _ in range(300):
    large.append(b"x" * 500_000)
    kept.append(bytes(1000))  # keeps the heap from shrinking
grown = free_memory.resident_bytes() - base
del large
left = free_memory.resident_bytes() - base
print(grown > 140_000_000, left < grown // 3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc keeps freed memory, and Linux shows it")
@pytest.mark.parametrize(("mode", "returned"), [("mapped", "True"), ("heap", "False")])
def test_large_blocks_go_back_when_they_are_freed(mode: str, returned: str) -> None:
    """``heap`` shows that the test can fail."""
    done = subprocess.run(
        [sys.executable, "-c", LARGE, mode], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", returned], done.stdout
