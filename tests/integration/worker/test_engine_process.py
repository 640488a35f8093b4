"""One engine process and its end, whoever dies first. Scripts play the engines that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from services.core.poison.suspicion import LossCause
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.worker import engine_protocol as wire
from services.worker.slots.engine_process import (
    ENGINE_MODULE,
    Crashed,
    EngineEvents,
    EngineExit,
    EngineProcess,
    EngineTimeouts,
    Stopped,
)
from tests.support.poisoned_engine import Fault, poison_ids
from tests.support.submits import make_submit
from tests.support.waiting import until

# A busy machine starts a process in seconds: only tests of a limit have a short one.
PATIENT = EngineTimeouts(load_s=120.0, load_silence_s=60.0, silence_s=60.0, shutdown_s=30.0)
SILENCE = replace(PATIENT, load_silence_s=4.0, silence_s=4.0)
SHORT_LOAD = replace(PATIENT, load_s=2.0)
SHORT_SHUTDOWN = replace(PATIENT, shutdown_s=1.0)


class ReceivedEvents:
    def __init__(self) -> None:
        self.events: list[str] = []
        self.tokens: list[int] = []
        self.exit: EngineExit | None = None
        self.exits = 0

    def events_of(self) -> EngineEvents:
        return EngineEvents(
            on_progress=lambda event: self.events.append(event.phase),
            on_ready=lambda event: self.events.append("ready"),
            on_stepped=self._stepped,
            on_heartbeat=lambda event: self.events.append("heartbeat"),
            on_resized=lambda event: self.events.append(f"resized {event.kv_blocks_total}"),
            on_weights=lambda event: self.events.append("replaced"),
            on_exit=self._exited,
        )

    def _stepped(self, event: wire.Stepped) -> None:
        self.tokens += event.tokens

    def _exited(self, exit_: EngineExit) -> None:
        self.exit = exit_
        self.exits += 1

    async def ready(self) -> None:
        async with asyncio.timeout(90):
            while "ready" not in self.events:
                assert self.exit is None, self.exit
                await asyncio.sleep(0.01)

    async def ended(self, timeout_s: float = 90.0) -> EngineExit:
        async with asyncio.timeout(timeout_s):
            while self.exit is None:
                await asyncio.sleep(0.01)
        assert self.exits == 1
        return self.exit


Start = Callable[..., Awaitable[tuple[EngineProcess, ReceivedEvents]]]


@pytest_asyncio.fixture
async def start(model_dir: Path) -> AsyncIterator[Start]:
    clock = SystemClock()
    supervisor = Supervisor(clock)
    engines: list[EngineProcess] = []

    async def begin(
        script: str | None = None,
        *,
        command: tuple[str, ...] = ENGINE_MODULE,
        null_step_s: float = 0.0,
        timeouts: EngineTimeouts = PATIENT,
    ) -> tuple[EngineProcess, ReceivedEvents]:
        received = ReceivedEvents()
        command = command if script is None else ("-c", SCRIPT + textwrap.dedent(script))
        config = wire.EngineConfig(
            socket_path="", model_dir=str(model_dir), executor="null", null_step_s=null_step_s
        )
        engine = EngineProcess(
            config,
            events=received.events_of(),
            clock=clock,
            supervisor=supervisor,
            timeouts=timeouts,
            command=command,
        )
        await engine.start()
        engines.append(engine)
        return engine, received

    yield begin
    for engine in engines:
        await engine.stop()
    await supervisor.close()
    assert supervisor.healthy, supervisor.failures
    assert not any(alive(engine.pid) for engine in engines)


SCRIPT = """
import json, os, signal, socket, subprocess, sys, time
from services.worker import engine_protocol as wire
from tests.support.submits import make_submit
config = json.loads(sys.argv[sys.argv.index("--config") + 1])
agent = socket.socket(socket.AF_UNIX)
agent.connect(config["socket_path"])
def say(message):
    agent.sendall(wire.encode(message))
READY = wire.Ready(100, 16, 1000, 512, 1, 0)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def submit(handle: int = 1, max_tokens: int = 5) -> wire.Submit:
    return make_submit(handle, [1, 2, 3], 1000, seed=1, max_tokens=max_tokens)


async def test_it_loads_steps_and_stops_when_told(start: Start) -> None:
    engine, received = await start()
    await received.ready()
    assert engine.send(submit())
    await until(lambda: len(received.tokens) >= 5)
    await until(lambda: "heartbeat" in received.events)
    await engine.stop()
    await engine.stop()
    assert await received.ended() == Stopped()
    assert not engine.send(submit(2))


async def test_it_says_what_size_its_pool_has_become(start: Start) -> None:
    engine, received = await start()
    await received.ready()
    for blocks in (300, 301):
        assert engine.send(wire.Resize(blocks))
        await until(partial(received.events.__contains__, f"resized {blocks}"))


async def test_what_does_not_fit_says_what_it_needs(start: Start) -> None:
    _, received = await start("say(wire.LoadFailed('does_not_fit', 'why', 5, 7, 9)); sys.exit(3)")
    assert await received.ended() == wire.LoadFailed("does_not_fit", "why", 5, 7, 9)


async def test_the_socket_is_private_and_does_not_outlive_the_engine(start: Start) -> None:
    engine, received = await start()
    await received.ready()
    arguments = Path(f"/proc/{engine.pid}/cmdline").read_bytes()
    path = Path(arguments.partition(b'"socket_path":"')[2].partition(b'"')[0].decode())
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(os.fsencode(path)) < 108
    assert os.getpgid(engine.pid) == engine.pid
    await engine.stop()
    assert not path.parent.exists()


async def test_a_load_that_is_refused_says_why(start: Start, model_dir: Path) -> None:
    (model_dir / "config.json").write_text('{"vocab_size": 0}')
    _, received = await start()
    exit_ = await received.ended()
    assert isinstance(exit_, wire.LoadFailed)
    assert "vocab_size" in exit_.message


WRONG = (
    ("say(READY); sys.exit(4)", "exit code 4", PATIENT),
    ("say(READY); os.kill(os.getpid(), signal.SIGSEGV)", "signal 11", PATIENT),
    ("say(READY); time.sleep(60)", "no message for", SILENCE),
    ("say(READY); os.kill(os.getpid(), signal.SIGSTOP)", "no message for", SILENCE),
    ("time.sleep(60)", "no message for", SILENCE),
    ("while True: say(wire.Progress('weights', 0.5)); time.sleep(0.2)", "loading took longer", SHORT_LOAD),
    ("say(READY); agent.close(); time.sleep(60)", "closed its connection", PATIENT),
    (r"agent.sendall(b'\xff\xff\xff\xff'); time.sleep(60)", "could not be handled", PATIENT),
    (r"agent.sendall(b'\0\0\0\1\xc1'); time.sleep(60)", "could not be handled", PATIENT),
)


async def test_every_way_to_go_wrong_is_a_crash_with_its_reason(start: Start) -> None:
    started = [(message, await start(script, timeouts=timeouts)) for script, message, timeouts in WRONG]
    for message, (engine, received) in started:
        exit_ = await received.ended()
        assert isinstance(exit_, Crashed)
        assert message in exit_.message
        assert not alive(engine.pid)


async def test_a_replacement_of_weights_may_be_silent_as_long_as_a_load(start: Start) -> None:
    script = "say(READY); agent.recv(1); time.sleep(5); say(wire.WeightsReplaced(5.0)); time.sleep(60)"
    engine, received = await start(script, timeouts=replace(PATIENT, silence_s=2.0))
    await received.ready()
    engine.send(wire.ReplaceWeights("/weights"))
    exit_ = await received.ended()
    assert "replaced" in received.events, exit_
    assert isinstance(exit_, Crashed)
    assert "no message for" in exit_.message, "the patience ends with the replacement"


async def test_an_exit_for_want_of_memory_is_named(start: Start) -> None:
    for script, lacked in (
        ("say(READY); os._exit(6)", True),
        ("say(READY); os._exit(4)", False),
        (
            "say(READY); os.kill(os.getpid(), 9)",
            False,
        ),  # the kernel killed none for memory
    ):
        _, received = await start(script)
        exit_ = await received.ended()
        assert isinstance(exit_, Crashed)
        assert exit_.out_of_memory is lacked


async def test_what_was_said_before_the_end_is_heard_before_it(start: Start) -> None:
    script = """
    agent.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    say(READY)
    for step in range(2000):
        say(wire.Stepped(step, 0.0, [1] * 200, [step] * 200, {}, 0, 0, 1, 0))
    os._exit(1)
    """
    _, received = await start(script)
    await received.ready()
    time.sleep(0.3)  # the agent falls behind while the socket fills
    await received.ended()
    assert len(received.tokens) == 2000 * 200


async def test_an_engine_that_does_not_read_is_killed_before_the_agent_fills_up(start: Start) -> None:
    script = """
    say(READY)
    while True:
        time.sleep(0.3)
        say(wire.EngineHeartbeat(0, 0, 0, 0))
    """
    engine, received = await start(script)
    await received.ready()
    large = make_submit(1, list(range(1_000_000, 3_000_000)), 1, seed=1)
    sent = 0
    while engine.send(large) and sent < 100:
        sent += 1
        await asyncio.sleep(0)
    assert 10 < sent < 30, "128 MiB of commands"
    exit_ = await received.ended()
    assert isinstance(exit_, Crashed)
    assert "does not read" in exit_.message


async def test_children_of_the_engine_end_with_it(start: Start, tmp_path: Path) -> None:
    note = tmp_path / "child"
    script = f"""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open({str(note)!r}, "w").write(str(child.pid))
    say(READY)
    os._exit(1)
    """
    _, received = await start(script)
    await received.ended()
    child = int(note.read_text())
    await until(lambda: not alive(child))


async def test_an_engine_that_ignores_shutdown_is_killed(start: Start) -> None:
    script = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(READY)
    while True:
        time.sleep(0.2)
        say(wire.EngineHeartbeat(0, 0, 0, 0))
    """
    engine, received = await start(script, timeouts=SHORT_SHUTDOWN)
    await received.ready()
    started_s = time.monotonic()
    await engine.stop()
    assert 0.9 < time.monotonic() - started_s < 20.0
    assert await received.ended() == Stopped()


POISONED = ("-m", "tests.support.poisoned_engine")


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Fault.RAISES, LossCause.FAULT),
        (Fault.SEGFAULTS, LossCause.FAULT),
        (Fault.ABORTS, LossCause.FAULT),
        (Fault.KILLED, LossCause.OUTSIDE),
    ],
)
async def test_a_step_that_ends_the_engine_names_its_members(
    start: Start, fault: Fault, cause: LossCause
) -> None:
    """Those that wait for credit take no part."""
    engine, received = await start(command=POISONED)
    await received.ready()
    engine.send(make_submit(1, [1, 2, 3], 2, seed=1, max_tokens=500))
    engine.send(make_submit(2, [1, 2, 3], 400, seed=1, max_tokens=400))
    await until(lambda: len(received.tokens) > 10)
    engine.send(make_submit(3, [*poison_ids(fault, 1), 5], 10, seed=1, max_tokens=5))
    exit_ = await received.ended()
    assert isinstance(exit_, Crashed)
    assert exit_.cause is cause
    assert set(exit_.members) in ({3}, {2, 3})


async def test_a_suspect_that_ends_the_engine_is_alone_in_its_step(start: Start) -> None:
    engine, received = await start(command=POISONED, null_step_s=0.01)
    await received.ready()
    engine.send(make_submit(1, [1, 2, 3], 400, seed=1, max_tokens=400))
    await until(lambda: len(received.tokens) > 3)
    engine.send(make_submit(2, [1, 2], 400, seed=1, max_tokens=400))
    suspect = make_submit(3, [*poison_ids(Fault.RAISES, 1), 5], 10, seed=1, max_tokens=5)
    engine.send(msgspec.structs.replace(suspect, apart_tokens=2))
    exit_ = await received.ended()
    assert isinstance(exit_, Crashed)
    assert (exit_.cause, exit_.members) == (LossCause.FAULT, (3,))


async def test_an_engine_that_is_killed_while_idle_names_nobody(start: Start) -> None:
    engine, received = await start()
    await received.ready()
    engine.send(submit())
    await until(lambda: len(received.tokens) == 5)
    os.kill(engine.pid, signal.SIGKILL)
    exit_ = await received.ended()
    assert isinstance(exit_, Crashed)
    assert (exit_.cause, exit_.members) == (LossCause.OUTSIDE, ())


async def test_an_engine_that_hangs_in_a_step_names_its_members_and_one_that_is_stopped_nobody(
    start: Start,
) -> None:
    engine, received = await start(command=POISONED, timeouts=replace(PATIENT, silence_s=4.0))
    await received.ready()
    engine.send(make_submit(3, [*poison_ids(Fault.HANGS, 1), 5], 10, seed=1, max_tokens=5))
    await until(lambda: engine.members == (3,))
    os.kill(engine.pid, signal.SIGSTOP)
    await until(lambda: engine.members == ())
    exit_ = await received.ended()
    assert isinstance(exit_, Crashed)
    assert (exit_.cause, exit_.members) == (LossCause.OUTSIDE, (3,))


AGENT = """
import asyncio, sys
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.worker import engine_protocol as wire
from tests.support.submits import make_submit
from services.worker.slots.engine_process import EngineEvents, EngineProcess
async def main():
    clock = SystemClock()
    ready = asyncio.Event()
    events = EngineEvents(on_ready=lambda event: ready.set(), on_exit=lambda event: None)
    config = wire.EngineConfig(socket_path="", model_dir=sys.argv[1], executor="null", null_step_s=0.01)
    engine = EngineProcess(config, events=events, clock=clock, supervisor=Supervisor(clock))
    await engine.start()
    await ready.wait()
    engine.send(make_submit(1, [1], 100000, seed=1, max_tokens=10000))
    print("ready", engine.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_no_engine_outlives_its_agent(model_dir: Path) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(model_dir)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert agent.stdout is not None
    pid = 0
    try:
        line = next(line for line in agent.stdout if line.startswith("ready "))
        pid = int(line.split()[1])
        assert alive(pid)
        agent.send_signal(signal.SIGKILL)
        agent.wait(timeout=30)
        deadline_s = time.monotonic() + 30
        while alive(pid) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not alive(pid)
    finally:
        agent.kill()
        agent.wait(timeout=5)
        agent.stdout.close()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
