"""Processes that take a load and answer with tokens, one at work at a time.

All of a comparison are loaded before the first is measured; those not being measured are stopped
(SIGSTOP), so that no thread of theirs spins beside the one that is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from bench.engines.load import Request
from bench.engines.peers.catalog import SERVER, Peer, python_of

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Answer:
    """``tokens[i]`` is what was produced for request i, ``wall_s`` the time from the first to the last."""

    wall_s: float
    tokens: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.wall_s


class Runner(Protocol):
    """An engine with a model in it, in a process of its own."""

    def run(self, requests: Sequence[Request]) -> Answer:
        """Return what came of requests that arrive at once; nothing else of it runs before or after."""


class RunnerFailed(Exception):
    """The process ended, or its answer does not match the request."""


class PeerRunner:
    """A peer's process, stopped but for its turns."""

    def __init__(self, peer: Peer, process: subprocess.Popen[str], log: Path) -> None:
        self._peer = peer
        self._process = process
        self._log = log

    @classmethod
    @contextlib.contextmanager
    def started(cls, peer: Peer, checkpoint: Path, peers: Path, logs: Path) -> Iterator[PeerRunner]:
        """Load the checkpoint; the process is killed at the end. Raises RunnerFailed."""
        command = [str(python_of(peers, peer.environment)), "-m", f"bench.engines.peers.{peer.runner}"]
        command += _arguments(peer, checkpoint, peers)
        log = logs / f"{peer.name}-{checkpoint.name}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        runner = cls(peer, process, log)
        try:
            runner._read()
            pause(process)
            yield runner
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def run(self, requests: Sequence[Request]) -> Answer:
        """See ``Runner``. Raises RunnerFailed."""
        outputs = [request.output_tokens for request in requests]
        assert self._process.stdin is not None
        resume(self._process)
        try:
            load = {"prompts": [request.prompt for request in requests], "outputs": outputs}
            self._process.stdin.write(json.dumps(load) + "\n")
            self._process.stdin.flush()
            answer = msgspec.json.decode(self._read(), type=Answer)
        except BrokenPipeError as error:
            raise RunnerFailed(f"{self._peer.name} ended: see {self._log}") from error
        finally:
            pause(self._process)
        if [len(tokens) for tokens in answer.tokens] != outputs:
            raise RunnerFailed(f"{self._peer.name} produced other numbers of tokens than requested")
        return answer

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RunnerFailed(f"{self._peer.name} ended: see {self._log}")
        return line


def pause(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Stop the process and those that it started."""
    os.killpg(process.pid, signal.SIGSTOP)


def resume(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGCONT)


def _arguments(peer: Peer, checkpoint: Path, peers: Path) -> list[str]:
    if peer.environment != "llama_cpp":
        return [str(checkpoint), peer.mode]
    file = checkpoint.with_suffix(".gguf")
    if not file.exists():
        converter = [str(python_of(peers, peer.environment)), "-m", "bench.engines.peers.gguf_file"]
        subprocess.run([*converter, str(checkpoint), str(file)], cwd=ROOT, check=True, capture_output=True)
    return [str(file), str(peers / peer.environment / SERVER), peer.mode]
