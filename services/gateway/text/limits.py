"""The cost limits of one order to a text process, and the error of an order that exceeds them."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.errors import FailedPrecondition, FairwayError, InvalidInput, Unavailable
from services.gateway.text.child import Cause


@dataclass(frozen=True, slots=True)
class TextLimits:
    """The cost limits of one order. ``memory_bytes`` is added to the memory of the loaded version."""

    load_cpu_s: float = 20.0
    read_cpu_s: float = 2.0
    read_cpu_s_per_mib: float = 4.0
    memory_bytes: int = 1024 * 1024 * 1024
    patience_s: float = 10.0  # the wait for an answer, plus ten times the processor time
    idle_s: float = 60.0

    def cpu_s(self, size_bytes: int) -> float:
        return self.read_cpu_s + self.read_cpu_s_per_mib * size_bytes / 2**20

    def wait_s(self, cpu_s: float) -> float:
        """The longest wait for an answer, with allowance for a busy machine."""
        return self.patience_s + 10 * cpu_s

    def read_error(self, cause: Cause, size_bytes: int) -> FairwayError:
        """Return the error of a text on which the process ended."""
        if cause is Cause.PANIC:
            return FailedPrecondition("this model's tokenizer or chat template fails on this text")
        took = self._took(cause, self.cpu_s(size_bytes))
        if took:
            return InvalidInput(
                f"this model's tokenizer or chat template takes {took} for this text: shorten it or send "
                "token ids",
                field="prompt",
                cause=cause.value,
            )
        return Unavailable("the process that read the text was lost", retry_after_s=1.0)

    def load_error(self, cause: Cause, version_digest: str) -> FairwayError:
        """Return the error of a version on whose files the process ended."""
        took = "the library fails on it" if cause is Cause.PANIC else self._took(cause, self.load_cpu_s)
        if took:
            return FailedPrecondition(
                f"the version's tokenizer or chat template cannot be loaded: {took}",
                version_digest=version_digest,
                cause=cause.value,
            )
        return Unavailable("the process that loaded the version's tokenizer was lost", retry_after_s=1.0)

    def _took(self, cause: Cause, cpu_s: float) -> str:
        if cause is Cause.CPU:
            return f"more than {cpu_s:.1f} s of processor time"
        return f"more than {self.memory_bytes // 2**20} MiB of memory" if cause is Cause.MEMORY else ""
