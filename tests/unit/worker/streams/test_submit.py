"""The engine is told what was asked for, in its own terms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from services.core.generation import GenerationSpec, Grant, OutputLimits, Prompt, Sampling, StartSpec
from services.core.records import Priority
from services.worker import engine_protocol as wire
from services.worker.streams.sequences import submit_command

LIMITS = OutputLimits(64)


def started(limits: OutputLimits = LIMITS, logprobs: int | None = None, **generation: Any) -> Any:
    spec = StartSpec(
        generation=GenerationSpec(
            request_id="req_1",
            model="m",
            version_digest="sha256:x",
            route_revision=1,
            prompt=Prompt([5, 6], (8,), 3),
            sampling=Sampling(9, temperature=0.5, logprobs=logprobs),
            limits=limits,
            **generation,
        ),
        choice=2,
        tenant_id="acme",
        grant=Grant("w", "h:1", 1, 1, 1, 4, 1.0, "sha256:x"),
        initial_credit_tokens=8,
        produced_ids=(7,),
    )
    return SimpleNamespace(spec=spec, number=41, credit_limit=9)


def test_the_higher_class_is_first_in_the_engine() -> None:
    order = [Priority.INTERACTIVE, Priority.STANDARD, Priority.BATCH]
    numbers = [submit_command(started(priority=priority)).priority for priority in order]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 3


def test_every_part_arrives() -> None:
    command = submit_command(started(OutputLimits(64, 4, ("x",), (1, 2), True), logprobs=3))
    assert (command.handle, [*command.prompt.ids], [*command.produced_ids]) == (41, [5, 6], [7])
    assert command.credit_limit == 9
    sampling, limits = command.sampling, command.limits
    assert (sampling.seed, command.choice, sampling.temperature, sampling.logprobs) == (9, 2, 0.5, 3)
    assert (limits.max_tokens, limits.min_tokens) == (64, 4)
    assert (limits.stop_token_ids, limits.ignore_eos) == ((1, 2), True)
    assert (command.prompt.prefix_hashes, command.prompt.prefix_root) == ((8,), 3)


def test_any_sequence_of_ids_reaches_the_engine() -> None:
    for ids in ([5, 6, 7], (5, 6, 7), range(5, 8)):
        sent = wire.Submit(1, Prompt(ids), Sampling(seed=1), OutputLimits(4), 9, produced_ids=ids)
        body = wire.encode(sent)[wire.LENGTH_PREFIX.size :]
        received = wire.decode_command(body)
        assert isinstance(received, wire.Submit)
        assert (received.prompt.ids, received.produced_ids) == ([5, 6, 7], [5, 6, 7])
