"""The text process: ``python -P -m services.gateway.text.process --fd N``.

It loads one version's tokenizer and chat template and answers one order at a time. The kernel bounds their
cost: a timer's signal ends the process after its processor time, and memory has a limit. Every failure except
a domain error ends the process; the exit code is the cause. It writes no output: a library's message may
contain a prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Final, NoReturn

from services.core.errors import FairwayError
from services.gateway.text.encoder import TextEncoder
from services.gateway.text.messages import (
    EXIT_MEMORY,
    EXIT_PANIC,
    LENGTH,
    MAX_MESSAGE_BYTES,
    Answer,
    CheckConstraint,
    ConstraintPassed,
    Decoded,
    DecodePicture,
    DecodeTokens,
    EncodePrompt,
    EncodeRows,
    Loaded,
    LoadText,
    Order,
    PictureDecoded,
    RowsEncoded,
    decode_order,
    encoded,
    framed,
    refused,
)
from services.gateway.text.row_encoder import RowEncoder, load_version, rows_of
from services.gateway.text.text_model import DecodedText
from services.runtime.clock import SystemClock
from services.runtime.process.child import die_with_parent

# Further processes run at a lower priority: they use otherwise idle processor time.
NICENESS: Final = 5


def main(arguments: list[str]) -> NoReturn:
    """Answer orders until the gateway closes the socket."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="services.gateway.text.process")
    parser.add_argument("--fd", type=int, required=True, help="the socket that the orders come from")
    parser.add_argument("--nice", action="store_true", help="give other processes precedence")
    options = parser.parse_args(arguments)
    if options.nice:
        os.nice(NICENESS)
    with contextlib.suppress(OSError):  # The kernel should kill this process first when memory runs out.
        Path("/proc/self/oom_score_adj").write_text("1000", "utf-8")
    channel = socket.socket(fileno=options.fd)
    try:
        _serve(channel)
    except OSError as error:  # the gateway has disconnected, or a call of the system found no memory
        os._exit(EXIT_MEMORY if error.errno == errno.ENOMEM else 0)
    except MemoryError:
        os._exit(EXIT_MEMORY)
    except BaseException:  # a panic in a native library is no Exception
        os._exit(EXIT_PANIC)


def _serve(channel: socket.socket) -> NoReturn:
    encoder: TextEncoder | RowEncoder | None = None
    while True:
        order = decode_order(_receive(channel))
        signal.setitimer(signal.ITIMER_PROF, order.cpu_s)
        try:
            if isinstance(order, LoadText):
                encoder = _load(order)
                answer: Answer = Loaded(encoder.model)
            else:
                assert encoder is not None, "an order before the version was loaded"
                answer = _answer(encoder, order)
        except FairwayError as error:
            answer = refused(error)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        channel.sendall(framed(answer))


def _load(order: LoadText) -> TextEncoder | RowEncoder:
    _limit_memory(order.memory_bytes)
    encoder = load_version(Path(order.folder), order.version_digest, SystemClock())
    gc.freeze()
    # A text's memory is added to the version's own.
    _limit_memory(order.memory_bytes + _data_bytes())
    return encoder


def _answer(encoder: TextEncoder | RowEncoder, order: Order) -> Answer:
    assert not isinstance(order, LoadText)
    if isinstance(order, CheckConstraint):
        return _check(encoder, order)
    if isinstance(order, EncodeRows):
        return RowsEncoded(rows_of(encoder).encode_rows(order.rows))
    if isinstance(order, DecodePicture):
        return PictureDecoded(rows_of(encoder).decode_picture(order.picture))
    if isinstance(order, DecodeTokens):
        return Decoded(DecodedText(encoder.decode(order.run.ids)))
    assert isinstance(encoder, TextEncoder), "a prompt of a fixed-cost model"
    if isinstance(order, EncodePrompt):
        ids = encoder.encode_prompt(order.text)
    else:
        ids = encoder.encode_chat(order.chat.messages, order.chat.variables, order.chat.tools)
    return encoded(ids, encoder.model.max_context_tokens)


def _check(encoder: TextEncoder | RowEncoder, order: CheckConstraint) -> Answer:
    """Compile a constraint; the first one also prepares the tokenizer, in time of its own."""
    assert isinstance(encoder, TextEncoder), "a constraint of a fixed-cost model"
    signal.setitimer(signal.ITIMER_PROF, order.open_cpu_s)
    encoder.open_grammars()
    signal.setitimer(signal.ITIMER_PROF, order.cpu_s)
    return ConstraintPassed(encoder.check(order.constraint))


def _limit_memory(memory_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _data_bytes() -> int:
    """Return this process's bytes under the limit; 0 where the system does not report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text("utf-8").split()[5])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def _receive(channel: socket.socket) -> bytearray:
    (length,) = LENGTH.unpack(_exactly(channel, LENGTH.size))
    assert length <= MAX_MESSAGE_BYTES, "an order is larger than any order"
    return _exactly(channel, length)


def _exactly(channel: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    with memoryview(data) as view:
        filled = 0
        while filled < size:
            received = channel.recv_into(view[filled:])
            if not received:
                os._exit(0)
            filled += received
    return data


if __name__ == "__main__":
    main(sys.argv[1:])
