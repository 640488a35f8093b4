"""`fairway chat`: waiting for a line, the turns of a conversation, files of tools."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fairway.cli.commands.chat import Conversation
from fairway.cli.commands.complete import tools_of
from fairway.cli.errors import CliError
from fairway.client import Message, ToolCall

ROOT = Path(__file__).resolve().parents[3]
COMMAND = ["-m", "fairway.cli.main", "chat", "--grpc", "127.0.0.1:9", "--api-key", "k", "--model", "m"]


def test_interrupt_at_the_prompt_ends_it_at_once() -> None:
    with subprocess.Popen(
        [sys.executable, *COMMAND],
        cwd=ROOT,
        env=os.environ | {"PYTHONFAULTHANDLER": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.read(2) == b"> "
        try:
            # A signal between the prompt and the system call that reads is seen with the next one.
            for _ in range(30):
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
                    break
            else:
                process.send_signal(signal.SIGABRT)  # it writes where its threads are
            assert process.wait(timeout=30) == 130, process.stderr.read().decode()
        finally:
            process.kill()


def test_lines_behind_calls_are_their_results() -> None:
    chat = Conversation("m")
    assert chat.add_input("Weather?")
    calls = (ToolCall("a", "weather", "{}"), ToolCall("b", "time", "{}"))
    chat.add_answer("", calls)
    assert not chat.add_input("rain")
    assert chat.add_input("noon")
    chat.add_answer("Rain at noon.")
    assert chat.turns == [
        Message("user", "Weather?"),
        Message("assistant", "", tool_calls=calls),
        Message("tool", "rain", tool_call_id="a"),
        Message("tool", "noon", tool_call_id="b"),
        Message("assistant", "Rain at noon."),
    ]
    assert chat.drop_oldest() == 0
    chat.add_input("And tomorrow?")
    assert chat.drop_oldest() == 5
    chat.add_answer("", calls)
    chat.clear()
    assert chat.add_input("Anew")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "1",
        "[1]",
        "[{}]",
        '[{"function":{"name":1}}]',
        '[{"function":{"name":"a","parameters":[]}}]',
    ],
)
def test_a_file_without_tools_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tools.json"
    path.write_text(text)
    with pytest.raises(CliError, match="no list of tools"):
        tools_of(path)
