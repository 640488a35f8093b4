"""Pictures in a real text process: the pixels are those of transformers, and no file ends anything."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import nullcontext, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from services.core.errors import InvalidInput, UnsupportedFeature
from services.core.fixed_cost.signature import Operation
from services.gateway.text.pool import TextProcesses
from services.gateway.text.text_model import PictureFile, TextModel
from services.runtime.clock import SystemClock
from services.runtime.supervisor import Supervisor
from services.runtime.telemetry.metrics import Metrics
from tests.support import fixed_cost, picture_files

CLOCK = SystemClock()
DIGEST = "sha256:" + "ab" * 32
RESNET = {"feature_extractor_type": "ConvNextFeatureExtractor", "crop_pct": 0.875, "resample": 3, "size": 48}
NORMAL = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
PROCESSORS: list[tuple[str, dict[str, Any]]] = [
    ("ViT", {"image_processor_type": "ViTImageProcessor", "size": {"height": 12, "width": 8}}),
    ("ViT", {"image_processor_type": "ViTImageProcessorFast", "size": {"height": 12, "width": 8}, **NORMAL}),
    ("ViT", {"feature_extractor_type": "ViTFeatureExtractor", "do_normalize": False, "resample": 3}),
    ("ResNet", {**RESNET, **NORMAL}),
    ("ResNet", {**RESNET, "size": {"shortest_edge": 384}}),
    ("ResNet", {**RESNET, "size": {"shortest_edge": 33}, "do_rescale": False, "resample": 2}),
]


class Rig:
    def __init__(self, texts: TextProcesses, supervisor: Supervisor, metrics: Metrics) -> None:
        self.texts = texts
        self.supervisor = supervisor
        self.metrics = metrics

    async def load(self, folder: Path) -> TextModel:
        return await self.texts.load(DIGEST, lambda: nullcontext(folder))

    async def pixels(self, model: TextModel, data: bytes) -> Any:
        found = await self.texts.read_picture(model, "acme", PictureFile(data))
        return np.frombuffer(found.data, np.float32).reshape(found.shape)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    supervisor, metrics = Supervisor(CLOCK), Metrics()
    texts = TextProcesses(CLOCK, supervisor, metrics)
    supervisor.spawn("texts", texts.run())
    yield Rig(texts, supervisor, metrics)
    texts.unload(DIGEST)
    await asyncio.sleep(0)
    await supervisor.close()


def version(folder: Path, family: str, fields: dict[str, Any] | None) -> Path:
    fixed_cost.save(family, "ForImageClassification", folder, num_labels=3)
    if fields is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(fields))
    return folder


def own(family: str, fields: dict[str, Any], data: bytes) -> Any:
    """Return what transformers computes."""
    made = {name: value for name, value in fields.items() if not name.endswith("_type")}
    if isinstance(made.get("size"), int):
        made["size"] = {"shortest_edge": made["size"]}
    kind = ViTImageProcessorPil if family == "ViT" else ConvNextImageProcessorPil
    with Image.open(BytesIO(data)) as opened:
        return kind(**made)(load_image(opened), return_tensors="np")["pixel_values"][0]


@pytest.mark.parametrize(("family", "fields"), PROCESSORS)
async def test_pixels_are_those_of_transformers(
    tmp_path: Path, rig: Rig, family: str, fields: dict[str, Any]
) -> None:
    if family == "ViT":
        fields = {"size": {"height": 12, "width": 8}, **fields}
    model = await rig.load(version(tmp_path, family, fields))
    assert model.signature is not None
    assert model.signature.operation is Operation.CLASSIFY
    rng = random.Random(str(fields))
    for kind, mode in (
        ("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "L"), ("PNG", "P"), ("PNG", "1"), ("JPEG", "RGB"),
        ("JPEG", "L"), ("JPEG", "CMYK"),
    ):  # fmt: skip
        size = rng.randint(1, 90), rng.randint(1, 90)
        for orientation in (0, rng.randint(2, 8)):
            data = picture_files.picture(rng, *size, kind=kind, mode=mode, orientation=orientation)
            found = await rig.pixels(model, data)
            np.testing.assert_allclose(found, own(family, fields, data), atol=1e-5)


async def test_no_file_ends_a_process_and_each_is_refused_with_its_reason(tmp_path: Path, rig: Rig) -> None:
    model = await rig.load(version(tmp_path, "ResNet", RESNET))
    rng = random.Random(19)
    for name, data in picture_files.refused(rng).items():
        with pytest.raises(InvalidInput, match="the picture cannot be read: ") as caught:
            await rig.pixels(model, data)
        assert len(caught.value.message) < 200, name
        assert " at 0x" not in caught.value.message, name
    taken = 0
    for data in picture_files.damaged(rng, 150):
        with suppress(InvalidInput):
            await rig.pixels(model, data)
            taken += 1
    assert 0 < taken < 150, "damage of pixels alone cannot be seen"
    large = picture_files.png(4096, 4096)
    assert (await rig.pixels(model, large)).shape == (3, 48, 48)
    ended = [metric for metric in rig.metrics.collect() if "processes_ended" in metric.name]
    assert [metric.samples for metric in ended] == [[]]
    assert rig.supervisor.healthy


async def test_every_orientation_is_that_of_transformers(tmp_path: Path, rig: Rig) -> None:
    fields: dict[str, Any] = {**RESNET, "do_resize": False}
    model = await rig.load(version(tmp_path, "ResNet", fields))
    rng = random.Random(7)
    shapes = []
    for orientation in (*range(1, 9), 9, 200):
        data = picture_files.picture(rng, 20, 10, kind="JPEG", orientation=orientation)
        found = await rig.pixels(model, data)
        np.testing.assert_allclose(found, own("ResNet", fields, data), atol=1e-5)
        shapes.append(found.shape[1:])
    assert shapes == [(10, 20)] * 4 + [(20, 10)] * 4 + [(10, 20)] * 2


async def test_grey_of_16_bits_is_refused_by_name(tmp_path: Path, rig: Rig) -> None:
    model = await rig.load(version(tmp_path, "ResNet", RESNET))
    with pytest.raises(InvalidInput, match="16 bits for each grey pixel: send 8"):
        await rig.pixels(model, picture_files.picture(random.Random(1), 9, 9, mode="I;16"))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (None, "has no preprocessor_config.json"),
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type"),
        ({}, "image_processor_type"),
        ({**RESNET, "do_center_crop": True}, "do_center_crop"),
        ({**RESNET, "size": {"height": 8, "width": 8}}, "shortest_edge"),
        ({**RESNET, "size": 5000}, "shortest_edge"),
        ({**RESNET, "crop_pct": 0.001}, "crop_pct"),
        ({**RESNET, "crop_pct": 2.0}, "crop_pct"),
        ({**RESNET, "resample": 9}, "resample"),
        ({**RESNET, "image_std": [1.0, 0.0, 1.0]}, "image_std"),
        ({**RESNET, "image_mean": [1.0]}, "image_mean"),
        ({**RESNET, "image_mean": "x"}, "image_mean"),
    ],
)
async def test_pictures_are_refused_where_their_pixels_are_not_declared(
    tmp_path: Path, rig: Rig, fields: dict[str, Any] | None, named: str
) -> None:
    """The version is served all the same: tensors need no such file."""
    model = await rig.load(version(tmp_path, "ResNet", fields))
    with pytest.raises(UnsupportedFeature, match=f"(?s){named}.*send pixel_values as a tensor"):
        await rig.pixels(model, picture_files.picture(random.Random(1), 9, 9))


async def test_pixels_of_another_size_are_refused(tmp_path: Path, rig: Rig) -> None:
    fields = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}}
    model = await rig.load(version(tmp_path, "ViT", fields))
    with pytest.raises(InvalidInput, match="8 x 8 pixels"):
        await rig.pixels(model, picture_files.picture(random.Random(1), 9, 9))
    model = await rig.load(version(tmp_path, "ResNet", {**RESNET, "do_resize": False}))
    assert (await rig.pixels(model, picture_files.picture(random.Random(1), 9, 7))).shape == (3, 7, 9)
    with pytest.raises(InvalidInput, match="at most 1048576"):
        await rig.pixels(model, picture_files.png(2000, 2000))
