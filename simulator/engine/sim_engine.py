"""An engine process without a device: the production engine and planner, on a cost model's time.

Each step is planned when it starts and reported when it ends, as by a real engine. Steps in which
nothing else can happen are one event: while the same sequences decode, no other can start, and no output,
credit or block limit is reached, the plan of each next step is fixed. What such a *window* holds is written
down at its end. A command that arrives meanwhile ends it with the step that is under way, which is when a
real engine would have read the command. The result is that of step-by-step execution, token by token and time
by time; only the report of a window's tokens waits for its end, and for that of a single step that follows
it, ``coalesce_s`` at most.

A device's KV by counts: blocks that sequences hold, and prefix blocks that stay behind until evicted.

Blocks have no contents here, so they need no identity: a sequence's own block is ``OWN``, a shared one the
name of its prefix. A prefix block of ``PREFIX_BLOCK_TOKENS`` is several blocks. It belongs to the cache from
the step that computed it, is held while a sequence uses it, and is free otherwise: evicted, least recently
used first, when blocks are needed. The end of a prefix is older than its beginning, since it is of no use
without. Output is cached when its sequence gives its blocks up, not block by block.
"""

from __future__ import annotations

import math
from array import array
from asyncio import TimerHandle
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from services.core.estimates.cost_model import CostModel
from services.core.prefix import PREFIX_BLOCK_TOKENS, extend
from services.ports.clock import Clock
from services.worker import engine_protocol as wire
from services.worker.engine.core import Engine
from services.worker.engine.execute.executor import Batch, Inline
from services.worker.engine.plan.block_manager import OutOfBlocks
from services.worker.engine.plan.planner import MAX_LONG_PREFILLS, PlannerLimits
from services.worker.engine.prefix.reuse import Attached
from services.worker.engine.sequence import ModelLimits, SequenceState, Status
from services.worker.policy.prefill import PrefillBudget
from services.worker.step_page import Member, StepPage, size_of
from simulator.engine.poison import EngineEnding, EngineEnds, Poison
from simulator.engine.sim_executor import (
    FRAGILE,
    OutputLength,
    SimExecutor,
    SimIntake,
    VersionFaults,
    sim_tokens,
)
from simulator.engine.tokens import SimVocabulary

OWN: Final = 0  # prefixes are never named so


class SimKvPool:
    """Implements ``BlockPool`` and ``PrefixReuse``. ``cache`` false: no prefix is ever found."""

    def __init__(self, blocks_total: int, block_size: int, *, cache: bool = True) -> None:
        if blocks_total < 1 or block_size < 1 or (cache and PREFIX_BLOCK_TOKENS % block_size):
            raise ValueError(f"{blocks_total} blocks of {block_size} tokens are no pool")
        self.blocks_total = blocks_total
        self.blocks_open = blocks_total  # fewer while the pool shrinks
        self.block_size = block_size
        self._cache = cache
        self._each = PREFIX_BLOCK_TOKENS // block_size if cache else 1  # blocks of a prefix block
        self._own = 0
        self._holders: dict[int, int] = {}  # number of holders of each cached prefix block, by name
        self._idle: dict[int, None] = {}  # blocks without holders, least recently used first
        self._roots: dict[int, int] = {}  # root of each cached prefix block, by name
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    # --- BlockPool ----------------------------------------------------------------------------------

    @property
    def blocks_free(self) -> int:
        """Blocks without a holder, blocks of idle prefixes included."""
        return max(0, self.blocks_open - self.blocks_used)

    @property
    def blocks_used(self) -> int:
        return self._own + (len(self._holders) - len(self._idle)) * self._each

    @property
    def prefix_blocks(self) -> int:
        """Prefix blocks that are here, held or idle."""
        return len(self._holders)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def allocate(self, count: int, *, after: int | None = None, expected: int = 0) -> list[int]:
        if count > self.blocks_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.blocks_free} free")
        self._own += count
        self._evict_beyond(self.blocks_open)
        return [OWN] * count

    def release(self, blocks: Iterable[int]) -> None:
        held = blocks if isinstance(blocks, list) else list(blocks)
        own = held.count(OWN)
        self._own -= own
        assert self._own >= 0, "blocks released twice"
        # The end first: it is to be evicted before what comes before it.
        for index in range(len(held) - own - self._each, -1, -self._each):
            self._let_go(held[index])

    def freed_by(self, tables: Iterable[Sequence[int]], *, kept: Collection[int] = ()) -> int:
        """See ``BlockManager``. A prefix that only these tables hold counts once."""
        own, counted = 0, Counter[int]()
        for table in tables:
            of_table = table.count(OWN)
            own += of_table
            counted.update(table[: len(table) - of_table : self._each])
        gone = (name for name, count in counted.items() if count == self._holders[name] and name not in kept)
        return own + self._each * sum(1 for _ in gone)

    def held_by(self, tables: Iterable[Sequence[int]]) -> int:
        """Return the blocks of these tables, a shared one once."""
        own, names = 0, set[int]()
        for table in tables:
            own += table.count(OWN)
            names.update(table)
        return own + self._each * len(names - {OWN})

    def idle_of(self, roots: Iterable[int]) -> int:
        """See ``BlockManager``."""
        wanted = frozenset(roots)
        return self._each * sum(self._roots[name] in wanted for name in self._idle)

    def evict_of(self, roots: Iterable[int], count: int) -> int:
        """See ``BlockManager``. Whole prefix blocks go, so that it may be a few more."""
        wanted, evicted = frozenset(roots), 0
        for name in [name for name in self._idle if self._roots[name] in wanted]:
            if evicted >= count:
                break
            self._evict(name)
            evicted += self._each
        return evicted

    @property
    def is_closing(self) -> bool:
        """See ``BlockManager``."""
        return self.blocks_open < self.blocks_total

    def holds_closed(self, table: Sequence[int]) -> bool:
        """See ``BlockManager``. Closed blocks are not recorded: any holder may be preempted."""
        return self.is_closing and bool(table)

    def grow(self, blocks: int) -> None:
        """See ``BlockManager``."""
        self.blocks_total = self.blocks_open = self.blocks_total + blocks

    def shrink(self, blocks: int) -> int:
        """See ``BlockManager``."""
        self.blocks_open = min(self.blocks_open, max(1, self.blocks_total - blocks))
        return self.drain()

    def drain(self) -> int:
        """See ``BlockManager``."""
        self._evict_beyond(self.blocks_open)
        held = self._own + len(self._holders) * self._each
        given = self.blocks_total - max(self.blocks_open, held)
        self.blocks_total -= given
        return given

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the accounting matches exactly the block tables in ``held``."""
        counted = Counter(name for table in held for name in table)
        assert self._own == counted.pop(OWN, 0), "own blocks leaked"
        assert counted == {name: n * self._each for name, n in self._holders.items() if n}, "holders are off"
        assert list(self._idle) == [name for name in self._idle if not self._holders[name]]
        assert len(self._idle) == sum(not n for n in self._holders.values()), "an idle prefix is lost"
        assert self._own + len(self._holders) * self._each <= self.blocks_total, "more blocks than there are"

    # --- PrefixReuse --------------------------------------------------------------------------------

    def reusable(self, sequence: SequenceState) -> tuple[int, int]:
        names = self._found(sequence)
        shared = sum(self._holders[name] > 0 for name in names)
        return len(names) * PREFIX_BLOCK_TOKENS, shared * self._each

    def found(self, sequence: SequenceState) -> list[int]:
        return [name for name in self._found(sequence) for _ in range(self._each)]

    def attach(self, sequence: SequenceState) -> Attached:
        blocks: list[int] = []
        for name in self._found(sequence):
            self._hold(name)
            blocks += [name] * self._each
        return Attached(blocks, len(blocks) * self.block_size)

    def advance(self, sequence: SequenceState) -> None:
        chain, most = sequence.prefix_names, (len(sequence.tokens) - 1) // PREFIX_BLOCK_TOKENS
        first = place = sequence.computed // PREFIX_BLOCK_TOKENS
        if place != self._shared(sequence):
            return
        while place < min(most, len(chain) - 1) and chain[place + 1] in self._holders:
            self._share(sequence, place)
            place += 1
        if place > first:
            began = sequence.computed > sequence.cached
            sequence.computed = place * PREFIX_BLOCK_TOKENS
            sequence.cached = sequence.cached if began else sequence.computed

    def next_name(self, sequence: SequenceState) -> int | None:
        place = sequence.computed // PREFIX_BLOCK_TOKENS + 1
        return sequence.prefix_names[place] if self._cache and place < len(sequence.prefix_names) else None

    def publish(self, sequence: SequenceState) -> None:
        whole = sequence.computed // PREFIX_BLOCK_TOKENS
        for place in range(self._shared(sequence), min(whole, len(sequence.prefix_names) - 1)):
            if (name := sequence.prefix_names[place + 1]) not in self._holders:
                self._add(name, sequence.prefix_names[0])
            self._share(sequence, place)

    def retain(self, sequence: SequenceState) -> None:
        if self._cache and sequence.prefix_names:
            _continue(sequence, sequence.computed // PREFIX_BLOCK_TOKENS)
            self.publish(sequence)

    def discard(self, sequence: SequenceState) -> None:
        """Nothing is wrong where nothing is computed."""

    def receive(self, names: Sequence[int]) -> None:
        """Cache blocks that another engine computed, first to last, as far as there is room."""
        for name in names[: self.blocks_free // self._each]:
            if name not in self._holders:
                self._add(name, 0)
        self._evict_beyond(self.blocks_open)

    def clear(self) -> None:
        """See ``PrefixReuse``. Simulated engines keep their weights."""
        raise NotImplementedError

    def take_changes(self) -> tuple[list[int], list[int]]:
        """See ``PrefixReuse``."""
        if not (self._added or self._removed):
            return [], []
        added, removed = list(self._added), list(self._removed)
        self._added, self._removed = {}, {}
        return added, removed

    def _found(self, sequence: SequenceState) -> list[int]:
        if not self._cache:
            return []
        most = (len(sequence.tokens) - 1) // PREFIX_BLOCK_TOKENS  # the last token is always computed
        found: list[int] = []
        for name in sequence.prefix_names[1 : most + 1]:
            if name not in self._holders:
                break
            found.append(name)
        return found

    def _shared(self, sequence: SequenceState) -> int:
        """Return how many prefix blocks of a table are the cache's; of no cache, all that there could be."""
        if not self._cache:
            return len(sequence.prefix_names)
        return (len(sequence.blocks) - sequence.blocks.count(OWN)) // self._each

    def _share(self, sequence: SequenceState, place: int) -> None:
        """Put a prefix block that is here in the place of a sequence's own."""
        name, each = sequence.prefix_names[place + 1], self._each
        self._hold(name)
        self._own -= each
        sequence.blocks[place * each : (place + 1) * each] = [name] * each
        sequence.table_version += 1

    def _add(self, name: int, root: int) -> None:
        self._roots[name] = root
        self._holders[name] = 0
        self._idle[name] = None
        self._added[name] = None

    def _hold(self, name: int) -> None:
        if not self._holders[name]:
            del self._idle[name]
        self._holders[name] += 1

    def _let_go(self, name: int) -> None:
        assert self._holders[name] > 0, "a prefix block released twice"
        self._holders[name] -= 1
        if not self._holders[name]:
            self._idle[name] = None

    def _evict_beyond(self, blocks: int) -> None:
        """Evict blocks without a holder until the pool holds so many blocks."""
        while self._idle and self._own + len(self._holders) * self._each > blocks:
            self._evict(next(iter(self._idle)))

    def _evict(self, name: int) -> None:
        del self._idle[name]
        del self._roots[name]
        del self._holders[name]
        if name in self._added:
            del self._added[name]
        else:
            self._removed[name] = None


def _continue(sequence: SequenceState, whole: int) -> None:
    """Extend the chain over the whole blocks that the prompt's names do not reach."""
    chain = sequence.prefix_names
    for index in range(len(chain) - 1, whole):
        start = index * PREFIX_BLOCK_TOKENS
        block = array("I", sequence.tokens[start : start + PREFIX_BLOCK_TOKENS])
        chain.append(extend(chain[-1], block.tobytes()))


HEARTBEAT_S: Final = 1.0
COMMAND_S: Final = 0.0001  # delay of a command to an idle engine; commands within it are read together
LATE_S: Final = 1e-6  # a timer that fires later than this shows that its process was paused
MAX_WINDOW_STEPS: Final = 1024
MAX_INBOX: Final = 1 << 16  # unread commands of a hanging engine

SequenceCommand = wire.Submit | wire.Credit | wire.Park | wire.Cancel | wire.Resize | wire.Pace
UNUSED: Final = (wire.RunBatch, wire.LoadAdapter, wire.DropAdapter, wire.ReplaceWeights)
CallAt = Callable[[float, Callable[[], None]], TimerHandle]
OnMessage = Callable[[wire.Stepped | wire.EngineHeartbeat | wire.Resized], None]


@dataclass(frozen=True, slots=True)
class SimEngineSpec:
    """``kv_blocks`` 0: as many as the cost model's memory holds. ``coalesce_s`` 0: every step is an event."""

    cost: CostModel
    kv_blocks: int = 0
    block_size: int = 16
    token_budget: int = 2048
    max_sequences: int = 256
    max_model_len: int = 131_072
    max_long_prefills: int = MAX_LONG_PREFILLS
    itl_target_s: float = 0.05
    vocab_size: int = 32_000
    eos_id: int | None = None
    prefix_cache: bool = True
    coalesce_s: float = 0.1
    faults: VersionFaults = FRAGILE

    @property
    def blocks(self) -> int:
        return self.kv_blocks or self.cost.kv_blocks(self.block_size)

    @property
    def context_tokens(self) -> int:
        """The longest context of a sequence: never more than the pool can hold."""
        return min(self.max_model_len, self.blocks * self.block_size)

    @property
    def full_step_s(self) -> float:
        return self.cost.step_s(self.token_budget, 0, 0)


@dataclass(slots=True)
class _Window:
    """Steps that are planned and not yet recorded: the end time and the cost of each."""

    ends_s: list[float]
    steps_s: list[float]


@dataclass(frozen=True, slots=True)
class _Unreported:
    """A recorded window that is not reported yet: the end times of its steps, and their event."""

    ends_s: list[float]
    event: wire.Stepped


class _StepOfTime(StepPage):
    """A step is computed when it begins, and its members are announced until the time of its end."""

    def __init__(self, most: int) -> None:
        super().__init__(memoryview(bytearray(size_of(most))).cast("Q"), most)
        self._running = False

    def began(self, decodes: Sequence[Member], prefills: Sequence[Member] = ()) -> None:
        super().began(decodes, prefills)
        self._running = True

    def ended(self) -> None:
        """Ignored: the step ends at its time in ``over``."""

    def over(self) -> None:
        """Clear the step, if there is one."""
        if self._running:
            self._running = False
            super().ended()


class SimEngine:
    """Takes an agent's commands by ``send``; its callback receives each step, or window of steps, at its end.

    ``call_at`` sets a timer on ``clock``. ``observe`` is called with the end of each step of a ``Stepped``,
    before it is reported. Single-threaded, in the process that it belongs to.
    """

    def __init__(
        self,
        spec: SimEngineSpec,
        *,
        clock: Clock,
        call_at: CallAt,
        report: OnMessage,
        output_length: OutputLength | None = None,
        observe: Callable[[list[float], wire.Stepped], None] | None = None,
        ends: Callable[[Poison], None] | None = None,
    ) -> None:
        """``ends`` is called when a step ends the process, or hangs it for good."""
        self.spec = spec
        self._page = _StepOfTime(spec.max_sequences)
        self._ends = ends
        self.pool = SimKvPool(spec.blocks, spec.block_size, cache=spec.prefix_cache)
        self._clock = clock
        self._call_at = call_at
        self._report = report
        self._observe = observe
        vocabulary = SimVocabulary(spec.vocab_size, spec.eos_id)
        self._executor = executor = SimExecutor(spec.cost, vocabulary, spec.faults)
        self._intake = SimIntake(vocabulary, output_length)
        self._engine = Engine(
            Inline(executor),
            blocks=self.pool,
            limits=PlannerLimits(spec.token_budget, spec.max_sequences, spec.max_long_prefills),
            model=ModelLimits(spec.vocab_size, spec.context_tokens),
            eos_ids=frozenset() if spec.eos_id is None else frozenset({spec.eos_id}),
            clock=lambda: executor.elapsed_s,
            budget=self._budget(),
            reuse=self.pool,
            intake=self._intake,
            page=self._page,
        )
        self._planner = self._engine.planner
        self._inbox: list[SequenceCommand] = []
        self._at_s = 0.0  # begin of the step under way, or of the next
        self._busy = False
        self._event: wire.Stepped | None = None  # outcome of the step under way
        self._window: _Window | None = None
        self._unreported: _Unreported | None = None  # a window that is reported with the current step
        self._timer: TimerHandle | None = None
        self._skipped_steps = 0  # steps of windows, which the engine has not counted
        self._hung = False
        self.stuck: Poison | None = None  # who hangs it, in a step that never ends
        self._dead = False

    def start(self) -> None:
        """Beat from now on; the engine is loaded."""
        self._rest(self._clock.monotonic_s())

    # --- the agent's side -----------------------------------------------------------------------------

    def send(self, command: wire.Command) -> bool:
        """Take a command; False once the process is gone."""
        if self._dead or len(self._inbox) >= MAX_INBOX or isinstance(command, UNUSED):
            return False
        if isinstance(command, wire.Shutdown):
            self.crash()
            return True
        self._inbox.append(command)
        if self._hung:
            return True
        if not self._busy:
            self._busy = True
            self._set(self._clock.monotonic_s() + COMMAND_S, self._wake)
        elif self._window is not None and self._matters(command):
            self._cut(self._window)
        return True

    # --- faults -----------------------------------------------------------------------------------------

    def slow(self, factor: float) -> None:
        """Steps that begin from now on take ``factor`` times as long."""
        if self._window is not None and not self._hung:
            self._cut(self._window)
        self._executor.slow_factor = factor

    def hang(self) -> None:
        """Send and compute nothing until ``unhang``."""
        if not self._hung and not self._dead:
            self._hung = True
            self._stop_timer()
            # The window ends where it got to; the step under way ends when the engine continues.
            if self._window is not None:
                self._shorten(self._window)

    def unhang(self) -> None:
        """Go on where it stopped."""
        if not self._hung or self._dead or self.stuck is not None:
            return
        self._hung = False
        now_s = self._clock.monotonic_s()
        if not self._busy:
            self._busy = True
            self._set(now_s, self._wake)
        elif self._window is None and self._event is None:
            self._set(now_s, self._wake)
        else:
            self._set(max(now_s, self._at_s), self._end_step)

    def crash(self) -> None:
        """The process is gone, with all that it held. Idempotent."""
        self._dead = True
        self._stop_timer()
        self._window, self._event, self._unreported = None, None, None
        self._inbox.clear()

    @property
    def alive(self) -> bool:
        return not self._dead

    def kv_of(self, handles: Iterable[int], roots: Iterable[int]) -> int:
        """Return the blocks that these sequences hold, a shared one once, and these domains' idle ones."""
        live = self._intake.live
        return self.pool.held_by(live[one].blocks for one in handles if one in live) + self.pool.idle_of(
            roots
        )

    @property
    def members(self) -> tuple[int, ...]:
        """Handles of the step that runs, in the simulation's time."""
        return self._page.members()

    def check_integrity(self) -> None:
        """Raise AssertionError when blocks leaked or a sequence was lost."""
        if self.stuck is not None:
            return  # The engine stands in the middle of a step.
        self._engine.check_integrity()
        # Sequences that end with the step under way.
        ending = 0 if self._event is None else len(self._event.finished)
        live = self._planner.running + self._planner.waiting + ending
        assert len(self._intake.live) == live, "a sequence is kept"

    # --- steps ------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._next(self._clock.monotonic_s())

    def _next(self, now_s: float) -> None:
        """Begin a step, or a window of them, at ``now_s``; rest when there is nothing to do."""
        if self._inbox:
            self._apply()
        if (resized := self._engine.resized()) is not None:
            self._report(resized)
        if not self._engine.has_work:
            self._rest(now_s)
            return
        self._busy = True
        steps = self._steady_steps()
        if steps > 1:
            self._page.began(self._planner.decoding)
            self._window = self._window_of(now_s, steps)
            self._at_s = self._window.ends_s[-1]
        else:
            self._executor.elapsed_s = 0.0
            try:
                self._event = event = self._engine.step()
            except EngineEnds as end:
                self._end_by(end.poison)
                return
            self._at_s = now_s + event.step_s
        self._set(self._at_s, self._end_step)

    def _end_by(self, poison: Poison) -> None:
        """A member of the step that begins ends the process, or hangs it for good."""
        self._report_window()
        if poison.ending is EngineEnding.HANGS or self._ends is None:
            self._hung, self.stuck = True, poison
            self._stop_timer()
        if self._ends is not None:
            self._ends(poison)

    def _end_step(self) -> None:
        """Report what ended, and continue."""
        self._page.over()
        window, event, end_s = self._window, self._event, self._at_s
        self._window, self._event = None, None
        now_s = self._clock.monotonic_s()
        next_s = end_s if now_s - end_s <= LATE_S else now_s
        if window is not None:
            began_s = window.ends_s[0] - window.steps_s[0]
            self._unreported = _Unreported(window.ends_s, self._write_down(window))
            self._next(next_s)
            if self._event is None or self._at_s - began_s > self.spec.coalesce_s:
                self._report_window()
            return
        assert event is not None, "a step ended that had not begun"
        event = self._complete(event)
        self._report_window()
        self._report_step([end_s], event)
        if not self._dead and not self._hung:  # the agent may have answered
            self._next(next_s)

    def _report_window(self) -> None:
        unreported, self._unreported = self._unreported, None
        if unreported is not None:
            self._report_step(unreported.ends_s, unreported.event)

    def _report_step(self, ends_s: list[float], event: wire.Stepped) -> None:
        if self._observe is not None:
            self._observe(ends_s, event)
        self._report(event)

    def _rest(self, now_s: float) -> None:
        self._busy = False
        self._set(now_s + HEARTBEAT_S, self._beat)

    def _beat(self) -> None:
        beat = self._engine.heartbeat()
        self._report(msgspec.structs.replace(beat, step=beat.step + self._skipped_steps))
        if not self._busy and not self._dead and not self._hung:
            self._rest(self._clock.monotonic_s())

    def _apply(self) -> None:
        commands, self._inbox = self._inbox, []
        for command in commands:
            self._engine.apply(command)
            if isinstance(command, wire.Cancel):
                for handle in command.handles:
                    self._intake.forget(handle)

    def _complete(self, event: wire.Stepped) -> wire.Stepped:
        """Return a single step's event, with the data that the engine does not have."""
        for handle in event.finished:
            self._intake.forget(handle)
        if self._skipped_steps:
            event = msgspec.structs.replace(event, step=event.step + self._skipped_steps)
        return event

    # --- windows ----------------------------------------------------------------------------------------

    def _steady_steps(self) -> int:
        """Return how many of the next steps decode the same sequences and do nothing else, at least 1."""
        planner, most_s = self._planner, self.spec.coalesce_s
        if most_s <= 0.0 or not planner.only_decodes:
            return 1
        steps, attended = MAX_WINDOW_STEPS, 0
        for sequence in planner.decoding:
            tokens = sim_tokens(sequence)
            length = tokens.length
            attended += length
            if tokens.poison is not None:
                return 1
            left = tokens.end - length - 1
            if sequence.pause_at < tokens.prompt_tokens + sequence.limits.max_tokens:
                # The reader gives credit as it reads, so a late report must leave it time for that.
                left = min(left, (sequence.pause_at - length) // 2)
            else:
                left = min(left, sequence.pause_at - length - 1)
            if left < steps:
                if left < 2:
                    return 1
                steps = left
        steps = min(steps, int(most_s / self._executor.decode_s(len(planner.decoding), attended)))
        while steps > 1 and not planner.fits_ahead(steps):
            steps //= 2
        return max(1, steps)

    def _window_of(self, now_s: float, steps: int) -> _Window:
        decodes = len(self._planner.decoding)
        attended = sum(len(sequence.tokens) for sequence in self._planner.decoding)
        steps_s = [self._executor.decode_s(decodes, attended + decodes * step) for step in range(steps)]
        ends_s: list[float] = []
        for step_s in steps_s:
            now_s += step_s
            ends_s.append(now_s)
        return _Window(ends_s, steps_s)

    def _write_down(self, window: _Window) -> wire.Stepped:
        """Carry out a window's steps at once; return them as one event."""
        planner, steps = self._planner, len(window.ends_s)
        decoding = planner.decoding
        planner.grow_ahead(steps)
        handles = [sequence.handle for sequence in decoding]
        attended = sum(len(sequence.tokens) for sequence in decoding)
        device_us, settled = self._engine.skipped(Batch(list(decoding), []), window.steps_s)
        rows = []
        for sequence in decoding:
            tokens = sim_tokens(sequence)
            rows.append(tokens.take(steps))
            sequence.computed += steps
        for step_s in window.steps_s:
            planner.measured(0, step_s)
        self._skipped_steps += steps
        added, removed = self.pool.take_changes()
        return wire.Stepped(
            step=self._engine.heartbeat().step + self._skipped_steps,
            step_s=math.fsum(window.steps_s),
            handles=handles * steps,
            tokens=[token for step in zip(*rows, strict=True) for token in step],
            finished={},
            prefill_tokens=0,
            kv_blocks_used=self.pool.blocks_used,
            running=planner.running,
            waiting=planner.waiting,
            preemptions=planner.preemptions,
            attended_tokens=steps * attended + len(decoding) * (steps * (steps - 1) // 2),
            prefix_added=added,
            prefix_removed=removed,
            device_us=device_us,
            settled=settled,
        )

    def _matters(self, command: SequenceCommand) -> bool:
        """Whether a command changes what the steps of the window would do."""
        if isinstance(command, wire.Submit | wire.Park | wire.Resize):
            return True
        if isinstance(command, wire.Pace):
            return False  # a window prefills nothing
        live = self._intake.live
        if isinstance(command, wire.Cancel):
            return any(handle in live for handle in command.handles)
        waits = (Status.STALLED, Status.PARKED)
        return any(handle in live and live[handle].status in waits for handle in command.handles)

    def _cut(self, window: _Window) -> None:
        """End the window with the step that is under way."""
        if self._shorten(window):
            self._set(self._at_s, self._end_step)

    def _shorten(self, window: _Window) -> bool:
        kept = bisect_left(window.ends_s, self._clock.monotonic_s()) + 1
        if kept >= len(window.ends_s):
            return False
        del window.ends_s[kept:], window.steps_s[kept:]
        self._at_s = window.ends_s[-1]
        return True

    # --- timers -----------------------------------------------------------------------------------------

    def _set(self, when_s: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self._call_at(when_s, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _budget(self) -> PrefillBudget | None:
        spec = self.spec
        if not spec.itl_target_s:
            return None
        return PrefillBudget(spec.itl_target_s, most_tokens=spec.token_budget, full_step_s=spec.full_step_s)
