"""What a worker relies on of an engine process, whatever computes its tokens."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
from typing import Any

import numpy as np
import pytest

from services.core.generation import Constraint, ConstraintKind
from services.core.prefix import PREFIX_BLOCK_TOKENS, prefix_chain
from services.worker.engine.process import EngineExitCode
from services.worker.engine_protocol import Cancel, Credit, EngineHeartbeat, Park, Resize, Resized, Shutdown
from tests.contract.engine.conftest import Engine, StartEngine
from tests.support.poisoned_engine import Fault, poison_ids

DRAWN = random.Random(4)
PROMPTS = [[DRAWN.randrange(10, 4000) for _ in range(size)] for size in (5, 31, 64, 100, 140, 33)]
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]})
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"seed": 11},
    "filtered": {"seed": 5, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
    "penalties": {
        "seed": 3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.3,
        "logit_bias": {77: 2.0},
    },
    "min_tokens": {"seed": 9, "min_tokens": 6, "ignore_eos": False},
    "json": {"seed": 2, "constraint": Constraint(ConstraintKind.JSON_SCHEMA, SCHEMA), "ignore_eos": False},
}


def test_it_is_ready_with_what_it_promises(engine: Engine, executor: str) -> None:
    ready = engine.ready
    assert ready.vocab_size == 4096
    assert ready.max_model_len == 512
    assert PREFIX_BLOCK_TOKENS % ready.block_size == 0
    assert "exact" in ready.capabilities
    assert ("resize" in ready.capabilities) == (executor != "vllm")
    assert "adapters" in ready.capabilities


def test_steps_are_numbered_and_each_sequence_is_settled_once(engine: Engine) -> None:
    first = len(engine.steps)
    handles = [engine.submit(prompt, 5 + place) for place, prompt in enumerate(PROMPTS)]
    outputs = engine.run(*handles)
    engine.until(lambda: set(handles) <= {one for step in engine.steps[first:] for one in step.settled})
    steps = engine.steps[first:]
    assert [len(output.tokens) for output in outputs] == [5, 6, 7, 8, 9, 10]
    assert {output.finish for output in outputs} == {"length"}
    assert [step.step for step in steps] == list(range(steps[0].step, steps[0].step + len(steps)))
    assert sorted(one for step in steps for one in step.settled) == handles
    assert sum(step.prefill_tokens for step in steps) == sum(map(len, PROMPTS))
    assert all(step.prefill_tokens + len(step.handles) <= 96 + len(handles) for step in steps)
    charged = dict.fromkeys(handles, 0)
    for step in steps:
        charged |= {handle: us for handle, us in step.device_us.items() if handle in charged}
    assert sum(charged.values()) == pytest.approx(sum(step.step_s for step in steps) * 1e6, rel=0.05)
    assert steps[-1].running == steps[-1].waiting == 0


@pytest.mark.parametrize("name", SAMPLINGS)
def test_company_and_a_resume_change_no_token(engine: Engine, executor: str, name: str) -> None:
    sampling = {"logprobs": 2} | SAMPLINGS[name]
    alone = [engine.alone(prompt, 12, **sampling) for prompt in PROMPTS]
    beside = engine.run(*(engine.submit(prompt, 12, **sampling) for prompt in PROMPTS))
    assert beside == alone
    for cut in (1, 5, 9):
        resumed = [
            engine.submit(prompt, 12, produced=output.tokens[:cut], **sampling)
            for prompt, output in zip(PROMPTS, alone, strict=True)
            if len(output.tokens) > cut
        ]
        rest = [output.tokens[cut:] for output in alone if len(output.tokens) > cut]
        assert [output.tokens for output in engine.run(*resumed)] == rest
    if name == "json" and executor != "null":  # that one has no bias towards an end
        assert {output.finish for output in alone} <= {"stop", "length"}


def test_credit_holds_a_sequence_and_lets_it_go(engine: Engine) -> None:
    whole = engine.alone(PROMPTS[1], 9)
    handle = engine.submit(PROMPTS[1], 9, credit=3)
    engine.until(lambda: len(engine.outputs[handle].tokens) == 3)
    while not isinstance(beat := engine.agent.receive(), EngineHeartbeat):
        pass
    assert (beat.running, beat.waiting) == (1, 0)
    assert beat.kv_blocks_used
    engine.send(Credit([handle], [9]))
    assert engine.run(handle)[0].tokens == whole.tokens


def test_parked_sequences_leave_their_seats_and_go_on_as_if_they_had_not(start_engine: StartEngine) -> None:
    engine = start_engine(max_sequences=2)
    sizes = (200, 200, 10, 10)  # the first two are not done when the engine receives the order to park them
    whole = [engine.alone(prompt, size).tokens for prompt, size in zip(PROMPTS, sizes, strict=False)]
    parked = [engine.submit(prompt, 200) for prompt in PROMPTS[:2]]
    engine.until(lambda: all(engine.outputs[handle].tokens for handle in parked))
    engine.send(Park(parked))
    others = [engine.submit(prompt, 10) for prompt in PROMPTS[2:4]]
    assert [output.tokens for output in engine.run(*others)] == whole[2:]
    assert all(len(engine.outputs[handle].tokens) < 200 for handle in parked)
    engine.send(Credit(parked, [200, 200]))
    assert [output.tokens for output in engine.run(*parked)] == whole[:2]


def test_a_cancel_frees_its_blocks_within_a_step(engine: Engine) -> None:
    goes, stays = engine.submit(PROMPTS[4], 60), engine.submit(PROMPTS[0], 60)
    engine.until(lambda: bool(engine.outputs[goes].tokens and engine.outputs[stays].tokens))
    engine.send(Cancel([goes]))
    engine.until(lambda: any(goes in step.settled for step in engine.steps))
    assert engine.steps[-1].kv_blocks_used <= -(-len(PROMPTS[0] + [0] * 60) // engine.ready.block_size)
    assert engine.run(stays)[0].finish == "length"


def test_blocks_that_run_out_preempt_and_change_no_token(start_engine: StartEngine) -> None:
    engine = start_engine(kv_blocks=8, max_model_len=128)
    prompts = [prompt[:33] for prompt in PROMPTS[1:]]
    alone = [engine.alone(prompt, 40, seed=place).tokens for place, prompt in enumerate(prompts)]
    handles = [engine.submit(prompt, 40, seed=place) for place, prompt in enumerate(prompts)]
    waiting = dict(zip(handles, alone, strict=True))
    while waiting:  # the agent submits again what was handed back
        engine.step()
        for handle in [one for one in waiting if engine.outputs[one].finish]:
            output, whole = engine.outputs[handle], waiting.pop(handle)
            if output.finish == "preempted":
                place = alone.index(whole)
                again = engine.submit(prompts[place], 40, seed=place, produced=output.tokens)
                engine.outputs[again].tokens += output.tokens
                waiting[again] = whole
            else:
                assert output.tokens == whole
    assert engine.steps[-1].preemptions > 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"ids": []}, "prompt is empty"),
        ({"ids": [4096]}, "prompt_ids"),
        ({"ids": [-1]}, "prompt_ids"),
        ({"ids": [1] * 600}, "prompt"),
        ({"logit_bias": {9999: 1.0}}, "logit_bias"),
        ({"temperature": float("nan")}, "temperature"),
        ({"logprobs": 5000}, "logprobs"),
    ],
)
def test_what_a_model_cannot_take_ends_with_its_reason_and_nothing_else(
    engine: Engine, options: dict[str, Any], field: str
) -> None:
    beside = engine.submit(PROMPTS[0], 6)
    options = dict(options)
    refused = engine.submit(options.pop("ids", [1, 2]), 4, **options)
    output, neighbour = engine.run(refused, beside)
    assert (output.finish, output.tokens) == ("error", [])
    assert field in output.error
    assert neighbour.finish == "length"


def test_log_probabilities_are_of_the_tokens_and_of_the_prompt(engine: Engine, executor: str) -> None:
    output = engine.alone(PROMPTS[2], 5, temperature=0.0, logprobs=3, prompt_logprobs=1)
    assert len(output.logprobs) == 5
    assert len(output.scores) == len(PROMPTS[2])
    if executor != "null":
        assert [entry.top_ids[0] for entry in output.logprobs] == output.tokens
        assert all(entry.sampled == entry.top_logprobs[0] <= 0.0 for entry in output.logprobs)
        assert all(entry.rank >= 1 and entry.sampled < 0.0 for entry in output.scores[1:])


def test_an_embedding_is_the_last_hidden_state(engine: Engine) -> None:
    handles = [engine.submit(prompt, 0, credit=1, embed=True) for prompt in PROMPTS]
    beside = [np.frombuffer(one.embedding, "<f4") for one in engine.run(*handles)]
    alone = [
        np.frombuffer(engine.alone(prompt, 0, credit=1, embed=True).embedding, "<f4") for prompt in PROMPTS
    ]
    for one, other in zip(beside, alone, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)


def test_a_prefix_is_read_from_the_cache_by_its_root_only(engine: Engine) -> None:
    prompt = [DRAWN.randrange(10, 4000) for _ in range(2 * PREFIX_BLOCK_TOKENS + 5)]

    def run(root: int, ids: list[int]) -> Any:
        chain = tuple(prefix_chain(root, ids))
        return engine.alone(ids, 6, prefix_root=root, prefix_hashes=chain)

    first, again = run(41, prompt), run(41, prompt)
    longer, other = run(41, [*prompt, 9, 8, 7]), run(42, prompt)
    assert first.cached == other.cached == 0
    assert min(again.cached, longer.cached) >= 2 * PREFIX_BLOCK_TOKENS
    assert first.tokens == again.tokens == other.tokens
    assert longer.tokens == engine.alone([*prompt, 9, 8, 7], 6).tokens


def test_stop_tokens_end_a_sequence_and_are_part_of_it(engine: Engine) -> None:
    whole = engine.alone(PROMPTS[0], 8, temperature=0.0).tokens
    output = engine.alone(PROMPTS[0], 8, temperature=0.0, stop_token_ids=(whole[3],))
    assert output.tokens == whole[: whole.index(whole[3]) + 1]
    assert output.finish == "stop"


def test_proposals_change_no_token(engine: Engine, start_engine: StartEngine) -> None:
    prompt = [*PROMPTS[0], *PROMPTS[0], *PROMPTS[0]]
    proposing = start_engine(speculation="prompt_lookup")
    for sampling in ({"temperature": 0.0}, {"seed": 3}):
        assert proposing.alone(prompt, 24, **sampling) == engine.alone(prompt, 24, **sampling)


def test_a_resize_is_answered_with_the_blocks_that_there_are(
    start_engine: StartEngine, executor: str
) -> None:
    engine = start_engine()
    whole = engine.alone(PROMPTS[1], 8).tokens
    handle = engine.submit(PROMPTS[1], 8, credit=4)
    engine.until(lambda: len(engine.outputs[handle].tokens) == 4)
    engine.send(Resize(32))
    while not isinstance(answer := engine.agent.receive(), Resized):
        pass
    assert answer.kv_blocks_total == (64 if executor == "vllm" else 32)
    engine.send(Credit([handle], [8]))
    assert engine.run(handle)[0].tokens == whole


def test_a_step_that_raises_ends_the_process(start_engine: StartEngine) -> None:
    engine = start_engine(poisoned=True)
    engine.submit(PROMPTS[0], 60)
    engine.step()
    engine.submit(poison_ids(Fault.RAISES, 1), 4)
    with pytest.raises(struct.error):  # the end of the stream
        while True:
            engine.step()
    assert engine.agent.exit_code() == EngineExitCode.STEP_FAILED


def test_it_ends_with_a_signal_and_by_request(start_engine: StartEngine) -> None:
    engine = start_engine()
    os.kill(engine.agent.process.pid, signal.SIGKILL)
    assert engine.agent.exit_code() == -signal.SIGKILL
    engine = start_engine()
    engine.submit(PROMPTS[0], 400)
    engine.step()
    engine.send(Shutdown())
    assert engine.agent.exit_code() == EngineExitCode.DONE
