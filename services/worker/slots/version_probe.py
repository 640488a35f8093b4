"""The probe of a loaded version: prompts or rows that its engine answers before it takes requests.

The commands go to the engine directly. No sequence table, tenant, indicator or device time has a part in it:
as the warm-up it belongs to the loading.
"""

from __future__ import annotations

import array
import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from services.core.fixed_cost.rows import RawTensor
from services.ports.clock import Clock
from services.runtime.supervisor import Supervisor
from services.worker.engine_protocol import BatchRaised, BatchRan, Command, RunBatch, Stepped
from services.worker.policy.probes import ProbePlan, RowProbePlan, answer_problem, prompt_name

log = structlog.get_logger()

PROBE_BATCH: Final = 0  # its number: those of requests count from 1


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """Why a version takes no requests. ``final``: the same files would fail again."""

    reason: str
    message: str
    final: bool


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """``send`` passes a command to the engine, False if it cannot. ``ended`` is called once."""

    send: Callable[[Command], bool]
    ended: Callable[[ProbeFailed | None], None]
    clock: Clock
    supervisor: Supervisor


class ProbeRun:
    """A probe under way: its deadline and its end."""

    def __init__(self, context: ProbeContext, deadline_s: float, waits_for: Callable[[], str]) -> None:
        """``waits_for`` returns what has not been answered."""
        self._context = context
        self._deadline_s = deadline_s
        self._waits_for = waits_for
        self._timer: asyncio.Task[None] | None = None
        self._over = False

    @property
    def over(self) -> bool:
        return self._over

    def begin(self) -> None:
        self._timer = self._context.supervisor.spawn("probe-deadline", self._expire())

    def cancel(self) -> None:
        """End it without an outcome: the engine has ended."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def send(self, command: Command) -> None:
        if not self._context.send(command):
            self.fail(ProbeFailed("PROBE_CRASHED", "the engine took no command of the probe", final=False))

    def passed(self) -> None:
        self._end(None)

    def fail(self, failed: ProbeFailed) -> None:
        self._end(failed)

    def wrong(self, what: str, problem: str) -> None:
        """End it: what the version answers will not do."""
        self._end(ProbeFailed("PROBE_FAILED", f"{what}: {problem}", final=True))

    def _end(self, failed: ProbeFailed | None) -> None:
        if not self._over:
            self.cancel()
            self._context.ended(failed)

    async def _expire(self) -> None:
        await self._context.clock.sleep(self._deadline_s)
        waited = f"{self._waits_for()}: no answer within {self._deadline_s:.0f} s"
        self._timer = None
        self._end(ProbeFailed("PROBE_TIMEOUT", waited, final=False))


class PromptProbe:
    """Prompts of a language model, round by round."""

    def __init__(self, plan: ProbePlan, context: ProbeContext, *, vocab_size: int) -> None:
        self._plan = plan
        self._vocab_size = vocab_size
        self._rounds = iter(plan.rounds)
        self._asked = {one.handle: one for each in plan.rounds for one in each}
        self._tokens: dict[int, list[int]] = {}  # by handle, of those that are under way
        self._answered = 0
        self._run = ProbeRun(context, plan.deadline_s, self.waits_for)

    def begin(self) -> None:
        self._run.begin()
        self._next_round()

    def cancel(self) -> None:
        self._run.cancel()

    def waits_for(self) -> str:
        """Return what the engine has not answered."""
        left = [self._asked[handle] for handle in sorted(self._tokens)]
        names = ", ".join(map(prompt_name, left)) or "the probe"
        return f"{names} ({self._answered} of {self._plan.prompts} answered)"

    def on_stepped(self, event: Stepped) -> None:
        """Take a step's tokens, and judge the prompts that ended in it."""
        if self._run.over:
            return
        for handle, token in zip(event.handles, event.tokens, strict=True):
            if handle in self._tokens:
                self._tokens[handle].append(token)
        for handle, entries in event.logprobs.items():
            if handle in self._tokens and not all(math.isfinite(entry.sampled) for entry in entries):
                self._run.wrong(prompt_name(self._asked[handle]), "log probabilities that are not finite")
                return
        for handle, reason in event.finished.items():
            if handle not in self._tokens:
                continue
            asked, tokens = self._asked[handle], self._tokens.pop(handle)
            error = event.errors.get(handle, "")
            if problem := answer_problem(asked, tokens, reason, error, self._vocab_size):
                self._run.wrong(prompt_name(asked), problem)
                return
            self._answered += 1
        if not self._tokens:
            self._next_round()

    def _next_round(self) -> None:
        prompts = next(self._rounds, None)
        if prompts is None:
            self._run.passed()
            return
        self._tokens = {one.handle: [] for one in prompts}
        for one in prompts:
            self._run.send(one)


class RowProbe:
    """One batch of rows of a fixed-cost model."""

    def __init__(self, plan: RowProbePlan, context: ProbeContext) -> None:
        self._plan = plan
        self._name = f"a batch of {len(plan.rows)} rows" + (f" of {plan.width} tokens" if plan.width else "")
        self._run = ProbeRun(context, plan.deadline_s, self.waits_for)

    def begin(self) -> None:
        self._run.begin()
        self._run.send(RunBatch(PROBE_BATCH, list(self._plan.rows), self._plan.width))

    def cancel(self) -> None:
        self._run.cancel()

    def waits_for(self) -> str:
        return self._name

    def on_batch(self, event: BatchRan | BatchRaised) -> None:
        """Judge the answer."""
        if isinstance(event, BatchRaised):
            self._run.wrong(self._name, f"the model raised {event.message}")
        elif event.problems:
            self._run.wrong(self._name, next(iter(event.problems.values())))
        elif len(event.outputs) != len(self._plan.rows) or not all(event.outputs):
            self._run.wrong(self._name, f"outputs of {len(event.outputs)} rows")
        elif not all(_is_finite(tensor) for row in event.outputs for tensor in row):
            self._run.wrong(self._name, "outputs that are not finite")
        else:
            self._run.passed()


def _is_finite(tensor: RawTensor) -> bool:
    if tensor.datatype != "FP32":
        return True
    values = array.array("f")
    values.frombytes(tensor.data)
    return all(map(math.isfinite, values))
