"""What our engine runs in each of vLLM's ranks, as an extension of vLLM's worker class.

vLLM's model runner computes hidden states and logits; tokens are sampled by our sampler from (seed, choice,
position), on the rank that answers. Which tokens a sequence has is the engine's knowledge: every rank
receives those that came since the step before, so that no rank needs another's samples.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from fairway.formats.decoder_config import ModelConfig
from services.runtime.process.child import die_with_parent
from services.worker.engine.execute.executor import RuledRows, Samples, StepMasks
from services.worker.engine.execute.operators import in_company
from services.worker.engine.execute.step_rows import SamplingRows
from services.worker.engine.execute.torch_executor import ScoredChunk, ScoredRows, launch_scores
from services.worker.engine.load.memory_meter import meter_for, own_bytes
from services.worker.engine.sample.sampler import TORCH, launch
from services.worker.engine.unsupported import BadCheckpoint
from services.worker.engines.vllm.adapters import RankAdapters

# A rank reads this module before it loads anything. Its process has its name already, and no parent yet where
# the module is read with that of the process which started it.
if multiprocessing.current_process().name != "MainProcess":
    die_with_parent()


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows of a chunk of ``request`` that predict tokens of its prompt: so many from ``first`` on."""

    request: str
    index: int  # the chunk's place in ``Batch.prefills``
    first: int
    targets: list[int]
    wanted: int


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step as every rank receives it. Sequences are named by vLLM's request ids."""

    scheduled: Any  # vLLM's SchedulerOutput
    appended: dict[str, list[int]]  # tokens that each sequence got since the step before
    sampled: list[str]  # the request of each sampling row
    sampling: SamplingRows
    embedded: list[int]  # sampling rows whose hidden states are requested
    scored: list[Scored]
    adapters: dict[str, int]  # adapters of the requests that have one


class FairwayRank:
    """Methods that vLLM's worker class inherits, so their names may not be among its own."""

    model_runner: Any
    fairway_adapters: RankAdapters | None = None

    def fairway_loaded(self, before: int) -> int:
        """Return what loading took. ``before`` is what a process without weights has of the host's memory."""
        self._products_in_company()
        if self.model_runner.device.type == "cuda":
            return torch.cuda.memory_allocated(self.model_runner.device)
        return max(0, own_bytes() - before)

    def fairway_replace_weights(self, folder: Path) -> None:
        """Compute with the weights in the folder, which have the same names and shapes."""
        with torch.inference_mode():
            self.model_runner.reload_weights(weights_path=str(folder))
            for module in self.model_runner.model.modules():
                # A reload packs weights for the layer that loads them, and not for one that is tied to it.
                if hasattr(module, "cpu_linear") and module.weight.numel():
                    dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        self._products_in_company()

    def fairway_working_bytes(self, tokens: int, rows: SamplingRows) -> int:
        """Return what a step of so many tokens takes at its peak, in addition to weights and KV."""
        with meter_for(str(self.model_runner.device)) as meter:
            meter.begin()
            meter.run(lambda: self._largest_step(tokens, rows))
            return meter.peak_bytes

    def _products_in_company(self) -> None:
        """Compute no row alone: see ``in_company``."""
        for module in self.model_runner.model.modules():
            product = getattr(module, "cpu_linear", None)
            if callable(product) and getattr(product, "func", None) is not in_company:
                module.cpu_linear = partial(in_company, product)

    def _largest_step(self, tokens: int, rows: SamplingRows) -> None:
        runner = self.model_runner
        with torch.inference_mode():
            hidden, _ = runner._dummy_run(tokens)
            if not get_pp_group().is_last_rank:
                return
            logits = runner.model.compute_logits(hidden[: len(rows)])
            if logits is not None:  # some models gather them on one rank
                launch(logits.float(), rows, masks=None).samples()

    def fairway_load_adapter(self, model: ModelConfig, adapter: int, folder: Path) -> int | str:
        """See ``RankAdapters.load``."""
        try:
            if self.fairway_adapters is None:
                self.fairway_adapters = RankAdapters(self.model_runner, model)
        except BadCheckpoint as error:
            return str(error)
        return self.fairway_adapters.load(adapter, folder)

    def fairway_drop_adapter(self, adapter: int) -> None:
        """See ``RankAdapters.drop``."""
        if self.fairway_adapters is not None:
            self.fairway_adapters.drop(adapter)

    def fairway_step(self, step: RankStep, masks: StepMasks | RuledRows | None) -> Samples | None:
        """Run a step; return its samples on the first of the ranks that have logits."""
        runner = self.model_runner
        if isinstance(masks, RuledRows):
            computed: StepMasks = Future()
            computed.set_result(masks)
            masks = computed
        for request, tokens in step.appended.items():
            _append(runner, request, tokens)
        if self.fairway_adapters is not None:
            self.fairway_adapters.step(step.adapters)
        with torch.inference_mode():
            self.execute_model(step.scheduled)  # type: ignore[attr-defined]
            state, runner.execute_model_state = runner.execute_model_state, None
            runner.kv_connector_output = None
            if state is None:
                return None  # a stage of the pipeline before the last
            scores = self._scores(step, state.hidden_states)
            if get_tensor_model_parallel_rank():
                return None
            places = [runner.input_batch.req_id_to_index[request] for request in step.sampled]
            samples = Samples([])
            if places:
                logits = state.logits[places].float()
                samples = launch(logits, step.sampling, masks=masks).samples()
            if scores is not None:
                samples.scores.update(scores.entries())
            for row in step.embedded:
                hidden = state.sample_hidden_states[places[row]]
                samples.embeddings[row] = hidden.float().cpu().numpy().tobytes()
            return samples

    def _scores(self, step: RankStep, hidden: torch.Tensor) -> Any:
        """Score prompts' tokens. Every rank takes part, because each has a part of the vocabulary."""
        if not step.scored:
            return None
        runner = self.model_runner
        starts = runner.query_start_loc.np
        rows, targets, chunks = [], [], []
        for each in step.scored:
            first = int(starts[runner.input_batch.req_id_to_index[each.request]]) + each.first
            rows.append(torch.arange(first, first + len(each.targets)))
            targets += each.targets
            chunks.append(ScoredChunk(each.index, len(each.targets), each.wanted))
        scored = ScoredRows(torch.cat(rows), torch.tensor(targets), chunks)
        states = hidden[scored.rows.to(hidden.device)]
        return launch_scores(lambda some: runner.model.compute_logits(some).float(), states, scored, TORCH)


def _append(runner: Any, request: str, tokens: list[int]) -> None:
    """Give the runner a sequence's newest tokens, where it would have put the ones that it samples itself."""
    runner.requests[request].output_token_ids.extend(tokens)
    batch = runner.input_batch
    row = batch.req_id_to_index.get(request)
    if row is None:
        return  # it enters the batch with all its tokens
    start = batch.num_tokens_no_spec[row]
    end = start + len(tokens)
    batch.token_ids_cpu[row, start:end] = tokens
    batch.is_token_ids[row, start:end] = True
    batch.num_tokens_no_spec[row] = end
