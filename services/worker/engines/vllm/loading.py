"""From the process's configuration to vLLM's workers with a pool of the size that the memory allows.

vLLM's own core is left out: its scheduler, its prefix cache and its output processing have no part in a step.
What vLLM reads from the environment is set by whoever starts the process: ``fairway.engines``.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.connection
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
from msgspec import structs
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs do not export it
from vllm import EngineArgs
from vllm.config import VllmConfig
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.executor import Executor as Ranks
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec

from fairway.formats.config_fields import UnsupportedModel
from fairway.formats.decoder_config import parse_config
from services.runtime.process.shared_memory import SHARED, mapped_inodes
from services.worker.engine.execute.executor import Adapters, Executor, Inline, WeightStore
from services.worker.engine.execute.step_rows import Seats
from services.worker.engine.load.config import eos_ids, read_json
from services.worker.engine.load.loading import largest_batches, sized
from services.worker.engine.load.memory_meter import own_bytes
from services.worker.engine.unsupported import BadEngineConfig, LoadError
from services.worker.engine_protocol import EngineConfig, Ready
from services.worker.engines.vllm.adapters import VllmAdapters
from services.worker.engines.vllm.executor import NULL_BLOCKS, VllmRunner, files_for_vllm, portable

LEAST_BLOCK_TOKENS: Final = 32  # vLLM's attention on a CPU has no smaller blocks
RANK: Final = "services.worker.engines.vllm.rank.FairwayRank"

log = structlog.get_logger()


def load_vllm(
    config: EngineConfig, report: Callable[[str, float], None]
) -> tuple[Executor, Ready, frozenset[int], Adapters | None, WeightStore]:
    """Return an executor on ranks that have the weights and a pool, its adapters and its weights.

    Raises LoadError."""
    with files_for_vllm(Path(config.model_dir)) as folder:
        return _load(structs.replace(config, model_dir=str(folder)), report)


def _load(
    config: EngineConfig, report: Callable[[str, float], None]
) -> tuple[Executor, Ready, frozenset[int], Adapters | None, WeightStore]:
    report("weights", 0.0)
    vllm_config = vllm_config_of(config)
    model, block_size = vllm_config.model_config, vllm_config.cache_config.block_size
    config = structs.replace(config, block_size=block_size)
    before = own_bytes()
    store = _store(config) if config.nodes > 1 else None
    ranks = Ranks.get_class(vllm_config)(vllm_config)
    ranks.fairway_store = store  # it is there as long as the ranks
    watch(ranks)
    report("weights", 1.0)
    register_all_kvcache_specs(vllm_config)
    specs = ranks.get_kv_cache_specs()
    block_bytes = sum(map(_block_bytes, specs))
    weight_bytes = sum(ranks.collective_rpc("fairway_loaded", args=(before,)))
    blocks = config.kv_blocks or config.kv_memory_bytes // block_bytes - NULL_BLOCKS
    most = Ready(
        kv_blocks_total=blocks,
        block_size=block_size,
        max_model_len=min(model.max_model_len, blocks * block_size),
        vocab_size=model.get_vocab_size(),
        kv_bytes_per_block=block_bytes,
        weight_bytes=weight_bytes,
        flops_per_token=_flops_per_token(config),
    )
    report("profile", 0.0)
    largest = next(largest_batches(config, most, contexts_at_once=0))
    rows = portable(Seats(block_size).rows(largest).sampling)
    working = sum(ranks.collective_rpc("fairway_working_bytes", args=(largest.prefill_tokens, rows)))
    ready = sized(config, most, working)
    report("profile", 1.0)
    _allocate(vllm_config, ranks, specs, ready)
    unlink_shared(ranks)
    in_process = vllm_config.parallel_config.world_size == 1
    folder = Path(config.model_dir)
    stop_ids = eos_ids(folder, read_json(folder / "config.json"), ready.vocab_size)
    runner = VllmRunner(ranks, block_size=block_size, in_process=in_process)
    return Inline(runner), ready, stop_ids, _adapters(config, ranks), runner


def _flops_per_token(config: EngineConfig) -> int:
    """Return those of a dense decoder, 0 for other families."""
    try:
        return parse_config(read_json(Path(config.model_dir) / "config.json")).flops_per_token
    except UnsupportedModel:
        return 0


def _adapters(config: EngineConfig, ranks: Ranks) -> Adapters | None:
    """Return the adapters of a family whose products are ours, on a CPU as on our own engine."""
    try:
        model = parse_config(read_json(Path(config.model_dir) / "config.json"))
    except UnsupportedModel:
        return None
    return VllmAdapters(ranks, model) if config.device == "cpu" else None


def vllm_config_of(config: EngineConfig) -> VllmConfig:
    """Return vLLM's configuration, the same on every node. Raises BadEngineConfig."""
    config = structs.replace(config, block_size=max(LEAST_BLOCK_TOKENS, config.block_size))
    return checked(_arguments(config), headless=config.node > 0)


def checked(arguments: EngineArgs, *, headless: bool = False) -> VllmConfig:
    """Return vLLM's configuration of a model that it accepts. Raises BadEngineConfig."""
    try:
        return arguments.create_engine_config(headless=headless)
    except (ValueError, OSError) as error:  # pydantic's errors are ValueErrors
        raise BadEngineConfig(f"vLLM refuses the model: {_first_line(error)}") from error


def _store(config: EngineConfig) -> TCPStore:
    """Return the store of ranks of several nodes, on the socket that this process inherited."""
    host, _, port = config.store.rpartition(":")
    return TCPStore(host, int(port), is_master=True, wait_for_workers=False, master_listen_fd=config.store_fd)


def _arguments(config: EngineConfig) -> EngineArgs:
    ranks = config.tensor_parallel * config.pipeline_parallel
    host, _, port = (config.store or "127.0.0.1:0").rpartition(":")
    return EngineArgs(
        model=config.model_dir,
        load_format="safetensors",
        dtype=config.dtype,
        seed=0,
        skip_tokenizer_init=True,
        max_model_len=config.max_model_len or None,
        max_num_seqs=config.max_sequences,
        max_num_batched_tokens=config.token_budget,
        block_size=config.block_size,
        kv_cache_memory_bytes=config.kv_memory_bytes,
        tensor_parallel_size=config.tensor_parallel,
        pipeline_parallel_size=config.pipeline_parallel,
        distributed_executor_backend="mp" if ranks > 1 else "uni",
        nnodes=config.nodes,
        node_rank=config.node,
        master_addr=host,
        master_port=int(port),
        # What follows is our engine's part, or would change the shape of a step behind its back.
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_hybrid_kv_cache_manager=True,
        async_scheduling=False,
        worker_extension_cls=RANK,
    )


def _block_bytes(layers: dict[str, KVCacheSpec]) -> int:
    """Return the bytes of a KV block on one rank. Raises BadEngineConfig for a state that is no KV."""
    for spec in layers.values():
        if not isinstance(spec, FullAttentionSpec | SlidingWindowSpec):
            raise BadEngineConfig(
                f"layers with a {type(spec).__name__} are not supported: a state has no blocks"
            )
    return sum(spec.page_size_bytes for spec in layers.values())


def _allocate(
    vllm_config: VllmConfig, ranks: Ranks, specs: list[dict[str, KVCacheSpec]], ready: Ready
) -> None:
    """Allocate the pool on every rank. Raises LoadError where it would not be that of ``ready``."""
    blocks = ready.kv_blocks_total + NULL_BLOCKS
    vllm_config.cache_config.num_gpu_blocks_override = blocks
    vllm_config.model_config.max_model_len = ready.max_model_len
    ranks.collective_rpc("update_max_model_len", args=(ready.max_model_len,))
    pools = laid_out(vllm_config, ranks, specs, [blocks * _block_bytes(layers) for layers in specs])
    for pool in pools:
        if len(pool.kv_cache_groups) != 1 or pool.num_blocks != blocks:
            raise LoadError(
                f"vLLM divides the KV pool: {len(pool.kv_cache_groups)} groups, {pool.num_blocks} blocks"
            )
    vllm_config.cache_config.num_gpu_blocks = blocks
    ranks.initialize_from_config(pools)
    ranks.compile_or_warm_up_model()


def laid_out(
    vllm_config: VllmConfig, ranks: Ranks, specs: list[dict[str, KVCacheSpec]], pool_bytes: list[int]
) -> list[KVCacheConfig]:
    """Return the pool of each rank, of so many bytes, in the layout that all of them support."""
    layout = resolve_kv_cache_layout(
        vllm_config,
        ranks.get_supported_kv_cache_layouts(),
        [spec for layers in specs for spec in layers.values()],
    )
    ranks.set_kv_cache_layout(layout.name)
    pools: list[KVCacheConfig] = get_kv_cache_configs(vllm_config, specs, pool_bytes)
    for pool in pools:
        pool.kv_cache_layout = vllm_config.cache_config.kv_cache_layout
    return pools


def _first_line(error: Exception) -> str:
    """Return what the error says, without pydantic's heading and the links that follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "validation error" not in line), type(error).__name__)[:300]


def unlink_shared(ranks: Ranks) -> None:
    """Take the names of the memory that the ranks share, so that none is left behind however they end.

    Who has mapped it keeps it. What a process leaves that is killed before, its agent removes.
    """
    pids = (os.getpid(), *(worker.proc.pid for worker in getattr(ranks, "workers", ())))
    mapped = set[int]().union(*(mapped_inodes(Path(f"/proc/{pid}"), str(SHARED)) for pid in pids))
    for entry in os.scandir(SHARED):
        if entry.inode() in mapped:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


def watch(ranks: Ranks) -> None:
    """End the process with the first rank that ends: vLLM lets a step wait for it for some seconds."""
    processes = [worker.proc for worker in getattr(ranks, "workers", ())]
    if not processes:
        return
    stopping = threading.Event()
    atexit.register(stopping.set)  # runs before vLLM ends its ranks, since it is registered after that

    def wait() -> None:
        from services.worker.engine.process import (
            EngineExitCode,
        )  # imported late, because that module loads this one

        multiprocessing.connection.wait([process.sentinel for process in processes])
        if not stopping.is_set():
            log.error("rank.lost")
            os._exit(EngineExitCode.STEP_FAILED)

    threading.Thread(target=wait, name="rank-watch", daemon=True).start()
