"""Imports from a hub and from a bucket: pinned, complete, and continued where they were cut."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import obstore
import pytest

from fairway.importing.sources import ImportRefused, Phase, import_source
from tests.support.object_store import BUCKET, ObjectStore
from tests.tidy.sources import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SIZE = 20 * 1024 * 1024
WEIGHTS = random.Random(1).randbytes(SIZE)
FILES: dict[str, bytes] = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "modeling_tiny.py": b"raise SystemExit('code ran')",
    "pytorch_model.bin": b"\x80\x04",
    "onnx/config.json": b"{}",
    ".gitattributes": b"",
}
TAKEN = ["config.json", "model.safetensors", "tokenizer.json"]


class Hub(BaseHTTPRequestHandler):
    """One repository of a hub. ``cuts``: how many responses with weights end early."""

    cuts: ClassVar[int] = 0
    digest: ClassVar[str] = ""  # in place of that of the weights
    files: ClassVar[dict[str, bytes]] = FILES
    ranges: ClassVar[list[str]] = []

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in (f"/api/models/org/tiny/revision/{revision}" for revision in ("main", "v1", COMMIT)):
            siblings = [self.sibling(name, data) for name, data in self.files.items()]
            found = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings, "cardData": {"license": "mit"}}
            return self.answer(200, json.dumps(found).encode())
        name = path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
        if name not in self.files:
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        data, first = self.files[name], 0
        if (span := self.headers.get("Range")) is not None:
            self.ranges.append(span)
            first = int(span.removeprefix("bytes=").partition("-")[0])
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
        self.answer(206 if first else 200, data[first:], headers)
        return None

    def sibling(self, name: str, data: bytes) -> dict[str, Any]:
        found: dict[str, Any] = {"rfilename": name, "size": len(data)}
        if name.endswith(".safetensors"):
            digest = self.digest or hashlib.sha256(data).hexdigest()
            found["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
        return found

    def answer(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if len(data) > SIZE // 4 and type(self).cuts:
            type(self).cuts -= 1
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        self.wfile.write(data)


@contextmanager
def hub(files: dict[str, bytes] | None = None, cuts: int = 0, digest: str = "") -> Iterator[str]:
    handler = type("Handler", (Hub,), {"files": files or FILES, "cuts": cuts, "digest": digest})
    Hub.ranges.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


IMPORT = """
import json, sys, pathlib
from fairway.importing.sources import ImportRefused, import_source
seen = []
def report(phase, done, total):
    seen.append((done, total))
    if done > int(sys.argv[3]):
        raise SystemExit(9)
try:
    found = import_source(sys.argv[1], pathlib.Path(sys.argv[2]), report)
except ImportRefused as error:
    print(json.dumps({"refused": f"{error} | {error.next_step}"}))
else:
    print(json.dumps({"folder": str(found.folder), "name": found.name, "facts": found.facts, "seen": seen}))
"""


def from_hub(source: str, cache: Path, endpoint: str, *, stop_after: int = 1 << 60) -> dict[str, Any] | int:
    """Import in a process whose hub is this endpoint; return what came of it, or its exit code."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache / "home")}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, source, str(cache), str(stop_after)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | settings,
    )
    assert done.returncode in (0, 9), done.stderr
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found or done.returncode


def taken(folder: str) -> dict[str, bytes]:
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_a_branch_of_a_hub_is_pinned_to_its_commit_and_only_data_is_taken(tmp_path: Path) -> None:
    with hub() as endpoint:
        found = from_hub("hf://org/tiny@main", tmp_path, endpoint)
        assert isinstance(found, dict)
        assert taken(found["folder"]) == {name: FILES[name] for name in TAKEN}
        assert found["name"] == "tiny"
        assert found["facts"] == ["licence: mit", f"revision: main is commit {COMMIT}"]
        total = sum(len(FILES[name]) for name in TAKEN)
        assert found["seen"][-1] == [total, total]
        again = from_hub(f"hf://org/tiny@{COMMIT}", tmp_path, endpoint)
        assert isinstance(again, dict)
        assert (again["folder"], again["seen"]) == (found["folder"], [])


def test_a_download_of_a_hub_that_is_cut_goes_on_at_its_last_byte(tmp_path: Path) -> None:
    with hub(cuts=2) as endpoint:
        found = from_hub("hf://org/tiny", tmp_path, endpoint)
        assert isinstance(found, dict)
        assert taken(found["folder"])["model.safetensors"] == WEIGHTS
        assert len(Hub.ranges) == 2
        assert all(int(span[6:].partition("-")[0]) >= SIZE // 4 for span in Hub.ranges)


def test_an_import_of_a_hub_that_is_ended_goes_on_in_another_process(tmp_path: Path) -> None:
    with hub() as endpoint:
        assert from_hub("hf://org/tiny", tmp_path, endpoint, stop_after=SIZE * 3 // 4) == 9
        Hub.ranges.clear()
        found = from_hub("hf://org/tiny", tmp_path, endpoint)
        assert isinstance(found, dict)
        assert taken(found["folder"])["model.safetensors"] == WEIGHTS
        assert [int(span[6:].partition("-")[0]) >= SIZE // 4 for span in Hub.ranges] == [True]


@pytest.mark.parametrize(
    ("source", "files", "problem"),
    [
        ("hf://org/other", FILES, "cannot fetch org/other at main: "),
        ("hf://org/tiny@nothing", FILES, "cannot fetch org/tiny at nothing: "),
        ("hf://org/tiny", {"config.json": b"{}", "pytorch_model.bin": WEIGHTS}, "has no safetensors"),
        ("hf://org/tiny", {"config.json": b"{}", "model-q4.gguf": WEIGHTS}, "has no safetensors"),
    ],
)
def test_what_a_hub_does_not_have_is_refused(
    source: str, files: dict[str, bytes], problem: str, tmp_path: Path
) -> None:
    with hub(files) as endpoint:
        found = from_hub(source, tmp_path, endpoint)
        assert isinstance(found, dict)
        assert problem in found["refused"]


def test_weights_of_another_digest_are_refused(tmp_path: Path) -> None:
    with hub(digest="0" * 64) as endpoint:
        found = from_hub("hf://org/tiny", tmp_path, endpoint)
        assert isinstance(found, dict)
        assert "has another sha256 than the hub states" in found["refused"]
    assert not list(tmp_path.rglob("checkpoint*"))


def test_a_hub_that_does_not_answer_is_named(tmp_path: Path) -> None:
    found = from_hub("hf://org/tiny", tmp_path, "http://127.0.0.1:9")
    assert isinstance(found, dict)
    assert "cannot fetch org/tiny at main: " in found["refused"]
    assert "HF_ENDPOINT" in found["refused"]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    (tmp_path / "server").mkdir()
    store = ObjectStore(tmp_path / "server")
    store.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    yield store
    store.kill()


def put(store: ObjectStore, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        obstore.put(store.bucket(), f"llama/{name}", data)


def test_an_import_of_a_bucket_goes_on_where_it_was_cut(bucket: ObjectStore, tmp_path: Path) -> None:
    put(bucket, FILES)
    source, cache = f"s3://{BUCKET}/llama", tmp_path / "cache"

    class Cut(Exception):
        """The import is interrupted."""

    def cut(phase: Phase, done: int, total: int) -> None:
        if done > SIZE // 2:
            raise Cut

    with pytest.raises(Cut):
        import_source(source, cache, cut)
    seen: list[int] = []
    found = import_source(source, cache, lambda phase, done, total: seen.append(done))
    assert taken(str(found.folder)) == {name: FILES[name] for name in [*TAKEN, "onnx/config.json"]}
    others = sum(len(data) for name, data in FILES.items() if name != "model.safetensors")
    # The files come in any order, so what is there at first may be that of the small ones.
    assert not [done for done in seen if others < done <= SIZE // 2]
    assert found.name == "llama"
    assert import_source(source, cache, cut) == found
    put(bucket, {"model.safetensors": WEIGHTS[::-1]})
    other = import_source(source, cache, lambda phase, done, total: None)
    assert taken(str(other.folder))["model.safetensors"] == WEIGHTS[::-1]


def test_a_bucket_that_is_not_there_is_refused(bucket: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match=r"cannot fetch s3://nothing/x: "):
        import_source("s3://nothing/x", tmp_path / "cache", lambda phase, done, total: None)
    with pytest.raises(ImportRefused, match=r"contains 0 files of a model"):
        import_source(f"s3://{BUCKET}/nothing", tmp_path / "cache", lambda phase, done, total: None)
