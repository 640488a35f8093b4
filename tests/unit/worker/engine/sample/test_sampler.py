"""The sampler against plain Python, row by row, and the statistics of its draws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.core.generation import OutputLimits, Prompt, Sampling
from services.worker.engine import sequence as keyed
from services.worker.engine.execute.executor import Samples
from services.worker.engine.execute.step_rows import SamplingColumns, columns_of, rows_of, uniforms
from services.worker.engine.sample.sampler import floors, invert_cdf
from services.worker.engine.sample.sampler import sample as sample_rows
from services.worker.engine.sequence import SequenceState, sequence_of
from services.worker.engine_protocol import Submit

torch.set_num_threads(1)
VOCAB = 40
EOS = 7


@pytest.fixture
def sequence(submit: Any) -> Any:
    """Build the state of a sequence; keywords go to Sampling."""

    def make(prompt: Any = (1, 2), *, produced: Any = (), **sampling: Any) -> SequenceState:
        command = submit(0, prompt, 50, produced=produced, **({"seed": 0} | sampling))
        return sequence_of(command, arrival=0, eos_ids=frozenset({EOS}))

    return make


def sample(logits: torch.Tensor, sequences: list[SequenceState]) -> Samples:
    return sample_rows(logits, rows_of(sequences))


def columns(samplings: list[Sampling]) -> SamplingColumns:
    return columns_of(
        [
            sequence_of(Submit(0, Prompt([1]), each, OutputLimits(16), 1), arrival=0, eos_ids=frozenset())
            for each in samplings
        ]
    )


def random_logits(rows: int, seed: int = 0, scale: float = 3.0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# --- keyed draws ---------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 99), st.integers(0, 10**6)), min_size=1
    )
)
def test_the_batched_draw_is_the_plain_one(triples: list[tuple[int, int, int]]) -> None:
    keys = [keyed.sequence_key(seed, choice) for seed, choice, _ in triples]
    positions = [position for *_, position in triples]
    expected = [keyed.uniform(key, position) for key, position in zip(keys, positions, strict=True)]
    assert uniforms(np.array(keys, np.uint64), np.array(positions)).tolist() == expected
    assert all(0.0 <= u < 1.0 for u in expected)


def test_draws_are_uniform_over_positions_choices_and_seeds() -> None:
    for keys, positions in (
        ([keyed.sequence_key(1, 0)] * 20000, range(20000)),
        ([keyed.sequence_key(1, choice) for choice in range(20000)], [0] * 20000),
        ([keyed.sequence_key(seed, 0) for seed in range(20000)], [3] * 20000),
    ):
        u = torch.from_numpy(uniforms(np.array(keys, np.uint64), np.array(positions)))
        counts = torch.histc(u, 50, 0.0, 1.0)
        chi_square = float(((counts - 400) ** 2 / 400).sum())
        assert chi_square < 94.6  # 49 degrees of freedom, p = 1e-4
        assert abs(float(torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1])) < 0.03


def test_the_draws_are_pinned() -> None:
    """A stream may continue on a worker of another release: these numbers never change."""
    assert keyed.sequence_key(0, 0) == 0x48218226FF3CD4BF
    assert [round(keyed.uniform(keyed.sequence_key(42, 1), position), 12) for position in range(3)] == [
        0.38697427624,
        0.921317225007,
        0.083116341055,
    ]


# --- inverse of the distribution -----------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 5, 127, 128, 129, 1000])
def test_the_inverse_is_that_of_the_whole_row(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(30, vocab, generator=generator).double() ** 4
    weights[torch.rand(30, vocab, generator=generator) < 0.4] = 0
    weights[:, vocab // 2] = 1.0
    u = torch.rand(30, generator=generator, dtype=torch.float64)
    cumulative = weights.cumsum(-1)
    expected = (cumulative <= u[:, None] * cumulative[:, -1:]).sum(-1)
    assert torch.equal(invert_cdf(weights, u), expected)


def test_the_ends_of_the_range_fall_on_tokens_with_weight() -> None:
    weights = torch.zeros(2, 300)
    weights[:, 5], weights[:, 140] = 0.3, 0.7
    ends = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert invert_cdf(weights, ends).tolist() == [5, 140]


def test_draws_follow_the_distribution(sequence: Any) -> None:
    logits = random_logits(1, scale=1.5)
    rows = 20000
    states = [sequence(seed=seed, temperature=0.8) for seed in range(rows)]
    tokens = torch.tensor(sample(logits.repeat(rows, 1), states).tokens)
    expected = (logits[0] / 0.8).softmax(-1) * rows
    counts = torch.bincount(tokens, minlength=VOCAB)
    large = expected >= 5
    chi_square = float(((counts - expected)[large] ** 2 / expected[large]).sum())
    assert chi_square < 2 * int(large.sum()) + 30


# --- filters -------------------------------------------------------------------------------------


def plain_keep(logits: list[float], sampling: Sampling) -> set[int]:
    """What top-k, top-p and min-p leave, by sorting everything; equal logits share their fate."""
    scaled = [value / sampling.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if 0 < sampling.top_k < len(order):
        order = [token for token in order if scaled[token] >= scaled[order[sampling.top_k - 1]]]
    weights = [math.exp(scaled[token] - scaled[order[0]]) for token in order]
    kept: list[int] = []
    total, before = sum(weights), 0.0
    for token, weight in zip(order, weights, strict=True):
        if kept and sampling.top_p < 1 and before >= sampling.top_p * total:
            break
        kept.append(token)
        before += weight
    least = scaled[kept[-1]]
    return {
        token
        for token in order
        if scaled[token] >= least and math.exp(scaled[token] - scaled[order[0]]) >= sampling.min_p
    }


samplings = st.builds(
    Sampling,
    seed=st.just(0),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB - 1, VOCAB, 10**12]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(samplings, min_size=1, max_size=5), st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 4.0]))
def test_each_filter_keeps_what_sorting_everything_keeps(
    chosen: list[Sampling], seed: int, scale: float
) -> None:
    logits = random_logits(len(chosen), seed, scale).double()  # as exact as the reference
    temperatures = torch.tensor([[s.temperature] for s in chosen], dtype=torch.float64)
    scaled = (logits - logits.max(-1, keepdim=True).values) / temperatures
    keep = scaled >= floors(scaled, columns(chosen))
    for row, sampling in enumerate(chosen):
        expected = plain_keep(logits[row].tolist(), sampling)
        assert set(keep[row].nonzero()[:, 0].tolist()) == expected


def test_top_p_looks_at_all_of_a_flat_row() -> None:
    """The nucleus of a flat distribution is wider than the candidates that are looked at first."""
    vocab = 3000
    logits = random_logits(2, scale=0.01, vocab=vocab).double()
    chosen = [Sampling(seed=0, top_p=0.9), Sampling(seed=0, top_p=0.05)]
    scaled = logits - logits.max(-1, keepdim=True).values
    keep = scaled >= floors(scaled, columns(chosen))
    assert [set(row.nonzero()[:, 0].tolist()) for row in keep] == [
        plain_keep(row.tolist(), sampling) for row, sampling in zip(logits, chosen, strict=True)
    ]
    assert 2600 < int(keep[0].sum()) < 2800


def test_only_kept_tokens_are_drawn(sequence: Any) -> None:
    logits = random_logits(1)
    sampling = {"temperature": 1.5, "top_k": 5, "top_p": 0.8}
    states = [sequence(seed=seed, **sampling) for seed in range(2000)]
    drawn = set(sample(logits.repeat(2000, 1), states).tokens)
    assert drawn == plain_keep(logits[0].tolist(), states[0].sampling)


def test_tiny_and_huge_temperatures_are_sound(sequence: Any) -> None:
    logits = random_logits(2, scale=1e4)
    tokens = sample(logits.clone(), [sequence(temperature=1e-30), sequence(temperature=100.0)]).tokens
    assert tokens[0] == int(logits[0].argmax())


# --- shaping -------------------------------------------------------------------------------------


def plain_shape(logits: list[float], sequence: SequenceState) -> list[float]:
    shaped, sampling = list(logits), sequence.sampling
    for token, bias in sampling.logit_bias:
        shaped[token] += bias
    for token in set(sequence.tokens):
        penalty = sampling.repetition_penalty
        shaped[token] = shaped[token] / penalty if shaped[token] > 0 else shaped[token] * penalty
    output = sequence.tokens[sequence.prompt_tokens :]
    for token in set(output):
        shaped[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    return shaped


SHAPES: list[dict[str, Any]] = [
    {},
    {"logit_bias": {3: 5.0, 39: -100.0}},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "presence_penalty": 0.4},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {0: 2.0}},
]


def test_penalties_and_bias_are_those_of_plain_python(sequence: Any) -> None:
    """Seen through the log-probabilities, which come after them; all rows in one batch."""
    states = [
        sequence([1, 2, 2, 9], produced=[4, 4, 9, 30, 4][:produced], logprobs=VOCAB, **shape)
        for shape in SHAPES
        for produced in (0, 1, 5)
    ]
    logits = random_logits(len(states))
    result = sample(logits.clone(), states)
    for row, state in enumerate(states):
        expected = torch.tensor(plain_shape(logits[row].tolist(), state)).log_softmax(-1)
        entry = result.logprobs[row]
        got = torch.empty(VOCAB).index_copy_(0, torch.tensor(entry.top_ids), torch.tensor(entry.top_logprobs))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        assert result.tokens[row] == int(expected.argmax())
        assert entry.sampled == pytest.approx(float(expected.max()), abs=1e-5)


def test_min_tokens_rules_out_every_stop_until_then(sequence: Any) -> None:
    logits = torch.zeros(5, VOCAB)
    logits[:, EOS], logits[:, 9], logits[:, 5] = 9.0, 8.0, 1.0
    states = [
        sequence(min_tokens=2, stop_token_ids=(9,)),
        sequence(min_tokens=2, stop_token_ids=(9,), produced=[1, 1]),
        sequence(min_tokens=2, stop_token_ids=(9,), ignore_eos=True, produced=[1]),
        sequence(min_tokens=0),
        sequence(min_tokens=2, stop_token_ids=(9,), produced=[1]),
    ]
    assert sample(logits, states).tokens == [5, EOS, EOS, EOS, 5]


def test_equal_logprobs_come_in_the_same_order_whatever_a_neighbour_asks_for(sequence: Any) -> None:
    logits = (random_logits(2, vocab=2000) * 2).round() / 2  # many of them are equal
    alone = sample(logits[:1].clone(), [sequence(logprobs=5, temperature=0.0)]).logprobs[0]
    for wanted in (1, 20, 128):
        others = [sequence(logprobs=5, temperature=0.0), sequence(logprobs=wanted, temperature=0.0)]
        assert sample(logits.clone(), others).logprobs[0] == alone


def test_logprobs_are_those_before_temperature_and_filters(sequence: Any) -> None:
    logits = random_logits(3)
    states = [
        sequence(logprobs=0, temperature=0.3, top_k=2),
        sequence(logprobs=3, temperature=2.0, top_p=0.5, seed=5),
        sequence(),
    ]
    result = sample(logits.clone(), states)
    expected = logits.log_softmax(-1)
    assert sorted(result.logprobs) == [0, 1]
    for row, count in ((0, 0), (1, 3)):
        entry = result.logprobs[row]
        assert entry.sampled == pytest.approx(float(expected[row, result.tokens[row]]), abs=1e-6)
        assert entry.top_ids == expected[row].topk(count).indices.tolist()
        assert entry.top_logprobs == pytest.approx(expected[row].topk(count).values.tolist(), abs=1e-6)


# --- rows and their neighbours -------------------------------------------------------------------

NEIGHBOURS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "top_p": 0.9, "seed": 4, "logprobs": 2},
    {"temperature": 1.2, "top_k": 9, "min_p": 0.02, "repetition_penalty": 1.3, "seed": 5},
    {"temperature": 0.0, "logit_bias": {11: 100.0}, "min_tokens": 5},
    {"temperature": 0.9, "frequency_penalty": 1.0, "presence_penalty": 1.0, "seed": 6},
]


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(order=st.permutations(range(len(NEIGHBOURS))), count=st.integers(1, len(NEIGHBOURS)))
def test_a_row_is_the_same_in_any_company(sequence: Any, order: list[int], count: int) -> None:
    """The adversarial neighbour: biases, masks and penalties of one row never reach another."""
    logits = random_logits(len(NEIGHBOURS))
    states = [sequence(produced=[4, 5, 4], **shape) for shape in NEIGHBOURS]
    alone = [sample(logits[[row]].clone(), [state]) for row, state in enumerate(states)]
    company = order[:count]
    together = sample(logits[company].clone(), [states[row] for row in company])
    assert together.tokens == [alone[row].tokens[0] for row in company]
    for place, row in enumerate(company):
        assert together.logprobs.get(place) == alone[row].logprobs.get(0)


def test_the_draw_moves_with_seed_choice_and_position(sequence: Any) -> None:
    logits = torch.zeros(1, 10**5)
    base = {"temperature": 1.0, "seed": 1}
    variants = [
        sequence(**base),
        sequence([5, 6, 7], **base),  # another prompt: the same draw
        sequence(**(base | {"seed": 2})),
        sequence(choice=1, **base),
        sequence(produced=[3], **base),
    ]
    tokens = [sample(logits.clone(), [state]).tokens[0] for state in variants]
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_fail_their_row_alone(
    sequence: Any, temperature: float, value: float
) -> None:
    logits = random_logits(3)
    clean = sample(logits.clone(), [sequence(temperature=temperature)] * 3).tokens
    logits[1, 5] = value
    result = sample(logits, [sequence(temperature=temperature)] * 3)
    assert list(result.errors) == [1]
    assert [result.tokens[0], result.tokens[2]] == [clean[0], clean[2]]
