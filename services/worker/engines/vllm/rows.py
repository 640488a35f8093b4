"""Runs batches of a text encoder on a vLLM worker: each is a step of whole prompts, answered by its pooler.

Fairway's batcher has decided what vLLM's scheduler would. vLLM checks nothing: what a row may hold is checked
by ``problem``, before it is batched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
from vllm import EngineArgs
from vllm.config import PoolerConfig, VllmConfig
from vllm.model_executor.models.bert import TOKEN_TYPE_SHIFT
from vllm.pooling_params import PoolingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.executor import Executor as Ranks

from fairway.formats.fixed_cost.encoder_config import EncoderConfig
from fairway.formats.vllm_models import encoder_problem
from services.core.fixed_cost.signature import Operation
from services.worker.batcher.models.loading import declared_in
from services.worker.batcher.models.model import ModelFacts, Outputs, Pause, no_pause
from services.worker.batcher.models.rows import Batch, Packed, Row
from services.worker.batcher.models.text import facts_of, token_problem
from services.worker.batcher.policy.start import MOST_PADDED_TOKENS, MOST_ROWS
from services.worker.engine.load.memory_meter import own_bytes
from services.worker.engine.process import EngineExitCode
from services.worker.engine.unsupported import BadCheckpoint, BadEngineConfig
from services.worker.engine_protocol import EngineConfig
from services.worker.engines.vllm.loading import LEAST_BLOCK_TOKENS, RANK, checked, laid_out, unlink_shared

CANARY_TOKENS: Final = (1, 5, 40, 97, 512)
_TASKS: Final = {
    Operation.EMBED: "embed",
    Operation.CLASSIFY: "classify",
    Operation.SCORE: "classify",
    Operation.TOKENS: "token_classify",
}

log = structlog.get_logger()


class VllmRows:
    """Implements ``FixedCostModel``. Rows are packed in any case, and nothing runs between its layers."""

    def __init__(self, ranks: Any, config: EncoderConfig, facts: ModelFacts) -> None:
        """``ranks`` is vLLM's executor. Raises BadCheckpoint for weights that compute no finite numbers."""
        self._ranks = ranks
        self._config = config
        self.facts = facts
        self._most_tokens = most_tokens(config)
        # Only an embedding is normalised: logits become scores in a gateway.
        self._parameters = partial(
            PoolingParams, task=_TASKS[facts.operation], use_activation=config.normalize
        )
        self._numbers = count()
        self._gone: set[str] = set()
        self._known = {"input_ids": np.full(1, (config.padding_id + 1) % config.vocab_size, np.int64)}
        self._answer: Outputs = {}
        (self._answer,) = self.run(Packed([self._known]))
        if not all(np.isfinite(values).all() for values in self._answer.values()):
            raise BadCheckpoint("the outputs are not finite in the warm-up: the weights are at fault")

    def problem(self, row: Row) -> str:
        """See ``FixedCostModel``."""
        config = self._config
        if found := token_problem(row, self.facts, config):
            return found
        if config.family.positions_after_padding and (row["input_ids"] == config.padding_id).any():
            return f"vLLM has no position for the padding token {config.padding_id}: remove it from input_ids"
        return ""

    def run(self, batch: Batch, pause: Pause = no_pause) -> list[Outputs]:
        """See ``FixedCostModel``. After an exception it answers as before, or the process ends."""
        try:
            return [output for rows in self._steps(batch.rows) for output in self._step(rows)]
        except Exception:
            if self._answer and not self._is_sound():
                raise SystemExit(EngineExitCode.STEP_FAILED) from None
            raise

    def _is_sound(self) -> bool:
        """Return whether the row of the warm-up has the same answer: an exception may leave half a step."""
        try:
            (answer,) = self._step([self._known])
        except Exception:
            return False
        return all(np.array_equal(answer[name], values) for name, values in self._answer.items())

    def _steps(self, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        """Yield the rows in parts that vLLM's buffers take."""
        first = tokens = 0
        for place, row in enumerate(rows):
            size = len(row["input_ids"])
            if tokens + size > self._most_tokens or place - first == MOST_ROWS:
                yield rows[first:place]
                first, tokens = place, 0
            tokens += size
        yield rows[first:]

    def _step(self, rows: Sequence[Row]) -> list[Outputs]:
        names = [str(next(self._numbers)) for _ in rows]
        scheduled = SchedulerOutput(
            scheduled_new_reqs=[self._request(name, row) for name, row in zip(names, rows, strict=True)],
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            num_scheduled_tokens={name: len(row["input_ids"]) for name, row in zip(names, rows, strict=True)},
            total_num_scheduled_tokens=sum(len(row["input_ids"]) for row in rows),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(self._gone),
            free_encoder_mm_hashes=[],
        )
        self._gone.update(names)  # also what a step leaves that raises
        found = self._ranks.execute_model(scheduled)
        self._gone = set(names)
        pooled = dict(zip(found.req_ids, found.pooler_output, strict=True))
        (output,) = self.facts.outputs
        return [{output.name: pooled[name].float().numpy()} for name in names]

    def _request(self, name: str, row: Row) -> NewRequestData:
        ids = row["input_ids"]
        if "token_type_ids" in row:  # vLLM's encoders read the type of a token from a bit of its id
            ids = ids | row["token_type_ids"] << TOKEN_TYPE_SHIFT
        return NewRequestData(
            req_id=name,
            prompt_token_ids=ids.tolist(),
            mm_features=[],
            sampling_params=None,
            pooling_params=self._parameters(),
            block_ids=(),
            num_computed_tokens=0,
            lora_request=None,
        )


def most_tokens(config: EncoderConfig) -> int:
    """Return the most tokens of a step."""
    return max(MOST_PADDED_TOKENS, config.max_tokens)


def load_rows(config: EngineConfig, report: Callable[[str, float], None]) -> VllmRows:
    """Return the model that the folder declares, after one run. Raises LoadError, UnsupportedModel."""
    encoder = declared_in(Path(config.model_dir))
    if problem := encoder_problem(encoder):
        raise BadEngineConfig(problem)
    assert isinstance(encoder, EncoderConfig), "others have a problem"
    vllm_config = checked(_arguments(config, encoder))
    before = own_bytes()
    ranks = Ranks.get_class(vllm_config)(vllm_config)
    report("weights", 1.0)
    _prepare(vllm_config, ranks)
    (weight_bytes,) = ranks.collective_rpc("fairway_loaded", args=(before,))
    unlink_shared(ranks)
    facts = replace(facts_of(encoder), dtype=config.dtype, weight_bytes=weight_bytes, pauses=False)
    model = VllmRows(ranks, encoder, facts)
    if config.device == "cpu" and config.dtype == "float32" and config.mode != "free":
        report("canary", 0.0)
        model.facts = replace(facts, exact=is_exact(model, encoder))
    return model


def is_exact(model: VllmRows, encoder: EncoderConfig) -> bool:
    """Return whether drawn rows have the same bits alone and in company."""
    drawn = np.random.default_rng(0)
    sizes = [min(tokens, encoder.max_tokens) for tokens in CANARY_TOKENS]
    rows = [{"input_ids": drawn.integers(encoder.vocab_size, size=size)} for size in sizes]
    alone = [model.run(Packed([row]))[0] for row in rows]
    together = model.run(Packed(rows + rows[::-1]))
    same = all(
        np.array_equal(one[name], other[name])
        for one, other in zip(alone + alone[::-1], together, strict=True)
        for name in one
    )
    if not same:
        log.warning("canary.not_exact", dtype=model.facts.dtype)
    return same


def _arguments(config: EngineConfig, encoder: EncoderConfig) -> EngineArgs:
    return EngineArgs(
        model=config.model_dir,
        runner="pooling",
        load_format="safetensors",
        dtype=config.dtype,
        seed=0,
        skip_tokenizer_init=True,
        max_model_len=encoder.max_tokens,
        max_num_seqs=MOST_ROWS,
        max_num_batched_tokens=most_tokens(encoder),
        block_size=LEAST_BLOCK_TOKENS,
        kv_cache_memory_bytes=config.kv_memory_bytes,
        distributed_executor_backend="uni",
        pooler_config=PoolerConfig(
            seq_pooling_type="MEAN" if encoder.head == "embedding" and encoder.pooling == "mean" else "CLS",
            tok_pooling_type="ALL",
        ),
        # Activations are computed in a gateway, and vLLM loads none but those that it lists.
        hf_overrides={"sbert_ce_default_activation_function": None, "sentence_transformers": {}},
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        async_scheduling=False,
        worker_extension_cls=RANK,
    )


def _prepare(vllm_config: VllmConfig, ranks: Ranks) -> None:
    """Set the worker up without a KV pool. Raises BadEngineConfig for a model that needs one."""
    register_all_kvcache_specs(vllm_config)
    specs = ranks.get_kv_cache_specs()
    if any(specs):
        raise BadEngineConfig("the model keeps KV, which a batch of rows has not")
    ranks.initialize_from_config(laid_out(vllm_config, ranks, specs, [0] * len(specs)))
    ranks.compile_or_warm_up_model()
