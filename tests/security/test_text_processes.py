"""Prompts, tokenizers and chat templates that take too long or too much, or crash what reads them.

Beside each attack the event loop is watched, and another tenant's short prompts go on.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from services.core.errors import (
    ConstraintRefused,
    FailedPrecondition,
    FairwayError,
    InvalidInput,
    PromptTooLong,
    ShareExceeded,
    Unavailable,
    UnsupportedFeature,
    VersionFailing,
)
from services.core.generation import Constraint, ConstraintKind
from services.gateway.text import child, pool
from services.gateway.text.child import TextLimits
from services.gateway.text.pool import TextProcesses
from services.gateway.text.text_model import ChatMessage, Conversation, TextModel
from services.gateway.text.tokenise import Tokeniser
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.metrics import Metrics
from tests.support.text_versions import CHAT, Bench, doubling, splitting, watched_loop, write_version

T = TypeVar("T")
# The time that this process spent while its loop ran nothing else: of its own, so that a machine that has no
# time to give changes nothing. A process that reads a text itself spends 2 s and more in each test here.
WORST_GAP_S = 0.2
# Short prompts that are read while an attack lasts: fifty and more, none if they wait for its end.
FEWEST = 3
QUICK = TextLimits(read_cpu_s=0.5, load_cpu_s=10.0, memory_bytes=512 * 2**20)
LONG = "def f(a, b): return a+b\n" * 108_000  # 2.6 MB

BOMBS = {
    "sum": "{{ ([[0] * 300] * 30000) | sum(start=[]) | length }}",
    "sort": "{{ (['x' * 99999] * 99999) | sort | length }}",
    "max": "{{ ([[0] * 99999] * 99999) | max | length }}",
    "map": "{{ ([[0] * 99999] * 99999) | map('sum') | list | length }}",
    "equal": "{{ [[0] * 99999] * 99999 == [[0] * 99999] * 99999 }}",
    "count": "{{ ([[0] * 99999] * 99999).count([0] * 99999) }}",
    "round": "{{ 1.5 | round(99999999, 'ceil') }}",
}


@asynccontextmanager
async def opened(folder: Path, limits: TextLimits = QUICK) -> AsyncIterator[Bench]:
    clock = SystemClock()
    supervisor = Supervisor(clock)
    processes = TextProcesses(clock, supervisor, Metrics(), limits)
    supervisor.spawn("text processes", processes.run())
    try:
        yield Bench(processes, Tokeniser(processes), folder)
        processes.check_integrity()
        assert supervisor.healthy, supervisor.failures
    finally:
        await supervisor.close()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with opened(tmp_path) as found:
        yield found


async def attacked(bench: Bench, honest: TextModel, attack: Awaitable[Any]) -> tuple[Any, float, int]:
    """Return what became of the attack, the loop's worst gap and how many short prompts were read."""
    beside = 0
    running = asyncio.ensure_future(attack)
    async with watched_loop() as gaps:
        number = 0
        while not running.done() or number < 3:
            assert await bench.tokeniser.prompt(honest, "canary", f"once upon a time {number}")
            beside += not running.done()
            number += 1
            await asyncio.sleep(0.01)
    error = running.exception()
    return (running.result() if error is None else error), gaps.worst_s, beside


async def test_six_long_prompts_hold_nobody_up(bench: Bench) -> None:
    model = await bench.version("tiny", context=100_000)
    texts = [LONG[:600_000] + str(number) for number in range(6)]
    attack = asyncio.gather(
        *(bench.tokeniser.prompt(model, "acme", text) for text in texts), return_exceptions=True
    )
    found, gap_s, beside = await attacked(bench, model, attack)
    assert all(isinstance(error, PromptTooLong) for error in found)
    assert {error.metadata["prompt_tokens"] for error in found} == {"300002"}
    assert gap_s < WORST_GAP_S
    assert beside >= FEWEST


async def test_a_tenant_has_one_long_text_read_at_a_time(bench: Bench) -> None:
    model = await bench.version("tiny", context=2_000_000)
    (version,) = bench.processes._versions.values()
    reading = [
        asyncio.ensure_future(bench.tokeniser.prompt(model, tenant, LONG[: 600_000 + number]))
        for tenant, number in (("acme", 0), ("acme", 1), ("acme", 2), ("acme", 3), ("rival", 4), ("other", 5))
    ]
    most = 0
    while not all(one.done() for one in reading[:4]):
        busy = sum(process.nice and process.ready and not process.idle for process in version.processes)
        most = max(most, busy)
        if reading[4].done() and reading[5].done():
            assert busy <= 1
        await asyncio.sleep(0.002)
    assert await reading[4]
    assert await reading[5]
    assert most <= pool.MAX_LONG


async def test_a_tenant_has_one_short_text_of_a_version_read_at_a_time(tmp_path: Path) -> None:
    """However many wait, and however many processes there are; another tenant's is read beside it."""
    async with opened(tmp_path, TextLimits(read_cpu_s=10.0, memory_bytes=2**30)) as bench:
        model = await bench.version("slow", context=2_000_000, change=doubling(14))
        (version,) = bench.processes._versions.values()
        long = bench.tokeniser.prompt(model, "starter", "b" * (pool.SHORT_BYTES + 1))
        assert await long  # it has started a second process
        assert sum(process.idle for process in version.processes) == 2
        storm = [asyncio.ensure_future(bench.tokeniser.prompt(model, "acme", f"a{n}")) for n in range(6)]
        await asyncio.sleep(0)
        assert sum(not process.idle for process in version.processes) == 1
        assert await bench.tokeniser.prompt(model, "rival", "bcd")
        assert sum(one.done() for one in storm) < len(storm), "the storm is over before it was looked at"
        while not all(one.done() for one in storm):
            assert sum(not process.idle for process in version.processes) <= 1
            await asyncio.sleep(0.001)
        assert len(version.processes) == 2, "what one tenant has waiting starts no process"


async def test_an_accepted_prompt_of_megabytes_holds_nobody_up(tmp_path: Path) -> None:
    async with opened(tmp_path, TextLimits()) as bench:
        model = await bench.version("tiny", context=2_000_000)
        found, gap_s, beside = await attacked(bench, model, bench.tokeniser.prompt(model, "acme", LONG))
        assert len(found) == 1_296_001
        assert gap_s < WORST_GAP_S
    assert beside >= FEWEST


async def test_a_normaliser_that_doubles_ends_its_request_only(bench: Bench) -> None:
    honest = await bench.version("honest")
    hostile = await bench.version("hostile", change=doubling(24))
    found, gap_s, beside = await attacked(bench, honest, bench.tokeniser.prompt(hostile, "acme", "aaaaa"))
    assert isinstance(found, InvalidInput)
    assert "shorten it or send token ids" in found.message
    assert found.metadata["cause"] == "cpu"
    assert gap_s < WORST_GAP_S
    assert beside >= FEWEST
    assert await bench.tokeniser.prompt(hostile, "acme", "bcd")


async def test_memory_is_bounded_in_the_process_and_kept_out_of_this_one(tmp_path: Path) -> None:
    limits = TextLimits(read_cpu_s=60.0, memory_bytes=64 * 2**20)
    async with opened(tmp_path, limits) as bench:
        hostile = await bench.version("hostile", change=doubling(24))
        before = psutil.Process().memory_info().rss
        with pytest.raises(InvalidInput, match="more than 64 MiB of memory"):
            await bench.tokeniser.prompt(hostile, "acme", "aaaaa")
        assert psutil.Process().memory_info().rss - before < 16 * 2**20


async def test_a_panic_of_the_tokenizer_ends_its_request_only(bench: Bench) -> None:
    honest = await bench.version("honest")
    hostile = await bench.version("hostile", change=splitting("(a+)+$"))
    found, gap_s, _ = await attacked(bench, honest, bench.tokeniser.prompt(hostile, "acme", "a" * 40 + "!"))
    assert type(found) is FailedPrecondition
    assert gap_s < WORST_GAP_S
    assert await bench.tokeniser.prompt(hostile, "acme", "no such letter")


@pytest.mark.parametrize("name", BOMBS)
async def test_a_template_bomb_ends_its_request_only(bench: Bench, name: str) -> None:
    honest = await bench.version("honest")
    # At "x" alone: what is tried when a version is loaded ends well.
    template = "{% if messages[0].content == 'x' %}" + BOMBS[name] + "{% endif %}"
    hostile = await bench.version("hostile", template=template)
    found, gap_s, beside = await attacked(
        bench, honest, bench.tokeniser.chat(hostile, "acme", Conversation([ChatMessage("user", "x")]))
    )
    assert isinstance(found, InvalidInput), found
    assert gap_s < WORST_GAP_S
    assert beside >= FEWEST


async def test_a_template_that_cannot_be_compiled_leaves_prompts(bench: Bench) -> None:
    model = await bench.version("hostile", template="{{ " + "(" * 60_000)
    assert model.template_fault
    with pytest.raises(FailedPrecondition, match="takes prompts only"):
        await bench.tokeniser.chat(model, "acme", Conversation([ChatMessage("user", "x")]))
    assert await bench.tokeniser.prompt(model, "acme", "a b")


@pytest.mark.parametrize(
    "limits",
    [TextLimits(load_cpu_s=0.002), TextLimits(memory_bytes=16 * 2**20)],
    ids=["time", "memory"],
)
async def test_files_that_explode_while_they_are_loaded_are_refused(
    tmp_path: Path, limits: TextLimits
) -> None:
    # It takes many ticks of the clock by which the system counts processor time.
    folder = write_version(tmp_path / "x", template=CHAT + "{% if x %}y{% endif %}" * 4000)
    async with opened(tmp_path, limits) as bench:
        with pytest.raises(FailedPrecondition):
            await bench.processes.load("sha256:x", lambda: nullcontext(folder))
        shutil.rmtree(folder)
        # A failed version is not loaded again with each request.
        with pytest.raises(FailedPrecondition) as caught:
            await bench.processes.load("sha256:x", lambda: nullcontext(folder))
        assert "has no config.json" not in caught.value.message
        assert not psutil.wait_procs(text_processes(), timeout=5)[1]


async def test_a_process_that_is_killed_costs_no_request(bench: Bench) -> None:
    model = await bench.version("tiny")
    expected = await bench.tokeniser.prompt(model, "acme", LONG[: 2**18])
    reading = asyncio.ensure_future(bench.tokeniser.prompt(model, "rival", LONG[: 2**18]))
    await asyncio.sleep(0.02)
    for process in text_processes():
        process.kill()
    assert await asyncio.wait_for(reading, 20) == expected


FAULTING = """
import os, signal, sys
from services.gateway.text import process
answer = process._answer
def faulting(encoder, order):
    if getattr(order, "text", "") == "fault":
        os.kill(os.getpid(), signal.SIGSEGV)
    return answer(encoder, order)
process._answer = faulting
process.main(sys.argv[1:])
"""


async def test_a_text_that_faults_again_in_another_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "TEXT_MODULE", ("-P", "-c", FAULTING))
    async with opened(tmp_path, TextLimits()) as bench:
        model = await bench.version("tiny")
        with pytest.raises(FailedPrecondition, match="fails on this text"):
            await bench.tokeniser.prompt(model, "acme", "fault")
        assert await bench.tokeniser.prompt(model, "rival", "a b")


async def test_files_on_which_a_library_faults_are_refused(bench: Bench, tmp_path: Path) -> None:
    folder = write_version(tmp_path / "x")
    loading = asyncio.ensure_future(bench.processes.load("sha256:x", lambda: nullcontext(folder)))
    with pytest.raises(FailedPrecondition, match="cannot be loaded: the library fails on it"):
        await asyncio.wait_for(faulting(loading), 20)


async def faulting(call: asyncio.Future[T]) -> T:
    """Return what a call does, of which every process ends on a memory fault."""
    while not call.done():
        for process in text_processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSEGV)
        await asyncio.sleep(0.01)
    return await call


async def test_a_process_that_hangs_is_replaced(tmp_path: Path) -> None:
    async with opened(tmp_path, TextLimits(read_cpu_s=0.5, patience_s=2.0)) as bench:
        model = await bench.version("tiny")
        (stopped,) = text_processes()
        stopped.suspend()
        reading = asyncio.ensure_future(bench.tokeniser.prompt(model, "acme", "held up"))
        await asyncio.sleep(0.02)
        assert await bench.tokeniser.prompt(model, "rival", "goes on")
        assert not reading.done(), "one tenant's text held up another's"
        with pytest.raises(Unavailable):
            await reading
        assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE
        assert await bench.tokeniser.prompt(model, "acme", "again")


async def test_a_tenant_that_ends_processes_again_and_again_is_suspended_alone(tmp_path: Path) -> None:
    async with opened(tmp_path, TextLimits(read_cpu_s=0.1)) as bench:
        hostile = await bench.version("hostile", change=doubling(24))
        honest = await bench.version("honest")
        outcomes = []
        for number in range(5):
            with pytest.raises(FairwayError) as caught:
                await bench.tokeniser.prompt(hostile, "acme", f"aaaaa{number}")
            outcomes.append(type(caught.value))
        assert outcomes == [InvalidInput] * 3 + [VersionFailing] * 2
        assert await bench.tokeniser.prompt(hostile, "rival", "bcd")
        assert await bench.tokeniser.prompt(honest, "acme", "aaaaa")


async def test_what_waits_is_bounded_by_tenant(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_PENDING", 8)
    model = await bench.version("tiny")
    prompts = [asyncio.ensure_future(bench.tokeniser.prompt(model, "acme", f"text {n}")) for n in range(6)]
    await asyncio.sleep(0)
    assert await bench.tokeniser.prompt(model, "rival", "mine")
    found = await asyncio.gather(*prompts, return_exceptions=True)
    assert [isinstance(one, ShareExceeded) for one in found] == [False] * 4 + [True] * 2
    assert "4 texts of this tenant wait" in str(found[5])
    assert "the maximum is 4; wait until some are tokenised" in str(found[5])


async def test_cancelled_texts_are_given_up(bench: Bench) -> None:
    model = await bench.version("tiny")
    storm = [asyncio.ensure_future(bench.tokeniser.prompt(model, "acme", LONG + str(n))) for n in range(20)]
    await asyncio.sleep(0.1)
    for one in storm:
        one.cancel()
    await asyncio.gather(*storm, return_exceptions=True)
    assert await asyncio.wait_for(bench.tokeniser.prompt(model, "acme", "next"), 20)
    assert not bench.processes._pending


def hostile_schemas() -> dict[str, Constraint]:
    """Schemas that are refused at the latest when they have taken their processor time."""
    branching: dict[str, Any] = {"type": "integer"}
    for _ in range(14):
        branching = {"anyOf": [branching, {"type": "array", "items": branching}]}
    fields = {f"p{number}": {"anyOf": [{"type": "integer"}] * 4} for number in range(900)}
    schemas: dict[str, Any] = {
        "itself": {"$ref": "#"},
        "ring": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "remote": {"$ref": "https://example.com/schema.json"},
        "file": {"$ref": "file:///etc/passwd"},
        "branching": branching,
        "product": {
            "allOf": [
                {"anyOf": [{"required": [f"p{number}"]}, {"required": [f"q{number}"]}]}
                for number in range(16)
            ]
        },
        "fields": {"type": "object", "properties": fields},
        "expression": {"type": "string", "pattern": "((a{1,500}b?){1,500}c?){1,500}(?=d)"},
    }
    found = {
        name: Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)) for name, schema in schemas.items()
    }
    found["nested"] = Constraint(ConstraintKind.JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000)
    found["long"] = Constraint(ConstraintKind.JSON_SCHEMA, " " * 100_000 + "{}")
    found["parentheses"] = Constraint(ConstraintKind.REGEX, "(" * 20_000 + ")" * 20_000)
    found["rules"] = Constraint(ConstraintKind.GRAMMAR, "start: " + "(" * 20_000 + '"a"' + ")" * 20_000)
    found["loop"] = Constraint(ConstraintKind.GRAMMAR, "start: start")
    return found


async def test_hostile_constraints_are_refused_beside_the_prompts_of_others(bench: Bench) -> None:
    model = await bench.version("tiny")

    async def attack() -> dict[str, FairwayError]:
        refused: dict[str, FairwayError] = {}
        for number, (name, constraint) in enumerate(hostile_schemas().items()):
            with pytest.raises(FairwayError) as caught:  # each of another tenant: none is suspended
                await bench.tokeniser.check_constraint(model, f"tenant{number}", constraint)
            refused[name] = caught.value
        return refused

    refused, gap_s, beside = await attacked(bench, model, attack())
    assert isinstance(refused, dict), refused
    assert {type(error) for error in refused.values()} == {ConstraintRefused}
    assert all(error.metadata["field"].startswith("sampling.constraint") for error in refused.values())
    assert "example.com" in refused["remote"].message
    assert gap_s < WORST_GAP_S
    assert beside >= FEWEST
    await bench.tokeniser.check_constraint(model, "acme", Constraint(ConstraintKind.REGEX, "a+"))


async def test_a_constraint_is_compiled_once_per_tenant(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = await bench.version("tiny")
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, '{"oneOf":[{"const":1},{"const":2}]}')
    exact = await bench.tokeniser.check_constraint(model, "acme", constraint)
    assert exact.exact
    assert "oneOf" not in exact.source
    bench.processes.unload(model.version_digest)
    assert await bench.tokeniser.check_constraint(model, "acme", constraint) == exact
    with pytest.raises(Unavailable):
        await bench.tokeniser.check_constraint(model, "rival", constraint)


async def test_a_tokenizer_that_cannot_be_constrained_is_refused_by_name(bench: Bench) -> None:
    def change(state: dict[str, Any]) -> None:
        state["decoder"] = None
        state["pre_tokenizer"] = {"type": "Whitespace"}

    model = await bench.version("words", change=change)
    with pytest.raises(UnsupportedFeature, match="tokenizer") as caught:
        await bench.tokeniser.check_constraint(model, "acme", Constraint(ConstraintKind.REGEX, "a+"))
    assert caught.value.metadata["field"] == "sampling.constraint"


def test_processes_end_with_the_gateway(tmp_path: Path) -> None:
    folder = write_version(tmp_path / "tiny")
    program = f"""
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.support.text_versions import nullcontext
from tests.security.test_text_processes import opened
async def main():
    async with opened(Path({str(tmp_path)!r})) as bench:
        await bench.processes.load("sha256:x", lambda: nullcontext(Path({str(folder)!r})))
        print("ready", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == b"ready\n"
            (child,) = psutil.Process(parent.pid).children()
        finally:
            parent.kill()
    assert not psutil.wait_procs([child], timeout=5)[1]


def test_a_gateway_itself_loads_neither_tokenizers_nor_templates() -> None:
    program = "import sys, json, services.app.roles.gateway; print(json.dumps(sorted(sys.modules)))"
    found = json.loads(subprocess.check_output([sys.executable, "-c", program]))
    assert not {"tokenizers", "jinja2", "llguidance"} & set(found)


def text_processes() -> list[psutil.Process]:
    """The text processes of this one that run."""
    found = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):  # it has just ended
            if "services.gateway.text.process" in process.cmdline():
                found.append(process)
    return found
