"""The probe of a loaded version: prompts or rows that its engine answers before it takes requests.

The commands go to the engine directly. No sequence table, tenant, indicator or device time has a part in it:
as the warm-up it belongs to the loading.
"""

from __future__ import annotations

import array
import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from services.core.fixed_cost.rows import RawTensor
from services.ports.clock import Clock
from services.runtime.supervisor import Supervisor
from services.worker.engine_protocol import BatchRaised, BatchRan, Command, RunBatch, Stepped
from services.worker.policy.probes import ProbePlan, RowProbePlan, answer_problem, prompt_name
from services.worker.slots.engine_process import Crashed, EngineExit

log = structlog.get_logger()

PROBE_BATCH: Final = 0  # its number: those of requests count from 1


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """Why a version takes no requests. ``FINAL_REASONS`` has the reason where the same files fail again."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """``send`` passes a command to the engine, False if it cannot. ``ended`` is called once."""

    send: Callable[[Command], bool]
    ended: Callable[[ProbeFailed | None], None]
    clock: Clock
    supervisor: Supervisor


class Probe(ABC):
    """A probe under way: its deadline and its end."""

    def __init__(self, context: ProbeContext, deadline_s: float) -> None:
        self._context = context
        self._deadline_s = deadline_s
        self._timer: asyncio.Task[None] | None = None
        self._over = False

    @abstractmethod
    def waits_for(self) -> str:
        """Return what the engine has not answered."""

    def begin(self) -> None:
        self._timer = self._context.supervisor.spawn("probe-deadline", self._expire())

    def cancel(self) -> None:
        """End it without an outcome: the engine has ended."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def failure(self, exit_: EngineExit) -> ProbeFailed | None:
        """End it with its engine, which ended by itself; return the failure if that was a crash."""
        self.cancel()
        if not isinstance(exit_, Crashed):
            return None
        return ProbeFailed("PROBE_CRASHED", f"{self.waits_for()}: {exit_.message}")

    def _send(self, command: Command) -> None:
        if not self._context.send(command):
            self._end(ProbeFailed("PROBE_CRASHED", "the engine took no command of the probe"))

    def _wrong(self, what: str, problem: str) -> None:
        """End it: what the version answers will not do."""
        self._end(ProbeFailed("PROBE_FAILED", f"{what}: {problem}"))

    def _end(self, failed: ProbeFailed | None) -> None:
        if not self._over:
            self.cancel()
            self._context.ended(failed)

    async def _expire(self) -> None:
        await self._context.clock.sleep(self._deadline_s)
        waited = f"{self.waits_for()}: no answer within {self._deadline_s:.0f} s"
        self._timer = None
        self._end(ProbeFailed("PROBE_TIMEOUT", waited))


class PromptProbe(Probe):
    """Prompts of a language model, round by round."""

    def __init__(self, plan: ProbePlan, context: ProbeContext, *, vocab_size: int) -> None:
        super().__init__(context, plan.deadline_s)
        self._plan = plan
        self._vocab_size = vocab_size
        self._rounds = iter(plan.rounds)
        self._submitted = {one.handle: one for each in plan.rounds for one in each}
        self._tokens: dict[int, list[int]] = {}  # tokens so far of the prompts under way, by handle
        self._answered = 0

    def begin(self) -> None:
        super().begin()
        self._next_round()

    def waits_for(self) -> str:
        left = [self._submitted[handle] for handle in sorted(self._tokens)]
        names = ", ".join(map(prompt_name, left)) or "the probe"
        return f"{names} ({self._answered} of {self._plan.prompts} answered)"

    def on_stepped(self, event: Stepped) -> None:
        """Take a step's tokens, and judge the prompts that ended in it."""
        if self._over:
            return
        for handle, token in zip(event.handles, event.tokens, strict=True):
            if handle in self._tokens:
                self._tokens[handle].append(token)
        for handle, entries in event.logprobs.items():
            if handle in self._tokens and not all(math.isfinite(entry.sampled) for entry in entries):
                self._wrong(prompt_name(self._submitted[handle]), "log probabilities that are not finite")
                return
        for handle, reason in event.finished.items():
            if handle not in self._tokens:
                continue
            submitted, tokens = self._submitted[handle], self._tokens.pop(handle)
            error = event.errors.get(handle, "")
            if problem := answer_problem(submitted, tokens, reason, error, self._vocab_size):
                self._wrong(prompt_name(submitted), problem)
                return
            self._answered += 1
        if not self._tokens:
            self._next_round()

    def _next_round(self) -> None:
        prompts = next(self._rounds, None)
        if prompts is None:
            self._end(None)
            return
        self._tokens = {one.handle: [] for one in prompts}
        for one in prompts:
            self._send(one)


class RowProbe(Probe):
    """One batch of rows of a fixed-cost model."""

    def __init__(self, plan: RowProbePlan, context: ProbeContext) -> None:
        super().__init__(context, plan.deadline_s)
        self._plan = plan
        self._name = f"a batch of {len(plan.rows)} rows" + (f" of {plan.width} tokens" if plan.width else "")

    def begin(self) -> None:
        super().begin()
        self._send(RunBatch(PROBE_BATCH, list(self._plan.rows), self._plan.width))

    def waits_for(self) -> str:
        return self._name

    def on_batch(self, event: BatchRan | BatchRaised) -> None:
        """Judge the answer."""
        if isinstance(event, BatchRaised):
            self._wrong(self._name, f"the model raised {event.message}")
        elif event.problems:
            self._wrong(self._name, next(iter(event.problems.values())))
        elif len(event.outputs) != len(self._plan.rows) or not all(event.outputs):
            self._wrong(self._name, f"outputs of {len(event.outputs)} rows")
        elif not all(_is_finite(tensor) for row in event.outputs for tensor in row):
            self._wrong(self._name, "outputs that are not finite")
        else:
            self._end(None)


def _is_finite(tensor: RawTensor) -> bool:
    if tensor.datatype != "FP32":
        return True
    values = array.array("f")
    values.frombytes(tensor.data)
    return all(map(math.isfinite, values))
