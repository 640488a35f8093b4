"""What a publisher finds in a folder, and what it refuses before anything is sent."""

from __future__ import annotations

import math
import os
import pickle  # noqa: TID251  (it writes what must be refused)
import random
from pathlib import Path

import pytest

from fairway.client.publish.publish import CHUNK_BYTES, PublishRefused, find_files, hash_files, manifest_of
from services.core.manifest import check_manifest, sha256_of, weights_digest_of
from services.rpc.convert.registry import manifest_from_proto
from tests.support.model_folder import header_of, safetensors, write_model


def found(folder: Path) -> list[str]:
    return list(find_files(folder))


def test_files_are_found_in_order_and_hidden_ones_are_not(tmp_path: Path) -> None:
    for name in ("b.json", "a/z.json", "a/.hidden.json", ".git/config.json", ".env", "a.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert found(tmp_path) == ["a.json", "a/z.json", "b.json"]


def test_a_link_within_the_folder_is_followed_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "real.json").write_text("{}")
    (tmp_path / "config.json").symlink_to(Path("blobs") / "real.json")
    files = find_files(tmp_path)
    assert files["config.json"] == (tmp_path / "blobs" / "real.json").resolve()
    linked = tmp_path.parent / (tmp_path.name + "-link")
    linked.symlink_to(tmp_path)  # the folder itself may be named by a link
    assert found(linked) == found(tmp_path)


@pytest.mark.parametrize("target", ["outside.json", "../outside.json", "/etc/passwd", "loop.json"])
def test_a_link_that_leads_elsewhere_is_refused(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.json").write_text('{"secret": 1}')
    (folder / "config.json").write_text("{}")
    link = folder / "loop.json"
    link.symlink_to(target)
    with pytest.raises(PublishRefused, match="link") as caught:
        find_files(folder)
    assert caught.value.next_step


def test_a_link_to_a_folder_is_refused_wherever_it_leads(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "inside").mkdir(parents=True)
    (folder / "inside" / "a.json").write_text("{}")
    outside = tmp_path / "outside"
    outside.mkdir()
    for target in (outside, folder / "inside", folder):
        link = folder / "link"
        link.symlink_to(target)
        with pytest.raises(PublishRefused):
            find_files(folder)
        link.unlink()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(PublishRefused, match="neither a file"):
        find_files(tmp_path)


def test_a_folder_without_files_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="contains no files"):
        find_files(tmp_path)
    with pytest.raises(FileNotFoundError, match="not a folder"):
        find_files(tmp_path / "absent")


def test_a_file_that_turns_into_a_link_meanwhile_is_not_followed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    files = find_files(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        hash_files(files, lambda _: None)


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("pytorch_model.bin", b"x", "pickled objects"),
        ("a/model.pt", b"x", "pickled objects"),
        ("x.pkl", b"x", "pickled objects"),
        ("notes.txt", pickle.dumps({"a": print}), "pickled objects"),
        ("modeling.py", b"x", "program code"),
        ("weights.h5", b"x", "pickled objects"),
        ("data.csv", b"x", "not a kind of file"),
        ("other.safetensors", b"", "too few"),
        ("other.safetensors", (2**40).to_bytes(8, "little") + b"{}", "claims"),
        ("other.safetensors", safetensors(9000)[:-1], "truncated"),
        ("other.safetensors", safetensors(9000) + b"PK", "2 bytes follow"),
        ("config.json", b"{", "not JSON"),
    ],
)
def test_what_may_not_travel_is_refused_by_its_name(
    tmp_path: Path, name: str, data: bytes, text: str
) -> None:
    folder = write_model(tmp_path / "model")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    with pytest.raises(PublishRefused, match=text) as caught:
        hash_files(find_files(folder), lambda _: None)
    assert name in str(caught.value)


def test_a_bad_tensor_file_is_found_before_the_others_are_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "z.safetensors").write_bytes(b"short")
    heard: list[int] = []
    with pytest.raises(PublishRefused):
        hash_files(find_files(folder), heard.append)
    assert heard == []


def test_the_manifest_pins_all_six_and_passes_the_registrys_check(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", weight_bytes=CHUNK_BYTES + 5)
    files = find_files(folder)
    heard: list[int] = []
    hashed = hash_files(files, heard.append)
    manifest = manifest_from_proto(manifest_of(files, hashed.files, "causal-lm", 0))
    check_manifest(manifest)
    pins = {
        "tokenizer_digest": "tokenizer.json",
        "chat_template_digest": "chat_template.jinja",
        "sampling_defaults_digest": "generation_config.json",
        "safety_policy_digest": "safety_policy.json",
        "engine_limits_digest": "engine_limits.json",
    }
    assert {pin: getattr(manifest, pin) for pin in pins} == {
        pin: sha256_of((folder / name).read_bytes()) for pin, name in pins.items()
    }
    assert manifest.weights_digest == weights_digest_of(manifest.files) != ""
    assert heard[-1] == manifest.size_bytes
    assert heard == sorted(heard)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_one_changed_byte_changes_its_pin(tmp_path: Path, name: str) -> None:
    manifests = []
    for seed in (b"", b" "):
        folder = write_model(tmp_path / f"model{len(seed)}")
        if name == "model.safetensors":
            (folder / name).write_bytes(safetensors(4096, seed=len(seed)))
        else:
            (folder / name).write_bytes((folder / name).read_bytes() + seed)
        files = find_files(folder)
        manifests.append(manifest_of(files, hash_files(files, lambda _: None).files, "causal-lm", 0))
    pins = ("tokenizer_digest", "chat_template_digest", "weights_digest", "engine_limits_digest")
    changed = [pin for pin in pins if getattr(manifests[0], pin) != getattr(manifests[1], pin)]
    assert len(changed) == 1


def test_the_template_inside_the_tokenizers_configuration_is_pinned_by_that_file(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ x }}"}')
    files = find_files(folder)
    manifest = manifest_of(files, hash_files(files, lambda _: None).files, "causal-lm", 0)
    assert manifest.chat_template_digest == sha256_of((folder / "tokenizer_config.json").read_bytes())


def _published(folder: Path, shapes: dict[str, list[int]], padding: int) -> list[str]:
    folder.mkdir()
    header = header_of(shapes) + b" " * padding
    data = b"".join(random.Random(name).randbytes(4 * math.prod(shape)) for name, shape in shapes.items())
    path = folder / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    hashed = hash_files({path.name: path}, lambda _: None).files
    manifest = manifest_from_proto(manifest_of({}, hashed, "fixed-cost", 0))
    check_manifest(manifest)
    return list(manifest.files[0].chunks)


def test_a_longer_header_and_another_tensor_leave_the_other_chunks_as_they_were(tmp_path: Path) -> None:
    first = {"embed": [3000, 1000], "norm": [7], "up": [1200, 1000], "scale": [3], "down": [500, 1000]}
    second = {
        "embed": first["embed"],
        "added": [9],
        **{name: first[name] for name in ("norm", "up", "scale", "down")},
    }
    one = _published(tmp_path / "one", first, 0)
    other = _published(tmp_path / "other", second, 3)
    assert len(one) == 1 + 3 + 1 + 2 + 1 + 1
    assert [at for at, chunk in enumerate(other) if chunk not in one] == [
        0,
        4,
    ]  # the header, `added` with `norm`
