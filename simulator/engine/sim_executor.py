"""The simulated executor of the production engine: no tensors; a cost model, and tokens by a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from services.core.estimates.cost_model import CostModel, span_tokens
from services.worker.engine.execute.executor import Batch, Samples, blank_scores
from services.worker.engine.sequence import Intake, ModelLimits, SequenceState, sequence_key, size_refusal
from services.worker.engine_protocol import Submit
from simulator.engine.poison import EngineEnds
from simulator.engine.tokens import NEVER, SimTokens, SimVocabulary

# How many tokens a request's output has, the end-of-sequence token included; None: up to its max_tokens.
OutputLength = Callable[[Submit], int | None]


@dataclass(frozen=True, slots=True)
class VersionFaults:
    """What is wrong with a version. ``fragile``: poisons end its engine, as they do by default.

    ``failing_of``: one sequence in so many ends with an error; 0: none.
    """

    fragile: bool = True
    failing_of: int = 0


FRAGILE: Final = VersionFaults()


def sim_tokens(sequence: SequenceState) -> SimTokens:
    """Return a sequence's tokens as what ``SimIntake`` made them."""
    return cast(SimTokens, sequence.tokens)


class SimIntake(Intake):
    """Sequences that keep a prompt as it came and their output as a count."""

    def __init__(self, vocabulary: SimVocabulary, output_length: OutputLength | None) -> None:
        self._vocabulary = vocabulary
        self._output_length = output_length
        self.live: dict[int, SequenceState] = {}

    def refusal(self, command: Submit, model: ModelLimits) -> str | None:
        """Sizes only: what a simulation submits went through the gateway's validator."""
        return size_refusal(command, model)

    def sequence(self, command: Submit, *, arrival: int, eos_ids: frozenset[int]) -> SequenceState:
        prompt, sampling = command.prompt, command.sampling
        chained = prompt.prefix_root or prompt.prefix_hashes
        cached = chained and sampling.prompt_logprobs is None
        names = [prompt.prefix_root, *prompt.prefix_hashes] if cached else []
        key = sequence_key(sampling.seed, command.choice)
        tokens = SimTokens(prompt.ids, len(command.produced_ids), key, self._vocabulary, self._end(command))
        sequence = SequenceState(
            handle=command.handle,
            tokens=tokens,
            prompt_tokens=tokens.prompt_tokens,
            sampling=sampling,
            limits=command.limits,
            stop_ids=eos_ids if tokens.end < NEVER else frozenset(),
            key=key,
            order=(command.priority, arrival),
            credit_limit=command.credit_limit,
            prefix_names=names,
            scored=command.scored_tokens,
            tenant=command.tenant,
            kv_share=command.kv_share,
        )
        sequence.set_credit(command.credit_limit)
        sequence.run_alone(command.apart_tokens)
        self.live[command.handle] = sequence
        return sequence

    def forget(self, handle: int) -> None:
        """The sequence has ended."""
        self.live.pop(handle, None)

    def _end(self, command: Submit) -> int:
        limits = command.limits
        if self._output_length is None or self._vocabulary.eos_id is None or limits.ignore_eos:
            return NEVER
        length = self._output_length(command)
        if length is None or length > limits.max_tokens:
            return NEVER
        # A resume of a run whose last token was lost on the way ends with its next one.
        shortest = max(length, limits.min_tokens + 1, len(command.produced_ids) + 1)
        return len(command.prompt.ids) + shortest


class SimExecutor:
    """Implements ``Runner``. ``elapsed_s`` is the clock that its engine measures steps by."""

    def __init__(self, cost: CostModel, vocabulary: SimVocabulary, faults: VersionFaults = FRAGILE) -> None:
        self.cost = cost
        self._faults = faults
        self.slow_factor = 1.0
        self.elapsed_s = 0.0
        self._vocabulary = vocabulary

    def run(self, batch: Batch) -> Samples:
        """Return one token per sampling row; ``elapsed_s`` moves by what the step takes.

        Raises EngineEnds for a batch with a poison.
        """
        for sequence in batch.sampled if self._faults.fragile else ():
            poison = sim_tokens(sequence).poison
            if poison is not None and sequence.output_tokens >= poison.after_tokens:
                raise EngineEnds(poison)
        attended = sum(len(sequence.tokens) for sequence in batch.decodes)
        prefill_attended = sum(span_tokens(chunk.start, chunk.end) for chunk in batch.prefills)
        self.elapsed_s += self.slow_factor * self.cost.step_s(
            batch.prefill_tokens, len(batch.decodes), attended, prefill_attended
        )
        tokens = [self._sample(sequence) for sequence in batch.sampled]
        return Samples(tokens, errors=self._errors(batch), scores=blank_scores(batch))

    def _errors(self, batch: Batch) -> dict[int, str]:
        if not self._faults.failing_of:
            return {}
        return {
            row: "a fault of the version"
            for row, sequence in enumerate(batch.sampled)
            if sequence.key % self._faults.failing_of == 0
        }

    def resize(self, blocks: int) -> None:
        """See ``Runner``: there is no memory behind its blocks."""

    def decode_s(self, decodes: int, attended_tokens: int) -> float:
        """Return what a step of decodes takes."""
        return self.slow_factor * self.cost.step_s(0, decodes, attended_tokens)

    def _sample(self, sequence: SequenceState) -> int:
        tokens, vocabulary = sim_tokens(sequence), self._vocabulary
        if tokens.length + 1 == tokens.end:
            assert vocabulary.eos_id is not None, "an output ends by itself with a token that says so"
            return vocabulary.eos_id
        return vocabulary.output(tokens.key, tokens.length - tokens.prompt_tokens, 1)[0]
