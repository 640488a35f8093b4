"""A real pool is made smaller and larger amid a run: the tokens stay, and the memory comes back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.engine.core import Engine
from services.worker.engine.execute.kv_cache import KvCache, KvShape
from services.worker.engine.execute.torch_executor import TorchExecutor
from services.worker.engine.load.memory_meter import own_bytes
from services.worker.engine.native.attention import NativeKvCache
from services.worker.engine_protocol import Resize, Resized, Stepped, Submit

Load = Callable[..., Engine]
SHAPE = KvShape(layers=2, kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32)
BLOCKS = 4096  # 32 MiB of that shape
MIB = 2**20


@pytest.fixture(scope="module")
def folder(save_model: Callable[..., Any]) -> Path:
    path: Path = save_model("Llama", seed=3)[1]
    return path


class Resizing:
    """An engine that is told another size each few steps, by what stands for its process."""

    def __init__(self, engine: Engine, sizes: list[int]) -> None:
        self.engine = engine
        self.said: list[int] = []
        self._sizes = sizes
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def apply(self, command: Submit) -> None:
        self.engine.apply(command)

    def step(self) -> Stepped:
        self._steps += 1
        if self._steps % 3 == 0 and self._sizes:
            self.engine.apply(Resize(self._sizes.pop(0)))
        if (resized := self.engine.resized()) is not None:
            self.said.append(resized.kv_blocks_total)
        return self.engine.step()

    def check_integrity(self) -> None:
        self.engine.check_integrity()


@pytest.mark.parametrize(
    "options",
    [
        {"operators": "native"},
        {"operators": "torch"},
        {"operators": "native", "speculation": "prompt_lookup", "prefix_cache": False},
        {"operators": "native", "speculation": "draft"},
    ],
    ids=["native", "torch", "prompt_lookup", "draft"],
)
def test_tokens_are_those_of_a_pool_that_stays(
    load_engine: Load,
    drive: Callable[..., Any],
    submit: Callable[..., Any],
    folder: Path,
    options: dict[str, Any],
) -> None:
    submits = [
        submit(
            handle, [3 + place % 7 for place in range(6 + handle)], 24, temperature=handle % 2, seed=handle
        )
        for handle in range(6)
    ]
    if options.get("speculation") == "draft":
        options = options | {"draft_model_dir": str(folder)}
    expected = drive(load_engine(folder, max_model_len=64, **options), submits)
    resizing = Resizing(load_engine(folder, max_model_len=64, **options), [40, 16, 200, 17, 256, 30, 90, 16])
    outcome = drive(resizing, submits)
    assert outcome.tokens == expected.tokens
    assert outcome.finished == expected.finished
    assert len(resizing.said) >= 5
    assert resizing.engine.planner.preemptions > 0, "nobody had to give way"


class MovedKvCache(KvCache):
    """A pool on the CPU that moves as one on a device does."""

    def __init__(self, shape: KvShape, blocks: int, device: torch.device, **sizes: int) -> None:
        super().__init__(shape, blocks, device, **sizes)
        self._reserved = ()
        self._keys, self._values = ([self._layer(blocks) for _ in range(shape.layers)] for _ in range(2))


@pytest.mark.parametrize("kind", [KvCache, MovedKvCache])
def test_what_the_first_blocks_hold_is_kept(kind: type[KvCache]) -> None:
    cache = kind(SHAPE, 4, torch.device("cpu"), most_blocks=8, spare_blocks=1)
    keys = torch.arange(4 * 16 * 2 * 16, dtype=torch.float32).view(-1, 2, 16)
    for layer in range(2):
        cache.write(layer, torch.arange(64), keys, -keys)
    for blocks in (8, 2, 6):
        cache.resize(blocks)
        assert cache.blocks == blocks
        for layer in range(2):
            kept_keys, kept_values = cache.run(layer, 0, 32)
            assert torch.equal(kept_keys, keys[:32])
            assert torch.equal(kept_values, -keys[:32])
    cache.write(1, torch.arange(64, 112), keys[:48], keys[:48])  # up to the end of the spare block
    assert torch.equal(cache.run(1, 64, 48)[0], keys[:48])
    with pytest.raises(MemoryError):
        cache.resize(9)
    assert cache.blocks == 6


def test_a_pool_that_cannot_grow_stays_as_it_is() -> None:
    class Short(MovedKvCache):
        left = 1 << 30

        def _layer(self, blocks: int) -> torch.Tensor:
            Short.left -= blocks > 4
            if blocks > 4 and Short.left < 0:
                raise torch.OutOfMemoryError("of the device")
            return super()._layer(blocks)

    cache = Short(SHAPE, 4, torch.device("cpu"), most_blocks=8)
    keys = torch.randn(64, 2, 16)
    cache.write(1, torch.arange(64), keys, keys)
    Short.left = 3  # of the four tensors
    with pytest.raises(MemoryError):
        cache.resize(8)
    assert [len(cache.pool(layer)[0]) for layer in range(2)] == [64, 64]
    assert torch.equal(cache.run(1, 0, 64)[1], keys)


@pytest.mark.parametrize("native", [True, False])
def test_memory_is_taken_when_written_and_given_back(native: bool) -> None:
    cache = (
        NativeKvCache(SHAPE, BLOCKS, most_blocks=8 * BLOCKS)
        if native
        else KvCache(SHAPE, BLOCKS, torch.device("cpu"), most_blocks=8 * BLOCKS)
    )
    began = own_bytes()
    cache.resize(8 * BLOCKS)
    assert own_bytes() - began < 8 * MIB, "growing takes nothing"
    pools = [pool for layer in range(SHAPE.layers) for pool in _layer(cache, layer)]
    for pool in pools:
        pool[: len(pool) // 8] = 1.0  # the first BLOCKS
    full = own_bytes()
    assert full - began >= 28 * MIB
    cache.resize(BLOCKS // 4)
    assert full - own_bytes() >= 20 * MIB, "24 MiB were beyond the end"
    for pool in pools:
        assert bool((pool[: len(pool) // 32] == 1.0).all())


def _layer(cache: KvCache | NativeKvCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.pool(layer) if isinstance(cache, KvCache) else (cache.keys[layer], cache.values[layer])


def test_the_engine_says_what_it_became(load_engine: Load, folder: Path) -> None:
    engine = load_engine(folder, max_model_len=64)
    engine.apply(Resize(1))
    assert engine.resized() == Resized(16), "what a sequence of 64 tokens needs stays"
    engine.apply(Resize(1 << 20))
    assert engine.resized() == Resized(16), "there are no addresses for so many"


class _Watched:
    """A pool and what is built over it; says in which order it was used."""

    block_size = 16

    def __init__(self) -> None:
        self.built = 0
        self.warm: list[bool] = []
        self.events: list[str] = []

    def copy(self, copies: object) -> None: ...

    def moving_bytes(self, blocks: int) -> int:
        return 0

    def resize(self, blocks: int) -> None:
        gc.collect()
        self.events.append(f"resized to {blocks}")
        if blocks > 100:
            raise MemoryError

    def build(self, warm: bool) -> tuple[Any, Any]:
        self.warm.append(warm)
        self.built += 1
        self.events.append(f"built {self.built}")
        graphs = _Graphs()
        weakref.finalize(graphs, self.events.append, f"freed {self.built}")
        return graphs, graphs


class _Graphs:
    """What holds pointers into a pool of one size."""


def test_what_points_into_the_pool_is_gone_before_it_moves_and_made_anew() -> None:
    pool = _Watched()
    executor = TorchExecutor(*pool.build(True), pool, rebuild=pool.build)
    executor.resize(5)
    with pytest.raises(MemoryError):
        executor.resize(101)
    assert pool.events == [
        "built 1", "freed 1", "resized to 5", "built 2", "freed 2", "resized to 101", "built 3"
    ]  # fmt: skip
    assert pool.warm == [True, False, False], "graphs are captured while it serves, one when it is used"
    executor.resize(6, warm=True)
    assert pool.warm[-1]
