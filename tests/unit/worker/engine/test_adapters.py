"""Adapters in the engine: answers equal those of merged weights, and company changes no bit of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fairway.formats.adapter import adapter_bytes, parse_adapter
from fairway.formats.decoder_config import parse_config
from services.core.generation import Prompt
from services.core.prefix import prefix_chain, prefix_root
from services.worker.engine.core import Engine
from services.worker.engine.load.config import read_json
from services.worker.engine_protocol import AdapterLoaded, AdapterRefused, DropAdapter, LoadAdapter, Submit
from tests.support.adapters import ALL, merged, write_adapter

pytest.importorskip("torch")
OUTPUT = 12
SOME, MLP = ("q_proj", "v_proj"), ("up_proj", "down_proj")


class Link:
    """Keeps what the engine sends."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def receive(self) -> None: ...

    def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.fixture(scope="module")
def base(save_model: Callable[..., Any]) -> Path:
    folder: Path = save_model("Llama", seed=5)[1]
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters: of every projection, of some, and of one with a rank above a vector's width."""
    root = tmp_path_factory.mktemp("adapters")
    drawn = [
        (ALL, 4, {}),
        (SOME, 3, {"use_rslora": True}),
        (MLP, 33, {}),
    ]
    return [
        write_adapter(root / str(seed), base, seed=seed, targets=targets, rank=rank, **fields)
        for seed, (targets, rank, fields) in enumerate(drawn)
    ]


@pytest.fixture
def load_with(
    load_engine: Callable[..., Engine], base: Path, adapters: list[Path]
) -> Callable[..., tuple[Engine, Link]]:
    def load(**options: Any) -> tuple[Engine, Link]:
        engine, link = load_engine(base, **options), Link()
        engine.connect(link)
        for number, folder in enumerate(adapters, 1):
            engine.apply(LoadAdapter(number, str(folder)))
        return engine, link

    return load


def drawn(seed: int, count: int = 9) -> list[Submit]:
    """Return sequences of the base and of every adapter in turn, with prompts of many lengths."""
    from services.core.generation import OutputLimits, Sampling

    rng = random.Random(seed)
    return [
        Submit(
            handle=number,
            prompt=Prompt([rng.randrange(101) for _ in range(rng.randrange(1, 50))]),
            sampling=Sampling(seed=number, temperature=0.0 if number % 2 else 0.8, logprobs=3),
            limits=OutputLimits(OUTPUT, ignore_eos=True),
            credit_limit=1 << 20,
            adapter=number % 4,
        )
        for number in range(count)
    ]


def test_answers_equal_those_of_merged_weights(
    load_with: Any, load_engine: Any, drive: Any, base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    engine, _ = load_with()
    mine = drive(engine, drawn(1))
    for number, adapter in enumerate(adapters, 1):
        reference = load_engine(merged(tmp_path / str(number), base, adapter))
        submits = [one for one in drawn(1) if one.adapter == number]
        theirs = drive(reference, [structs.replace(one, adapter=0) for one in submits])
        for handle, tokens in theirs.tokens.items():
            assert mine.tokens[handle] == tokens
            for one, other in zip(mine.logprobs[handle], theirs.logprobs[handle], strict=True):
                assert one.sampled == pytest.approx(other.sampled, abs=1e-4)
                assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("speculation", ["off", "prompt_lookup"])
def test_company_chunks_and_resumes_change_no_bit(load_with: Any, drive: Any, speculation: str) -> None:
    together = drive(load_with(speculation=speculation)[0], drawn(2))
    chunked = drive(load_with(token_budget=9, max_sequences=3)[0], drawn(2))
    assert (together.tokens, together.logprobs) == (chunked.tokens, chunked.logprobs)
    alone, _ = load_with()
    for submit in drawn(2):
        found = drive(alone, [submit])
        assert found.tokens[submit.handle] == together.tokens[submit.handle]
        assert found.logprobs[submit.handle] == together.logprobs[submit.handle]
        produced = together.tokens[submit.handle][:5]
        resumed = structs.replace(submit, handle=100 + submit.handle, produced_ids=produced)
        assert drive(alone, [resumed]).tokens[100 + submit.handle] == together.tokens[submit.handle]


def test_rows_of_the_base_are_those_of_an_engine_without_adapters(
    load_with: Any, load_engine: Any, drive: Any, base: Path
) -> None:
    mine = drive(load_with()[0], drawn(3))
    of_base = [one for one in drawn(3) if not one.adapter]
    theirs = drive(load_engine(base), of_base)
    for one in of_base:
        assert mine.logprobs[one.handle] == theirs.logprobs[one.handle]
    differ = [one.handle for one in drawn(3) if one.adapter]
    plain = drive(load_engine(base), [structs.replace(one, adapter=0) for one in drawn(3)])
    assert all(mine.logprobs[handle] != plain.logprobs[handle] for handle in differ)


def test_kv_of_one_adapter_is_not_that_of_another(
    load_with: Any, load_engine: Any, drive: Any, base: Path
) -> None:
    """The roots of prefix names are those of versions: what one cached no other takes."""
    prompt = [number % 101 for number in range(100)]
    engine, _ = load_with(max_model_len=128)
    versions = ["sha256:" + digit * 64 for digit in "0123"]
    found: dict[int, Any] = {}
    for turn in range(2):
        for number, version in enumerate(versions):
            root = prefix_root(b"secret", "tenant", version)
            named = Prompt(prompt, prefix_chain(root, prompt), root)
            one = structs.replace(drawn(4)[0], handle=10 * turn + number, prompt=named, adapter=number)
            outcome = drive(engine, [one])
            assert (outcome.prefill_tokens == 100) is (turn == 0)
            assert found.setdefault(number, outcome.logprobs[one.handle]) == outcome.logprobs[one.handle]
            fresh = load_with(prefix_cache=False)[0] if not turn else engine
            assert (
                drive(fresh, [structs.replace(one, handle=99 + number)]).logprobs[99 + number]
                == (found[number])
            )
    assert len({str(each) for each in found.values()}) == len(versions)


def test_what_is_loaded_is_reported_and_what_is_not_is_refused(
    load_with: Any, base: Path, adapters: list[Path], drive: Any, tmp_path: Path
) -> None:
    engine, link = load_with()
    model = parse_config(read_json(base / "config.json"))
    sizes = [
        adapter_bytes(parse_adapter(read_json(folder / "adapter_config.json")), model, 4)
        for folder in adapters
    ]
    assert link.sent == [AdapterLoaded(number, size) for number, size in enumerate(sizes, 1)]
    engine.apply(LoadAdapter(9, str(tmp_path)))
    engine.apply(LoadAdapter(1, str(adapters[0])))
    assert [type(each) for each in link.sent[3:]] == [AdapterRefused] * 2
    unknown = structs.replace(drawn(5)[0], adapter=9)
    assert drive(engine, [unknown]).finished == {unknown.handle: "error"}
    engine.apply(DropAdapter(2))
    dropped = structs.replace(drawn(5)[0], handle=50, adapter=2)
    assert drive(engine, [dropped]).finished == {50: "error"}
    others = [one for one in drawn(5) if one.adapter != 2]
    assert set(drive(engine, others).finished.values()) == {"length"}
