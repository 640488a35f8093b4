"""The engine is told what was asked for, in its own terms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from services.core.generation import GenerationSpec, Grant, SamplingParams, StartSpec
from services.core.records import Priority
from services.worker import engine_protocol as wire
from services.worker.streams.submit import submit_command


def started(**generation: Any) -> Any:
    spec = StartSpec(
        generation=GenerationSpec(
            "req_1", "m", "sha256:x", 1, [5, 6], SamplingParams(9, temperature=0.5), 64, **generation
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
    command = submit_command(started(logprobs=3, min_output_tokens=4, stop_token_ids=(1, 2), ignore_eos=True))
    assert (command.handle, [*command.prompt_ids], [*command.produced_ids]) == (41, [5, 6], [7])
    assert command.credit_limit == 9
    sampling = command.sampling
    assert (sampling.seed, sampling.choice, sampling.temperature) == (9, 2, 0.5)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.logprobs) == (64, 4, 3)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((1, 2), True)


def test_any_sequence_of_ids_reaches_the_engine() -> None:
    for ids in ([5, 6, 7], (5, 6, 7), range(5, 8)):
        sent = wire.Submit(1, ids, wire.Sampling(seed=1), 9, produced_ids=ids)
        body = wire.encode(sent)[wire.LENGTH_PREFIX.size :]
        received = wire.decode_command(body)
        assert isinstance(received, wire.Submit)
        assert (received.prompt_ids, received.produced_ids) == ([5, 6, 7], [5, 6, 7])
