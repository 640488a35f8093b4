"""Nodes by a command of the operator's. Implements ``ports.nodes.NodeProvider``.

The command runs once for each call. It reads one JSON object on its standard input, ``{"call": "list"}``,
``{"call": "order", "order": ID, "type": TYPE, "zone": ZONE}`` or ``{"call": "release", "node": NODE}``, and
ends with code 0. To a list it writes ``{"nodes": [{"order": ID, "node": NODE}]}``, with ``"ending_in_s"`` for
a node that is about to be taken away; other output is ignored. With another code the last line of its
standard error is the reason. docs/operations/scaling.md has it for operators.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from services.core.errors import Unavailable
from services.ports.nodes import ProvidedNode

MAX_OUTPUT_BYTES: Final = 256 * 1024
MAX_NAME_CHARS: Final = 128
_RETRY_S: Final = 10.0
_END_S: Final = 5.0


class _Node(msgspec.Struct, frozen=True):
    order: str
    node: str
    ending_in_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] | None = None


class _Answer(msgspec.Struct, frozen=True):
    nodes: tuple[_Node, ...]


class CommandNodes:
    """``argv`` is the program and its arguments; a call takes at most ``timeout_s``."""

    def __init__(self, argv: Sequence[str], *, timeout_s: float) -> None:
        self._argv = tuple(argv)
        self._timeout_s = timeout_s

    async def list(self) -> tuple[ProvidedNode, ...]:
        output = await self._call({"call": "list"})
        try:
            found = msgspec.json.decode(output, type=_Answer).nodes
        except msgspec.DecodeError as error:
            raise self._failed("list", f"its output is no list of nodes: {error}") from error
        for one in found:
            if not 0 < len(one.node) <= MAX_NAME_CHARS or not 0 < len(one.order) <= MAX_NAME_CHARS:
                raise self._failed("list", f"names have 1 to {MAX_NAME_CHARS} characters")
        if len({one.order for one in found}) != len(found) or len({one.node for one in found}) != len(found):
            raise self._failed("list", "two nodes have one name or one order")
        return tuple(ProvidedNode(one.order, one.node, ending_in_s=one.ending_in_s) for one in found)

    async def order(self, order_id: str, node_type: str, zone: str) -> None:
        await self._call({"call": "order", "order": order_id, "type": node_type, "zone": zone})

    async def release(self, node: str) -> bool:
        await self._call({"call": "release", "node": node})
        return True

    async def _call(self, request: dict[str, str]) -> bytes:
        """Return what the command wrote. Its process has ended then, whatever happened."""
        call, pipe = request["call"], asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(*self._argv, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            raise self._failed(call, f"it cannot be started: {error.strerror}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    process.stdin.write(msgspec.json.encode(request) + b"\n")
                    process.stdin.close()
                output, errors = await asyncio.gather(_read(process.stdout), _read(process.stderr))
                code = await process.wait()
        except TimeoutError:
            raise self._failed(call, f"it did not end within {self._timeout_s:g} s") from None
        except ValueError as error:
            raise self._failed(call, str(error)) from None
        finally:
            await _end(process)
        if code:
            lines = errors.decode("utf-8", "replace").strip().splitlines()
            raise self._failed(call, lines[-1][:256] if lines else f"it ended with code {code}")
        return output

    def _failed(self, call: str, why: str) -> Unavailable:
        return Unavailable(f"the node command failed to {call}: {why}", retry_after_s=_RETRY_S)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process if it runs. Its unread output is read, because its end is observed only after that."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    with contextlib.suppress(TimeoutError):  # its own children may hold its output open
        async with asyncio.timeout(_END_S):
            await process.communicate()


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Return everything until its end. Raises ValueError then if it was more than the bound."""
    found, size = b"", 0
    while part := await stream.read(65536):
        size += len(part)
        found = (found + part)[: MAX_OUTPUT_BYTES + 1]
    if size > MAX_OUTPUT_BYTES:
        raise ValueError(f"it wrote more than {MAX_OUTPUT_BYTES} bytes")
    return found
