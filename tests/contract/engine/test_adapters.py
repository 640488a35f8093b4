"""LoRA adapters beside their base in one batch, whatever computes it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fairway.formats.adapter import adapter_bytes, parse_adapter
from fairway.formats.decoder_config import parse_config
from fairway.formats.version_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from services.core.prefix import PREFIX_BLOCK_TOKENS, prefix_chain
from services.worker.engine_protocol import (
    AdapterLoaded,
    AdapterRefused,
    DropAdapter,
    EngineConfig,
    LoadAdapter,
)
from tests.contract.engine.conftest import TINY, Engine, Output, StartEngine
from tests.support.adapters import ALL, merged, write_adapter
from tests.support.engine_agent import Agent

TOKENS = 10
# Projections, rank and other fields; as large as trained ones, since larger ones magnify each rounding.
SHAPES: list[tuple[Sequence[str], int, dict[str, Any]]] = [
    (ALL, 4, {"lora_alpha": 0.8}),
    (("q_proj", "v_proj", "o_proj"), 33, {"lora_alpha": 1.0, "use_rslora": True}),
    (("gate_proj", "down_proj"), 1, {"lora_alpha": 0.3}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(root / str(seed), TINY, seed=seed, targets=targets, rank=rank, **fields)
        for seed, (targets, rank, fields) in enumerate(SHAPES)
    ]


def answer(engine: Engine, command: LoadAdapter) -> AdapterLoaded | AdapterRefused:
    """Return what becomes of an adapter while nothing else runs."""
    engine.send(command)
    while not isinstance(event := engine.agent.receive(), AdapterLoaded | AdapterRefused):
        pass
    return event


def submit(engine: Engine, seed: int, adapter: int, **options: Any) -> int:
    drawn = random.Random(seed)
    prompt = [drawn.randrange(10, 4000) for _ in range(drawn.randrange(1, 150))]
    options = {"temperature": seed % 2, "logprobs": 2, "seed": seed, "adapter": adapter} | options
    return engine.submit(prompt, TOKENS, **options)


@pytest.fixture(scope="module")
def adapted(start_engine: StartEngine, folders: list[Path]) -> Engine:
    """An engine with adapters 1 to 3."""
    engine = start_engine()
    assert "adapters" in engine.ready.capabilities
    for number, folder in enumerate(folders, 1):
        assert isinstance(answer(engine, LoadAdapter(number, str(folder))), AdapterLoaded)
    return engine


def test_company_and_a_resume_change_no_bit(adapted: Engine) -> None:
    alone = [adapted.run(submit(adapted, seed, seed % 4))[0] for seed in range(12)]
    beside = adapted.run(*(submit(adapted, seed, seed % 4) for seed in range(12)))
    assert beside == alone
    for cut in (1, 6):
        resumed = [
            submit(adapted, seed, seed % 4, produced=output.tokens[:cut]) for seed, output in enumerate(alone)
        ]
        assert [each.tokens for each in adapted.run(*resumed)] == [each.tokens[cut:] for each in alone]


def test_rows_of_the_base_are_those_of_an_engine_without_adapters(adapted: Engine, engine: Engine) -> None:
    """The base is last and first in turn: no adapter's place is that of a row without one."""
    for place in range(4):
        seeds = range(20, 28)
        beside = adapted.run(*(submit(adapted, seed, (seed + place) % 4) for seed in seeds))
        plain = engine.run(*(submit(engine, seed, 0) for seed in seeds))
        for seed, mine, theirs in zip(seeds, beside, plain, strict=True):
            if not (seed + place) % 4:
                assert mine == theirs


def test_answers_equal_those_of_merged_weights(
    adapted: Engine, executor: str, folders: list[Path], tmp_path: Path
) -> None:
    """The reference is our own engine with the adapter added to the weights. Nothing is drawn, since a draw
    may be at the edge of two tokens."""
    if executor == "null":
        return  # it has no weights
    seeds = range(40, 52)
    mine = adapted.run(*(submit(adapted, seed, seed % 4, temperature=0.0) for seed in seeds))
    for number, folder in enumerate([TINY, *folders]):
        model = merged(tmp_path / str(number), TINY, folder) if number else TINY
        config = EngineConfig("", str(model), threads=1, kv_blocks=64, max_model_len=512)
        (socket_folder := tmp_path / f"s{number}").mkdir()
        agent = Agent(socket_folder, config)
        reference = Engine(agent)
        chosen = [seed for seed in seeds if seed % 4 == number]
        theirs = reference.run(*(submit(reference, seed, 0, temperature=0.0) for seed in chosen))
        agent.close()
        for seed, other in zip(chosen, theirs, strict=True):
            assert_close(mine[seed - seeds.start], other)


def assert_close(one: Output, other: Output) -> None:
    assert one.tokens == other.tokens
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        assert mine.sampled == pytest.approx(theirs.sampled, abs=2e-4)
        assert mine.top_logprobs == pytest.approx(theirs.top_logprobs, abs=2e-4)


def test_a_prefix_of_one_adapter_is_not_that_of_another(adapted: Engine, executor: str) -> None:
    """Roots are those of versions, so that an adapter that comes again under a new number finds its own."""
    prompt = [random.Random(9).randrange(10, 4000) for _ in range(2 * PREFIX_BLOCK_TOKENS + 5)]
    found: dict[int, Output] = {}
    for turn in range(2):
        for number in range(4):
            root = 70 + number
            chain = tuple(prefix_chain(root, prompt))
            output = adapted.alone(
                prompt, TOKENS, adapter=number, logprobs=2, prefix_root=root, prefix_hashes=chain
            )
            assert bool(output.cached) is bool(turn)
            output.cached = 0
            assert found.setdefault(number, output) == output
    if executor != "null":
        assert len({str(each.logprobs) for each in found.values()}) == 4


def test_an_adapter_without_a_deployed_base_starts_the_base(
    start_engine: StartEngine, engine: Engine, executor: str, folders: list[Path], tmp_path: Path
) -> None:
    """Its files are beside those of the base, and are no weights of that. What it takes was granted."""
    whole = tmp_path / "whole"
    shutil.copytree(TINY, whole)
    shutil.copytree(folders[0], whole, dirs_exist_ok=True)
    own = start_engine(whole)
    assert own.run(submit(own, 58, 0)) == engine.run(submit(engine, 58, 0))
    adapter, model = (json.loads((whole / name).read_bytes()) for name in (ADAPTER_CONFIG, "config.json"))
    granted = adapter_bytes(parse_adapter(adapter), parse_config(model), 4)
    assert answer(own, LoadAdapter(1, str(whole))) == AdapterLoaded(1, 0 if executor == "null" else granted)
    if executor != "null":
        assert own.run(submit(own, 58, 1)) != engine.run(submit(engine, 58, 0))


def test_a_dropped_adapter_is_gone_and_its_number_brings_no_old_weights(
    start_engine: StartEngine, executor: str, folders: list[Path]
) -> None:
    engine = start_engine()
    assert isinstance(answer(engine, LoadAdapter(1, str(folders[0]))), AdapterLoaded)
    plain, first = engine.run(submit(engine, 60, 0), submit(engine, 60, 1))
    assert isinstance(answer(engine, LoadAdapter(1, str(folders[1]))), AdapterRefused)  # it is taken
    assert engine.run(submit(engine, 60, 1)) == [first]
    engine.send(DropAdapter(1))
    (gone,) = engine.run(submit(engine, 60, 1))
    assert (gone.finish, gone.error) == ("error", "adapter 1 is not loaded")
    assert engine.run(submit(engine, 60, 0)) == [plain]
    assert isinstance(answer(engine, LoadAdapter(1, str(folders[1]))), AdapterLoaded)
    assert isinstance(answer(engine, LoadAdapter(2, str(folders[1]))), AdapterLoaded)
    again, same = engine.run(submit(engine, 60, 1), submit(engine, 60, 2))
    assert again == same
    if executor != "null":
        assert len({str(each.logprobs) for each in (plain, first, again)}) == 3


def cut_short(folder: Path) -> None:
    whole = (folder / ADAPTER_WEIGHTS).read_bytes()
    (folder / ADAPTER_WEIGHTS).write_bytes(whole[: len(whole) // 2])


def another_rank(folder: Path) -> None:
    fields = json.loads((folder / ADAPTER_CONFIG).read_bytes())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(fields | {"r": 5}))


def another_module(folder: Path) -> None:
    fields = json.loads((folder / ADAPTER_CONFIG).read_bytes())
    (folder / ADAPTER_CONFIG).write_text(json.dumps(fields | {"target_modules": ["lm_head"]}))


def no_weights(folder: Path) -> None:
    (folder / ADAPTER_WEIGHTS).unlink()


@pytest.mark.parametrize("damage", [cut_short, another_rank, another_module, no_weights])
def test_an_adapter_that_cannot_be_loaded_harms_nobody(
    adapted: Engine, executor: str, tmp_path: Path, damage: Any
) -> None:
    folder = write_adapter(tmp_path / "adapter", TINY, seed=8)
    damage(folder)
    before = adapted.run(submit(adapted, 61, 0), submit(adapted, 61, 1))
    running = adapted.submit([1, 2, 3], 40, adapter=1, credit=20)
    adapted.until(lambda: len(adapted.outputs[running].tokens) == 20)
    if executor != "null":  # the null executor reads no files
        refused = answer(adapted, LoadAdapter(50, str(folder)))
        assert isinstance(refused, AdapterRefused)
        assert refused.message
        assert refused.reason == "adapter_refused"
    (unknown,) = adapted.run(submit(adapted, 61, 50))
    assert (unknown.finish, unknown.tokens) == ("error", [])
    assert adapted.run(submit(adapted, 61, 0), submit(adapted, 61, 1)) == before
