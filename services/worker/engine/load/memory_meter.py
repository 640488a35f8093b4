"""How much memory loading and a step took at their peak.

A process counts with its anonymous memory: pages of mapped files, such as a checkpoint's, are the system's to
drop. The kernel keeps a peak only of all resident memory. In a step the part of files does not
shrink, so its peak less that part is the step's; while files come and go, samples are taken.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

SAMPLE_S: Final = 0.003
_STATM: Final = Path("/proc/self/statm")
_STATUS: Final = Path("/proc/self/status")
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_RESET_PEAK: Final = "5"  # proc(5)


class MemoryMeter(Protocol):
    """A context manager that counts from ``begin`` until its end."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def begin(self) -> None:
        """Count what is taken from the first call on."""

    def run(self, step: Callable[[], object]) -> None:
        """Run the step; its peak counts, without what was freed before and only not given back."""

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once, less what was held at the beginning."""


class ProcessMeter:
    """Implements ``MemoryMeter`` for the memory of this process."""

    def __init__(self) -> None:
        self._start = self._sampled = self._exact = 0
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="memory-meter", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._sampler.ident is not None:
            self._sampler.join()

    def begin(self) -> None:
        """See ``MemoryMeter``."""
        if self._sampler.ident is not None:
            return
        _return_freed_memory()
        self._start = self._sampled = own_bytes()
        self._sampler.start()

    def run(self, step: Callable[[], object]) -> None:
        """See ``MemoryMeter``."""
        _return_freed_memory()
        file_bytes = _file_bytes()
        exact = _reset_peak()
        step()
        if exact:
            self._exact = max(self._exact, _peak_bytes() - file_bytes)

    @property
    def peak_bytes(self) -> int:
        """See ``MemoryMeter``."""
        return max(0, max(self._sampled, self._exact) - self._start)

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._sampled = max(self._sampled, own_bytes())


class DeviceMeter:
    """Implements ``MemoryMeter`` for what torch holds of a CUDA device, graphs and fragments included."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._start: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing of it goes on."""

    def begin(self) -> None:
        """See ``MemoryMeter``."""
        import torch

        if self._start is None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._start = torch.cuda.memory_reserved(self._device)

    def run(self, step: Callable[[], object]) -> None:
        """See ``MemoryMeter``."""
        import torch

        torch.cuda.empty_cache()
        step()

    @property
    def peak_bytes(self) -> int:
        """See ``MemoryMeter``."""
        import torch

        return max(0, torch.cuda.max_memory_reserved(self._device) - (self._start or 0))


def meter_for(device: str) -> MemoryMeter:
    """Return the meter of the memory that an engine on this device is bound by."""
    return DeviceMeter(device) if device.partition(":")[0] == "cuda" else ProcessMeter()


def own_bytes() -> int:
    """Return the anonymous memory of this process, or its greatest where only that is reported."""
    try:
        _, resident, shared, *_ = _STATM.read_text("utf-8").split()
    except OSError:
        return _greatest_bytes()
    return (int(resident) - int(shared)) * mmap.PAGESIZE


def _file_bytes() -> int:
    try:
        return int(_STATM.read_text("utf-8").split()[2]) * mmap.PAGESIZE
    except OSError:
        return 0


def _reset_peak() -> bool:
    """Whether ``_peak_bytes`` begins anew here; a container may forbid it."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK, "utf-8")
    except OSError:
        return False
    return True


def _peak_bytes() -> int:
    found = re.search(r"^VmHWM:\s*(\d+) kB$", _STATUS.read_text("utf-8"), re.MULTILINE)
    return 0 if found is None else int(found[1]) * 1024


def _greatest_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _return_freed_memory() -> None:
    """Have the allocator keep nothing that is free."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc has it
        library.malloc_trim(0)
