"""A worker's process in a fleet: the simulated worker, with its streams observed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from services.core.estimates.cost_model import slowed
from services.core.fleet import SequenceUsage
from services.core.generation import StartSpec
from services.core.usage import SequenceDeviceUse, UsageEvent
from services.ports.streams import WorkerStream
from services.worker.detokenizer import Detokenizer
from services.worker.streams.admission import FallbackAdmission
from services.worker.streams.charges import DeviceKind, DeviceTime, Key, Tally
from services.worker.streams.host import SequenceHost
from simulator.engine.cost_model import cost_model
from simulator.engine.sim_engine import SimEngineSpec
from simulator.engine.sim_worker import SimVersion, SimWorker, SimWorkerSpec
from simulator.fleet.clients.client import EOS_ID, output_length
from simulator.fleet.grant_watch import ComputedTokens, GrantWatch
from simulator.fleet.spec import MODEL, VERSION_DIGEST, VOCABULARY, FleetSpec, VersionSpec, WorkerSpec
from simulator.kernel.network import Network
from simulator.kernel.process import Process

Started = Callable[[StartSpec], None]


class WatchedHost:
    """Implements ``ports.worker_stream.WorkerStreams`` over a host; ``started`` is called inside of it."""

    def __init__(self, host: SequenceHost, started: Started) -> None:
        self._host = host
        self._started = started

    def open(self, wake: Callable[[], None]) -> WorkerStream:
        return _WatchedStream(self._host, wake, self._started)


class _WatchedStream:
    def __init__(self, host: SequenceHost, wake: Callable[[], None], started: Started) -> None:
        self._host = host
        self._stream = stream = host.open(wake)
        self._started = started
        self.start_row, self.refuse, self.credit = stream.start_row, stream.refuse, stream.credit
        self.cancel, self.take, self.close = stream.cancel, stream.take, stream.close

    def start(self, handle: int, spec: StartSpec) -> None:
        before = self._host.running
        self._stream.start(handle, spec)
        if self._host.running > before:
            self._started(spec)

    @property
    def only_accepted(self) -> bool:
        return self._stream.only_accepted


class WatchedTally(Tally):
    """The production tally of one worker; it also reports to the watch."""

    def __init__(self, worker_id: str, watch: GrantWatch) -> None:
        super().__init__()
        self._worker_id = worker_id
        self._watch = watch

    def add_prefill(self, key: Key, tokens: int, cached_tokens: int) -> None:
        super().add_prefill(key, tokens, cached_tokens)
        self._produced(key, ComputedTokens(tokens, cached_tokens))

    def add_output(self, key: Key, tokens: int) -> None:
        super().add_output(key, tokens)
        if tokens:
            self._produced(key, ComputedTokens(output=tokens))

    def add_rows(self, key: Key, rows: int, device_s: float) -> None:
        super().add_rows(key, rows, device_s)
        self._produced(key, ComputedTokens(rows=rows))

    def add_ended(self, usage: SequenceUsage) -> None:
        super().add_ended(usage)
        self._watch.report(lambda listener: listener.ended(self._worker_id, usage))

    def _produced(self, key: Key, work: ComputedTokens) -> None:
        self._watch.report(lambda listener: listener.produced(self._worker_id, key[0], key[2], work))


class WorkerNode:
    """One life of a worker. Built inside its process."""

    def __init__(self, spec: FleetSpec, process: Process, network: Network, watch: GrantWatch) -> None:
        self.process = process
        self.name = process.name
        self.born_s = process.clock.monotonic_s()
        number = int(process.name.rpartition("-")[2])
        self.kind = kind = spec.worker_kinds[number % len(spec.worker_kinds)]
        self.usage = SummedUsage()
        self.host = self.make_host()
        self.host.tally = WatchedTally(self.name, watch)
        self.worker = SimWorker(
            SimWorkerSpec(
                worker_id=process.name,
                address=process.name,
                versions=(
                    *(self._version(spec, kind, version) for version in spec.versions),
                    *spec.row_versions(number),
                ),
                zone=kind.zones[number % len(kind.zones)],
                device_type=kind.preset,
                lease_ttl_s=spec.lease_ttl_s,
                slow_reader_s=spec.slow_reader_s,
            ),
            process,
            network,
            vocabulary=_PlainText(),
            output_length=output_length,
            host=self.host,
            streams=WatchedHost(
                self.host, lambda start: watch.report(lambda one: one.started(self.name, start))
            ),
        )
        self.worker.engines.died = lambda poison: watch.report(
            lambda one: one.engine_ended(self.name, poison)
        )

    def make_host(self) -> SequenceHost:
        """Return the host of this life; a test overrides it with one that is broken."""
        clock = self.process.clock
        device = DeviceTime(DeviceKind(self.name), self.usage, clock)
        return SequenceHost(changed=_nobody, fallback=FallbackAdmission(clock), device=device)

    def start(self) -> None:
        """Begin the tasks of the process."""
        self.worker.start()

    async def drain(self, timeout_s: float) -> int:
        return await self.worker.drain(timeout_s)

    def slow(self, factor: float) -> None:
        """Every step takes ``factor`` times as long; 1.0 heals it. It has no effect on a dead process."""
        if self.process.alive:
            self.process.call_soon(self.worker.engines.slow, factor)

    @property
    def zone(self) -> str:
        return self.worker.spec.zone

    @property
    def serving(self) -> bool:
        """Its engine runs and it takes requests."""
        return self.process.running and not self.host.draining and self.host.takes(VERSION_DIGEST)

    @property
    def row_slots(self) -> int:
        """How many rows of the fixed-cost version may be in flight; 0 while it is not ready."""
        return sum(table.row_slots for table in self.host.row_tables() if table.ready)

    @property
    def running(self) -> int:
        """How many sequences have a slot of the batch."""
        return sum(table.slots.taken for table in self.host.tables())

    @property
    def parked(self) -> int:
        """How many are here without one."""
        return sum(table.slots.parked + table.slots.returning for table in self.host.tables())

    def held(self) -> dict[str, int]:
        """Return what sequences hold here, by a name of it."""
        found = {"sequences": self.host.running, "rows": sum(map(len, self.host.row_tables()))}
        for table in self.host.tables():
            found["reserved blocks"] = table.kv.blocks
            found["queued prefill tokens"] = table.prefills.queued_tokens
            found["unsettled sequences"] = table.charges.unsettled
        if self.host.device is not None:  # shares of steps are rounded to a microsecond
            uncharged_s = self.host.device.attributed_s - self.usage.device_s
            found["ms of uncharged steps"] = round(1e3 * uncharged_s)
        for engine in self.worker.engines.running():
            found["blocks in use"] = engine.pool.blocks_used
        return found

    def check_integrity(self) -> None:
        """Raise AssertionError when the worker's accounting is wrong."""
        self.worker.check_integrity()

    def _version(self, spec: FleetSpec, kind: WorkerSpec, version: VersionSpec) -> SimVersion:
        engine = SimEngineSpec(
            slowed(cost_model(kind.preset), version.step_ratio),
            kv_blocks=kind.kv_blocks,
            block_size=kind.block_size,
            token_budget=kind.step_tokens,
            max_sequences=kind.max_sequences,
            max_model_len=spec.max_context_tokens,
            vocab_size=VOCABULARY,
            eos_id=EOS_ID,
            coalesce_s=spec.coalesce_s,
            faults=version.faults,
        )
        return SimVersion(
            MODEL,
            MODEL,
            version.digest,
            engine,
            restart_s=spec.engine_restart_s,
            first_load_s=version.load_s,
            loads=version.loads,
        )


class SummedUsage:
    """Implements ``ports.usage.UsageOutbox``: adds up what sequences were charged on a worker."""

    def __init__(self) -> None:
        self.device_s = 0.0

    def add(self, event: UsageEvent) -> None:
        if isinstance(event, SequenceDeviceUse):
            self.device_s += event.device_s


class _PlainText:
    """Implements ``detokenizer.Vocabulary``: every token is one character."""

    def __init__(self) -> None:
        self.texts: Sequence[str | None] = _TEXTS

    def open(self, context: Sequence[int] = ()) -> Detokenizer:
        return _PlainDetokenizer()

    def alone(self, token: int) -> str:
        return _TEXTS[token]

    def part(self, token: int) -> bytes:
        return b""

    def cover(self, vocab_size: int) -> None: ...


class _PlainDetokenizer:
    clean = True

    def feed(self, token: int) -> str:
        return _TEXTS[token]

    def flush(self) -> str:
        return ""


_TEXTS: Final = ["x"] * VOCABULARY


def _nobody() -> None:
    """Placeholder callback until the reporter is constructed."""
