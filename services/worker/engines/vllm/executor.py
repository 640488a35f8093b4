"""Runs batches of our engine on vLLM's workers: our planner has decided what vLLM's scheduler would."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.probe import PROBE
from fairway.formats.version_files import ADAPTER_CONFIG, ADAPTER_FILES
from fairway.formats.weights import read_tensors
from services.core.generation import OutputLimits, Prompt, Sampling
from services.worker.engine.execute.executor import Batch, Samples
from services.worker.engine.execute.step_rows import DRAWN, FILTERED, SamplingRows, Seats
from services.worker.engine.load.config import names_in, read_part
from services.worker.engine.sequence import SequenceState, sequence_of
from services.worker.engine.unsupported import BadCheckpoint
from services.worker.engine_protocol import Submit
from services.worker.engines.vllm.rank import RankStep, Scored

# Stands for a sequence of which the sampler reads nothing.
UNREAD: Final = sequence_of(
    Submit(0, Prompt(()), Sampling(seed=0), OutputLimits(1), credit_limit=0), arrival=0, eos_ids=frozenset()
)
NULL_BLOCKS: Final = 1  # vLLM's first block belongs to nobody: its kernels may write there


@contextlib.contextmanager
def files_for_vllm(folder: Path) -> Iterator[Path]:
    """Yield a folder without an adapter's files and without a probe: vLLM would take them for weights of the
    model."""
    if not (folder / ADAPTER_CONFIG).exists() and not (folder / PROBE).exists():
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="fw-base-") as base:
        for entry in folder.iterdir():
            if entry.name not in (*ADAPTER_FILES, PROBE):
                (Path(base) / entry.name).symlink_to(entry.resolve())
        yield Path(base)


@dataclass(slots=True, eq=False)
class _Known:
    """What the ranks have of a sequence."""

    sequence: SequenceState
    request: str
    first_tokens: int  # tokens that it came with
    tokens: int
    blocks: list[int] = field(default_factory=list)
    version: int = -1


@dataclass(frozen=True, slots=True)
class _Changes:
    """What a step is for the ranks, by request."""

    known: CachedRequestData
    new: list[NewRequestData] = field(default_factory=list)
    appended: dict[str, list[int]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # tokens that the step computes
    adapters: dict[str, int] = field(default_factory=dict)  # adapters of the requests that have one


class VllmRunner:
    """Implements ``Runner`` and ``WeightStore``."""

    def __init__(self, ranks: Any, *, block_size: int, in_process: bool) -> None:
        """``ranks`` is vLLM's executor."""
        self._ranks = ranks
        self._seats = Seats(block_size)
        self._in_process = in_process
        self._known: dict[int, _Known] = {}
        self._gone: set[str] = set()
        self._arrivals = 0

    def run(self, batch: Batch) -> Samples:
        """See ``Runner``."""
        rows = self._seats.rows(batch)
        if self._in_process:
            step, masks = self._step(batch, rows.sampling), batch.masks
            return self._first(self._ranks.collective_rpc("fairway_step", args=(step, masks)))
        step = self._step(batch, portable(rows.sampling))
        ruled = None if batch.masks is None else batch.masks.result()
        return self._first(self._ranks.collective_rpc("fairway_step", args=(step, ruled)))

    @staticmethod
    def _first(samples: list[Samples | None]) -> Samples:
        """Return those of the one rank that samples."""
        return next(each for each in samples if each is not None)

    def resize(self, blocks: int) -> None:
        """vLLM's pool has one size. Raises MemoryError."""
        raise MemoryError("the KV pool of a vLLM engine keeps its size")

    def check_weights(self, folder: Path) -> None:
        """See ``WeightStore``. The agent has compared names and shapes; vLLM checks nothing before."""
        try:
            read_tensors("", names_in(folder), partial(read_part, folder))
        except (UnsupportedModel, ValueError, OSError) as error:
            raise BadCheckpoint(f"the weights cannot be read: {error}") from error

    def replace_weights(self, folder: Path, report: Callable[[float], None]) -> None:
        """See ``WeightStore``. vLLM copies into the weights that it has, tensor by tensor."""
        with files_for_vllm(folder) as files:
            self._ranks.collective_rpc("fairway_replace_weights", args=(files,))
        report(1.0)

    def _step(self, batch: Batch, sampling: SamplingRows) -> RankStep:
        changes = _Changes(CachedRequestData.make_empty())
        self._release()
        for sequence in batch.decodes:
            self._place(sequence, len(sequence.tokens) - 1, len(sequence.tokens), changes)
        for chunk in batch.prefills:
            self._place(chunk.sequence, chunk.start, chunk.end, changes)
        copies = [KVCacheBlockCopy(a + NULL_BLOCKS, b + NULL_BLOCKS) for a, b in batch.copies]
        scheduled = SchedulerOutput(
            scheduled_new_reqs=changes.new,
            scheduled_cached_reqs=changes.known,
            num_scheduled_tokens=changes.counts,
            total_num_scheduled_tokens=sum(changes.counts.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=self._gone,
            free_encoder_mm_hashes=[],
            kv_cache_block_copies=copies or None,
        )
        self._gone = set()
        names = [self._known[id(sequence)].request for sequence in batch.sampled]
        return RankStep(
            scheduled,
            changes.appended,
            names,
            sampling,
            batch.embedded,
            self._scored(batch),
            changes.adapters,
        )

    def _place(self, sequence: SequenceState, start: int, end: int, changes: _Changes) -> None:
        """Note that the step computes ``tokens[start:end]``, and what the ranks do not have of it yet."""
        known = self._known.get(id(sequence))
        if known is None:
            known = self._introduce(sequence, start, changes)
        else:
            cached = changes.known
            cached.req_ids.append(known.request)
            cached.new_block_ids.append(self._new_blocks(known, cached))
            cached.num_computed_tokens.append(start)
            if fresh := sequence.tokens[known.tokens :]:
                changes.appended[known.request] = list(fresh)
                known.tokens = len(sequence.tokens)
            cached.num_output_tokens.append(known.tokens - known.first_tokens)
        changes.counts[known.request] = end - start
        if sequence.adapter:
            changes.adapters[known.request] = sequence.adapter

    def _introduce(self, sequence: SequenceState, start: int, changes: _Changes) -> _Known:
        self._arrivals += 1
        size = len(sequence.tokens)
        known = _Known(sequence, f"{sequence.handle}-{self._arrivals}", size, size)
        known.blocks, known.version = list(sequence.blocks), sequence.table_version
        self._known[id(sequence)] = known
        changes.new.append(
            NewRequestData(
                req_id=known.request,
                prompt_token_ids=list(sequence.tokens),
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0),
                pooling_params=None,
                block_ids=([block + NULL_BLOCKS for block in known.blocks],),
                num_computed_tokens=start,
                lora_request=None,
            )
        )
        return known

    @staticmethod
    def _new_blocks(known: _Known, cached: CachedRequestData) -> tuple[list[int], ...] | None:
        sequence = known.sequence
        if known.version == sequence.table_version:
            return None
        known.version = sequence.table_version
        before, known.blocks = known.blocks, list(sequence.blocks)
        if known.blocks[: len(before)] == before:
            more = [block + NULL_BLOCKS for block in known.blocks[len(before) :]]
            return (more,) if more else None
        cached.resumed_req_ids.add(known.request)
        return ([block + NULL_BLOCKS for block in known.blocks],)

    def _release(self) -> None:
        """Forget the sequences that lost their KV or ended."""
        ended = [key for key, known in self._known.items() if not known.sequence.blocks]
        for key in ended:
            self._gone.add(self._known.pop(key).request)

    def _scored(self, batch: Batch) -> list[Scored]:
        found = []
        for index, chunk in enumerate(batch.prefills):
            if places := chunk.scored:
                targets = list(chunk.sequence.tokens[places.start : places.stop])
                wanted = chunk.sequence.sampling.prompt_logprobs or 0
                request = self._known[id(chunk.sequence)].request
                found.append(Scored(request, index, places.start - 1 - chunk.start, targets, wanted))
        return found


def portable(rows: SamplingRows) -> SamplingRows:
    """Return rows for another process, with the sequences that the sampler reads alone."""
    read = set(np.flatnonzero(rows.columns.flags & ~np.uint8(DRAWN | FILTERED)).tolist())
    sequences = [
        replace(sequence, blocks=[], prefix_names=[]) if row in read else UNREAD
        for row, sequence in enumerate(rows.sequences)
    ]
    return replace(rows, sequences=sequences)
