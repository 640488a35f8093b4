from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from services.core.errors import FairwayError, InternalError, InvalidInput, PromptTooLong, UnsupportedFeature
from services.core.fixed_cost.rows import RawTensor, RowEnd
from services.core.fixed_cost.signature import ANY, Operation, Signature, TensorSpec
from services.gateway.rows.inputs import check_outputs, output_tensors, tensor_rows

IDS = TensorSpec("input_ids", "INT64", (ANY,), has_length=True)
TYPES = TensorSpec("token_type_ids", "INT64", (ANY,), has_length=True, optional=True)
LOGITS = TensorSpec("logits", "FP32", (ANY, 2), has_length=True)
TOKENS = Signature(Operation.TOKENS, (IDS, TYPES), (LOGITS,), max_tokens=8, vocab_size=10)


def tensor(name: str, array: NDArray[Any]) -> RawTensor:
    datatype = {"int64": "INT64", "float32": "FP32"}[str(array.dtype)]
    return RawTensor(name, datatype, array.shape, array.tobytes())


def ids(*shape: int, value: int = 1) -> NDArray[np.int64]:
    return np.full(shape, value, np.int64)


def test_each_row_has_its_slice_of_every_tensor() -> None:
    first, second = np.arange(6).reshape(2, 3), ids(2, 3)
    found = tensor_rows([tensor("input_ids", first), tensor("token_type_ids", second)], TOKENS)
    assert found.tokens == (3, 3)
    for index, (row, types) in enumerate(found.rows):
        assert row.shape == types.shape == (3,)
        assert row.data == first[index].tobytes()
        assert types.data == second[index].tobytes()


@pytest.mark.parametrize(
    ("tensors", "kind", "text"),
    [
        ([], InvalidInput, "missing"),
        ([tensor("token_type_ids", ids(1, 2))], InvalidInput, "input_ids is missing"),
        ([tensor("x", ids(1, 2))], InvalidInput, "no input 'x'"),
        ([tensor("input_ids", ids(1, 2))] * 2, InvalidInput, "twice"),
        ([tensor("input_ids", ids(1, 9))], PromptTooLong, "at most 8"),
        ([tensor("input_ids", ids(1, 0))], InvalidInput, "shape"),
        ([tensor("input_ids", ids(1, 2, value=10))], InvalidInput, "token 10"),
        ([tensor("input_ids", ids(1, 2, value=-1))], InvalidInput, "token -1"),
        ([tensor("input_ids", ids(2))], InvalidInput, "shape"),
        ([tensor("input_ids", ids(2049, 1))], InvalidInput, "at most 2048"),
        (
            [tensor("input_ids", ids(1, 2)), tensor("token_type_ids", ids(1, 3))],
            InvalidInput,
            "another input has 2",
        ),
        (
            [tensor("input_ids", ids(2, 2)), tensor("token_type_ids", ids(1, 2))],
            InvalidInput,
            r"shape \[1, 2\]",
        ),
        ([tensor("input_ids", np.ones((1, 2), np.float32))], InvalidInput, "FP32, not INT64"),
        ([RawTensor("input_ids", "BYTES", (1, 2), b"")], UnsupportedFeature, "BYTES"),
        ([RawTensor("input_ids", "INT64", (1, 2), b"123")], InvalidInput, "3 bytes"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tensors: list[RawTensor], kind: type[FairwayError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        tensor_rows(tensors, TOKENS)


PIXELS = TensorSpec("pixel_values", "FP32", (3, ANY, ANY), is_image=True)
IMAGES = Signature(Operation.CLASSIFY, (PIXELS,), (), max_tokens=512)


def test_images_of_any_size_are_counted_in_tiles_and_charged_as_one_token() -> None:
    found = tensor_rows([tensor("pixel_values", np.zeros((2, 3, 224, 200), np.float32))], IMAGES)
    assert (found.tokens, found.tiles) == ((1, 1), (49, 49))


@pytest.mark.parametrize(("height", "width", "tiles"), [(736, 736, 529), (1, 16_385, 513)])
def test_an_image_beyond_the_largest_is_refused(height: int, width: int, tiles: int) -> None:
    with pytest.raises(InvalidInput) as refused:
        tensor_rows([tensor("pixel_values", np.zeros((1, 3, height, width), np.float32))], IMAGES)
    assert refused.value.message == (
        f"inputs.pixel_values has images of {height} x {width} pixels, which are {tiles} tiles of 32 x 32 "
        "pixels; the model takes at most 512"
    )


def test_outputs_of_rows_become_one_tensor() -> None:
    arrays = [np.full((3, 2), value, np.float32) for value in range(2)]
    ends = [RowEnd((tensor("logits", array),)) for array in arrays]
    (found,) = output_tensors(ends, (), TOKENS)
    assert found.shape == (2, 3, 2)
    assert found.data == np.stack(arrays).tobytes()


@pytest.mark.parametrize("ends", [[RowEnd()], [RowEnd((tensor("x", ids(1)),))]])
def test_a_row_without_the_output_is_a_bug(ends: list[RowEnd]) -> None:
    with pytest.raises(InternalError):
        output_tensors(ends, (), TOKENS)


def test_rows_of_different_shapes_are_not_joined() -> None:
    ends = [RowEnd((tensor("logits", np.zeros((length, 2), np.float32)),)) for length in (1, 2)]
    with pytest.raises(InternalError):
        output_tensors(ends, (), TOKENS)


@pytest.mark.parametrize("names", [["x"], ["logits", "logits"]])
def test_unknown_and_repeated_outputs_are_refused(names: list[str]) -> None:
    check_outputs(["logits"], TOKENS)
    with pytest.raises(InvalidInput):
        check_outputs(names, TOKENS)
