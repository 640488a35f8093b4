"""The engine against transformers: random checkpoints, drawn schedules, and the rule of comparison.

The oracle reads what the engine produced, token by token, so each position is compared in the context that
the engine had. The margin rule (docs/architecture/engine/operators.md): a token whose logit is no more than
``MARGIN`` below the oracle's best may be chosen by another order of float32 additions; such a divergence is
counted and excused, any other fails. ``engine_bfloat16`` has the rule for bfloat16.
"""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, Final, Protocol

import hypothesis
import msgspec
import torch
from hypothesis import strategies as st

from services.core.prefix import prefix_chain
from services.worker.engine.core import Engine
from services.worker.engine.execute.executor import Executor
from services.worker.engine.load.loading import _load_torch, _prefix_cache
from services.worker.engine.native.build import COMPILERS
from services.worker.engine.plan.block_manager import BlockManager
from services.worker.engine.plan.planner import PlannerLimits
from services.worker.engine.sequence import ModelLimits
from services.worker.engine.speculation.draft_model import DraftModel
from services.worker.engine.speculation.speculator import PromptLookup, Proposer, Speculator
from services.worker.engine_protocol import (
    Cancel,
    Credit,
    EngineConfig,
    Ready,
    SampledLogprobs,
    Stepped,
)
from services.worker.policy.speculation import SpeculationPolicy
from tests.support.submits import make_submit

# Where there is a compiler ours have to be there: they would be left out of the comparison otherwise.
OWN_OPERATORS: Final = "native" if any(map(shutil.which, COMPILERS)) else "auto"
MARGIN: Final = 1e-4
MAX_EXCUSED_RATIO: Final = 0.002  # of all positions
VOCABULARY: Final = 101
CONTEXT: Final = 256
MOST_OUTPUT: Final = 24
ROOT: Final = 11  # of prefix names: one isolation domain
MAX_STEPS: Final = 4000
RESUMED: Final = 1_000_000  # handles from here on are of sequences that were handed back
UNLIMITED: Final = 1 << 30

ROPES: Final = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
ORIGINAL: Final = 32  # the context of pre-training where one is scaled: most prompts are beyond it


def rope(kind: str, head_dim: int) -> dict[str, Any]:
    """Return the fields of a config whose positions are scaled in this way up to ``CONTEXT``."""
    factor = CONTEXT / ORIGINAL
    longer = {"factor": factor, "original_max_position_embeddings": ORIGINAL}
    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": factor},
        "dynamic": {"factor": factor},
        "llama3": longer | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "yarn": longer,
        "longrope": {
            "original_max_position_embeddings": ORIGINAL,
            "short_factor": [1.0 + 0.05 * index for index in range(head_dim // 2)],
            "long_factor": [1.5 + 0.4 * index for index in range(head_dim // 2)],
        },
    }
    ends_at = ORIGINAL if kind in ("linear", "dynamic") else CONTEXT
    parameters = {"rope_type": kind, "rope_theta": 10000.0} | kinds[kind]
    return {"rope_parameters": parameters, "max_position_embeddings": ends_at}


@dataclass(frozen=True, slots=True)
class Shape:
    """A checkpoint: its family, heads, KV heads, dimension of a head, and how its positions are scaled."""

    family: str
    heads: int
    kv_heads: int
    head_dim: int
    rope: str = "default"
    window: int | None = None

    def __str__(self) -> str:
        window = f"-window{self.window}" if self.window else ""
        return f"{self.family}-{self.heads}x{self.kv_heads}x{self.head_dim}-{self.rope}{window}".lower()

    @property
    def fields(self) -> dict[str, Any]:
        fields = {
            "vocab_size": VOCABULARY,
            "hidden_size": 60,
            "intermediate_size": 44,
            "num_hidden_layers": 2,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "eos_token_id": None,
        }
        windows: Mapping[str, dict[str, Any]] = {
            "Mistral": {"sliding_window": self.window},
            "Qwen2": {"use_sliding_window": True, "sliding_window": self.window, "max_window_layers": 1},
            "Qwen3": {"use_sliding_window": True, "sliding_window": self.window, "max_window_layers": 1},
        }
        sliding = windows[self.family] if self.window or self.family == "Mistral" else {}
        return fields | rope(self.rope, self.head_dim) | sliding


def save(shape: Shape, folder: Path, *, seed: int = 0) -> Any:
    """Write a random checkpoint into ``folder``; return the model of transformers."""
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = getattr(transformers, f"{shape.family}Config")(**shape.fields)
    model = getattr(transformers, f"{shape.family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms of one and biases of zero would hide that they are forgotten.
            parameter.normal_(1.0, 0.3) if name.endswith("norm.weight") else parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder)
    return model


@dataclass(slots=True)
class Oracle:
    """A model of transformers, and how many positions were compared and excused."""

    model: Any
    depends_on_length: bool
    compared: int = 0
    excused: int = 0

    def judge(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Count the output. Raises AssertionError for a token that the margin rule does not excuse."""
        logits = self.logits(prompt, output)
        for position, token in enumerate(output):
            margin = float(logits[position].max() - logits[position, token])
            self.compared += 1
            if int(logits[position].argmax()) != token:
                assert margin <= MARGIN, f"position {position}: {token}, margin {margin:.2g}"
                self.excused += 1

    def check(self) -> None:
        """Raise AssertionError if more than a few positions needed the excuse."""
        assert self.excused <= max(1, MAX_EXCUSED_RATIO * self.compared), (self.excused, self.compared)

    @torch.inference_mode()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """Return the logits [output, vocabulary] that lead to each output token."""
        ids, prompt_tokens = torch.tensor([[*prompt, *output]]), len(prompt)
        if not self.depends_on_length:
            found: torch.Tensor = self.model(ids).logits[0, prompt_tokens - 1 : -1]
            return found
        # Frequencies depend on how long the sequence was when a token was computed: one by one, with a cache.
        rotary = self.model.model.rotary_emb
        rotary.inv_freq = rotary.original_inv_freq.clone()
        rotary.max_seq_len_cached = rotary.original_max_seq_len
        answer = self.model(ids[:, :prompt_tokens], use_cache=True)
        rows = [answer.logits[0, -1]]
        for place in range(prompt_tokens, ids.shape[1] - 1):
            answer = self.model(ids[:, place : place + 1], past_key_values=answer.past_key_values)
            rows.append(answer.logits[0, -1])
        return torch.stack(rows)


def oracle_of(shape: Shape, model: Any) -> Oracle:
    return Oracle(model, shape.rope in ("dynamic", "longrope"))


class Judge(Protocol):
    """What ``Oracle`` does, in one data type or another."""

    def judge(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Count the output. Raises AssertionError for a token that the margin rule does not excuse."""


# --- schedules ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that comes before step ``step``.

    ``sampling`` holds its options besides ``output_tokens``. It is cancelled after as many tokens as
    ``cancelled_after``, and its reader gives credit for ``credit`` tokens at a time; 0: for all.
    """

    step: int
    prompt: tuple[int, ...]
    output_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)
    cancelled_after: int | None = None
    credit: int = 0
    seed: int = 5

    @property
    def is_greedy(self) -> bool:
        return not self.sampling


@dataclass(frozen=True, slots=True)
class Schedule:
    """Requests, and the engine that they come to: ``options`` are fields of its ``EngineConfig``."""

    arrivals: tuple[Arrival, ...]
    options: Mapping[str, Any]


HOSTILE: Final[tuple[Mapping[str, Any], ...]] = (
    {"temperature": 1.0, "logit_bias": {7: 1e6}, "logprobs": 5},
    {"temperature": 1.3, "top_k": 5, "repetition_penalty": 1.7},
    {"temperature": 0.7, "top_p": 0.5, "min_p": 0.1, "frequency_penalty": 2.0},
    {"temperature": 0.0, "presence_penalty": -2.0, "logprobs": 20},
    {"temperature": 1.5, "min_tokens": 1, "stop_token_ids": tuple(range(3, VOCABULARY, 2)), "logprobs": 0},
)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, ...]:
    """Prompts that often begin alike, as far as whole prefix blocks or not."""
    shared, own = draw(st.sampled_from((0, 5, 64, 70, 128))), draw(st.integers(1, 40))
    stem = random_ids(draw(st.integers(0, 1)), shared)
    period = draw(st.sampled_from((2, 5, 40)))  # text that repeats gives prompt lookup something to propose
    tail = random_ids(draw(st.integers(2, 1 << 16)), min(period, own))
    return (*stem, *(tail[place % len(tail)] for place in range(own)))


def random_ids(seed: int, count: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Two to six requests into an engine that is short of blocks, budget or places."""
    count = draw(st.integers(2, 6))
    arrivals = []
    for _ in range(count):
        sampling = draw(st.sampled_from(({}, {}, {}, *HOSTILE)))
        output = draw(st.integers(1, MOST_OUTPUT))
        arrivals.append(
            Arrival(
                step=draw(st.integers(0, 12)),
                prompt=draw(prompts()),
                output_tokens=output,
                sampling=sampling,
                cancelled_after=draw(st.none() | st.integers(0, output - 1)) if sampling else None,
                credit=draw(st.sampled_from((0, 0, 3))),
            )
        )
    block_size = draw(st.sampled_from((4, 8, 16)))
    needs = [-(-(len(each.prompt) + each.output_tokens) // block_size) for each in arrivals]
    places = draw(st.integers(1, count))
    options = {
        "block_size": block_size,
        "kv_blocks": max(needs) + draw(st.sampled_from((0, 2, 5, 2 * max(needs)))),
        "token_budget": places + draw(st.integers(1, 60)),
        "max_sequences": places,
        "speculation": draw(st.sampled_from(("off", "prompt_lookup", "draft"))),
        "operators": draw(st.sampled_from((*(2 * [OWN_OPERATORS]), "torch"))),
    }
    return Schedule(tuple(arrivals), options)


def load_engine(
    folder: Path,
    options: Mapping[str, Any],
    *,
    runs_ahead: bool = False,
    watched: Callable[[Executor], Executor] = lambda executor: executor,
) -> Engine:
    """Return an engine with the checkpoint, as ``loading`` makes it but for its clock, which ticks.

    With time that counts calls, every step takes as long: what is planned is the same in each run, and
    proposals always pay. The checkpoint is its own draft model.
    """
    config = msgspec.structs.replace(
        EngineConfig("", str(folder), threads=1, max_model_len=CONTEXT), **options
    )
    executor, ready, _ = _load_torch(config, _silent)
    executor.runs_ahead = runs_ahead
    cache = _prefix_cache(config, ready)
    ticks = count()
    return Engine(
        watched(executor),
        blocks=cache or BlockManager(ready.kv_blocks_total, ready.block_size),
        limits=PlannerLimits(config.token_budget, config.max_sequences),
        model=ModelLimits(ready.vocab_size, ready.max_model_len),
        eos_ids=frozenset(),
        clock=lambda: float(next(ticks)),
        reuse=cache,
        speculation=_speculator(config, ready),
    )


def _speculator(config: EngineConfig, ready: Ready) -> Speculator | None:
    proposer: Proposer
    if config.speculation == "off":
        return None
    if config.speculation == "prompt_lookup":
        proposer = PromptLookup(max_sequences=config.max_sequences)
    else:
        proposer = DraftModel(
            _load_torch(config, _silent)[0],
            blocks=BlockManager(ready.kv_blocks_total, ready.block_size),
            max_model_len=CONTEXT,
            token_budget=config.token_budget,
        )
    return Speculator(proposer, SpeculationPolicy(most_tokens=config.max_proposals), clock=lambda: 0.0)


def _silent(phase: str, ratio: float) -> None:
    """What loading reports is of no interest."""


# Room for every proposal of a draft model.
SPECULATING: Final = Schedule(
    tuple(Arrival(step, tuple(random_ids(step, 20 + step)), MOST_OUTPUT) for step in range(3)),
    {"block_size": 4, "kv_blocks": 100, "token_budget": 64, "max_sequences": 4, "speculation": "draft"},
)


@dataclass(slots=True)
class Outcome:
    """By number of the arrival. ``counts``: what the engine did on the way, which no output may show; ``of``:
    for whom it did."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[SampledLogprobs]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    of: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


class Run:
    """One schedule on one engine: arrivals, credits, cancellations and resumes, as an agent sends them."""

    def __init__(self, engine: Engine, arrivals: Sequence[Arrival]) -> None:
        self._engine = engine
        self._arrivals = arrivals
        self._numbers: dict[int, int] = {}  # live handle -> number of its arrival
        self.outcome = Outcome()

    def to_end(self) -> Outcome:
        """Return what came out. Raises AssertionError if it does not end or a sequence fails."""
        for step in range(MAX_STEPS):
            for number, arrival in enumerate(self._arrivals):
                if arrival.step == step:
                    self._submit(number, number)
            if self._engine.has_work:
                self._step()
            elif step >= max(arrival.step for arrival in self._arrivals):
                assert not self._numbers, "the engine forgot a sequence"
                return self.outcome
        raise AssertionError("the engine does not come to an end")

    def _submit(self, handle: int, number: int) -> None:
        arrival = self._arrivals[number]
        options = {"seed": arrival.seed, "temperature": 0.0, "ignore_eos": True} | dict(arrival.sampling)
        produced = self.outcome.tokens.setdefault(number, [])
        self._numbers[handle] = number
        self._engine.apply(
            make_submit(
                handle,
                arrival.prompt,
                len(produced) + arrival.credit if arrival.credit else UNLIMITED,
                list(produced),
                max_tokens=arrival.output_tokens,
                prefix_hashes=prefix_chain(ROOT, arrival.prompt),
                prefix_root=ROOT,
                **options,
            )
        )

    def _step(self) -> None:
        event = self._engine.step()
        self._engine.check_integrity()
        outcome = self.outcome
        for handle, token in zip(event.handles, event.tokens, strict=True):
            outcome.tokens[self._numbers[handle]].append(token)
        for handle, entries in event.logprobs.items():
            outcome.logprobs.setdefault(self._numbers[handle], []).extend(entries)
        self._count(event)
        for handle, reason in event.finished.items():
            number = self._numbers.pop(handle)
            if reason == "preempted":
                outcome.counts["resumes"] += 1
                self._submit(RESUMED + outcome.counts["resumes"], number)
            else:
                stops = "stop_token_ids" in self._arrivals[number].sampling
                expected = ("length", "stop") if stops else ("length",)
                assert reason in expected, f"arrival {number}: {reason} {event.errors.get(handle, '')}"
                outcome.reasons[number] = reason
        self._answer()

    def _count(self, event: Stepped) -> None:
        counts = self.outcome.counts
        counts["cached"] += sum(event.cached.values())
        counts["proposed"] += event.proposed_tokens
        counts["accepted"] += event.accepted_tokens
        counts["mixed steps"] += bool(event.prefill_tokens and event.attended_tokens)
        counts["preemptions"] = event.preemptions
        for handle, tokens in event.cached.items():
            self.outcome.of[self._numbers[handle]]["cached"] += tokens
        for handle, tokens in Counter(event.handles).items():
            self.outcome.of[self._numbers[handle]]["accepted"] += tokens - 1

    def _answer(self) -> None:
        """Cancel and give credit, as the reader of each live stream does."""
        for handle, number in list(self._numbers.items()):
            arrival, produced = self._arrivals[number], len(self.outcome.tokens[number])
            if arrival.cancelled_after is not None and produced >= arrival.cancelled_after:
                self._engine.apply(Cancel([handle]))
                del self._numbers[handle]
            elif arrival.credit:
                self._engine.apply(Credit([handle], [produced + arrival.credit]))


def settings(examples: int) -> hypothesis.settings:
    """Return how many schedules are drawn, the same ones in every run of a seed; none is made smaller."""
    return hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def compare_schedules(
    oracle: Judge,
    folder: Path,
    *,
    seed: int,
    examples: int,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Counter[str]:
    """Judge what each greedy request of drawn schedules produced; return the counts of all of them.

    ``options`` are fields of every ``EngineConfig``.
    """
    counts: Counter[str] = Counter()

    def judge(schedule: Schedule) -> None:
        outcome = Run(load_engine(folder, {**schedule.options, **options}), schedule.arrivals).to_end()
        counts.update(outcome.counts)
        for number, arrival in enumerate(schedule.arrivals):
            if arrival.is_greedy:
                assert len(outcome.tokens[number]) == arrival.output_tokens
                oracle.judge(arrival.prompt, outcome.tokens[number])

    judge(SPECULATING)
    hypothesis.seed(seed)(settings(examples)(hypothesis.given(schedules())(judge)))()
    return counts
