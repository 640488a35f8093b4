"""A version's probe by its header: what fits is served, what does not is named, by engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from fairway.formats.safetensors import BadHeader, metadata_of
from fairway.formats.servable import Kind, engine_problems, tensor_files
from fairway.formats.version_files import name_problem, weights_digest
from tests.support.model_folder import header_of
from tests.unit.formats.test_servable import PLAIN, reader

PROBE = "safety_probe.safetensors"
POLICY = "safety_policy.json"
RULE = {"categories": {"toxic": {"action": "stop"}}, "probe": {"category": "toxic", "threshold": 0.5}}
MLP = {"architectures": ["Mlp"], "input_size": 4, "layers": [{"size": 2}]}


def probe(
    rows: int = 2, columns: int = 32, dtype: str = "F32", *, bias: int = 2, labels: Any = None
) -> bytes:
    """Return the header of a probe."""
    fields = json.loads(header_of({"weight": (rows, columns), "bias": (bias,)}, dtype))
    names = json.dumps(["a", "b"]) if labels is None else labels
    return json.dumps({"__metadata__": {"categories": names}} | fields).encode()


def problems(files: dict[str, Any], header: bytes | None, kind: Kind = "causal-lm") -> tuple[str, str]:
    """Return why our engine and vLLM do not serve the files."""
    plain = reader(files)
    names = [*files, *([] if header is None else [PROBE])]
    read: Callable[[str], bytes] = lambda name: header if name == PROBE and header else plain(name)  # noqa: E731
    found = engine_problems(names, read, kind)
    return found["torch"], found["vllm"]


def test_a_probe_is_served_by_the_engine_and_ignored_by_vllm() -> None:
    assert problems(PLAIN, probe()) == ("", "")
    assert problems(PLAIN, probe(dtype="BF16")) == ("", "")
    assert tensor_files([*PLAIN, PROBE], reader(PLAIN)) == (PROBE, "model.safetensors")


def test_a_pack_that_needs_a_probe_is_refused_by_vllm_by_name() -> None:
    own, other = problems(PLAIN | {POLICY: RULE}, probe())
    assert own == ""
    assert other == (
        "safety_policy.json: probe: vLLM's workers do not pass on the hidden states that it judges"
    )
    assert problems(PLAIN | {POLICY: {}}, None) == ("", "")


def test_a_pack_that_needs_a_probe_is_refused_without_one() -> None:
    own, other = problems(PLAIN | {POLICY: RULE}, None)
    assert "the version has no safety_probe.safetensors" in own
    assert other


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (probe(columns=31), "weight has shape (2, 31), the configuration says (2, 32)"),
        (probe(rows=3), "weight has shape (3, 32)"),
        (probe(bias=1), "bias has shape (1,)"),
        (probe(dtype="F64"), "dtype F64"),
        (probe(labels="a,b"), "a JSON list of names"),
        (probe(labels="[]"), "1 to 16 different names, not 0"),
        (probe(17, bias=17, labels=json.dumps([f"c{n}" for n in range(17)])), "not 17"),
        (probe(labels='["a", "A"]'), "'A' is no name of a category"),
        (header_of({"weight": (2, 32), "bias": (2,)}), "its metadata has no categories"),
        (b"[]", "header"),
    ],
)
def test_a_probe_that_does_not_fit_is_named(header: bytes, words: str) -> None:
    own, _ = problems(PLAIN, header)
    assert own.startswith("safety_probe.safetensors: ")
    assert words in own


def test_a_fixed_cost_model_has_no_probe() -> None:
    files = {"config.json": MLP, "model.safetensors": 0}
    assert "no output for a probe" in problems(files, probe(), "fixed-cost")[0]
    assert "no output for a probe" in problems(files | {POLICY: RULE}, None, "fixed-cost")[0]


def test_a_probe_counts_as_weights() -> None:
    plain = [("config.json", "sha256:0"), ("model.safetensors", "sha256:1")]
    assert name_problem(PROBE) == ""
    assert weights_digest([*plain, (PROBE, "sha256:2")]) not in (
        weights_digest(plain),
        weights_digest([*plain, (PROBE, "sha256:3")]),
    )


def test_metadata_that_is_no_text_is_a_bad_header() -> None:
    assert metadata_of(b"{}") == {}
    with pytest.raises(BadHeader):
        metadata_of(b'{"__metadata__": {"categories": ["a"]}}')
