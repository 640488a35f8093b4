"""Weights are measured from headers; a header that lies is refused before anything of its size exists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.core.errors import FailedPrecondition
from services.worker.slots.version_files import weight_bytes
from tests.support.model_folder import tensor_file


def write(path: Path, header: object, size: int | None = None) -> None:
    body = json.dumps(header).encode()
    path.write_bytes((len(body) if size is None else size).to_bytes(8, "little") + body)


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_all_tensors_of_all_files_at_the_width_they_are_loaded_with(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(tensor_file({"w": (10, 20), "scalar": ()}, "BF16"))
    (tmp_path / "b.safetensors").write_bytes(tensor_file({"v": (5,)}, "BF16"))
    write_index(tmp_path, {"w": "a.safetensors", "scalar": "a.safetensors", "v": "b.safetensors"})
    assert weight_bytes(tmp_path, 4) == 4 * (200 + 1 + 5)
    assert weight_bytes(tmp_path, 2) == 2 * (200 + 1 + 5)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_second_copy_that_no_engine_opens_does_not_count(tmp_path: Path, sharded: bool) -> None:
    """Mistral's repositories ship ``consolidated.safetensors`` beside the shards."""
    name = "model-00001-of-00001.safetensors" if sharded else "model.safetensors"
    for each in (name, "consolidated.safetensors"):
        (tmp_path / each).write_bytes(tensor_file({"w": (10, 20)}, "BF16"))
    if sharded:
        write_index(tmp_path, {"w": name})
    assert weight_bytes(tmp_path, 4) == 800


@pytest.mark.parametrize("weight_map", [{}, [], None, {"w": 3}, {"w": "../a.safetensors"}, {"w": ["a"]}])
def test_an_index_that_names_nothing_or_elsewhere_is_refused(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(FailedPrecondition, match="index"):
        weight_bytes(tmp_path, 4)


def test_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"model\.safetensors is missing"):
        weight_bytes(tmp_path, 4)


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({}, 2**62),
        ({}, 0),
        ([], None),
        ({"w": 3}, None),
        ({"w": {"shape": ["x"]}}, None),
        ({"w": {"shape": None}}, None),
        ({"w": {}}, None),
        ({"w": {"dtype": "BF16", "shape": [10, 20], "data_offsets": [0, 400]}}, None),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: object, size: int | None) -> None:
    write(tmp_path / "model.safetensors", header, size)
    with pytest.raises(FailedPrecondition, match=r"model\.safetensors"):
        weight_bytes(tmp_path, 4)


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    body = b"[" * 100_000
    (tmp_path / "model.safetensors").write_bytes(len(body).to_bytes(8, "little") + body)
    with pytest.raises(FailedPrecondition):
        weight_bytes(tmp_path, 4)
