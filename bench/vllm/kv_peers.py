"""Two processes that move blocks of KV, by NIXL or over a socket; they need torch, and NIXL for its part.

A pool is one tensor per layer, a row of bytes for each block. A round moves the blocks of a prompt, scattered
over the pool, and compares every byte.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from random import Random
from typing import Any, Final

import torch

BLOCK_TOKENS: Final = 64
LEASE_S: Final = 60.0  # how long a source serves
POLL_S: Final = 20.0  # after which a transfer counts as lost
Found = tuple[bytes, int]  # NIXL's description of the source, and an address or a port


@dataclass(frozen=True, slots=True)
class KvShape:
    layers: int
    token_bytes: int  # bytes of the keys and values of a token in a layer

    def blocks(self, tokens: int) -> int:
        return -(-tokens // BLOCK_TOKENS)

    def pool(self, blocks: int, *, seed: int) -> torch.Tensor:
        """Return a pool of drawn bytes, zeros for seed 0."""
        size = (self.layers, 2 * blocks, BLOCK_TOKENS * self.token_bytes)
        if not seed:
            return torch.zeros(size, dtype=torch.uint8)
        return torch.randint(256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))

    def scattered(self, blocks: int, *, seed: int) -> list[int]:
        """Return distinct places of a pool of twice so many blocks."""
        return Random(seed).sample(range(2 * blocks), blocks)


def source(shape: KvShape, tokens: int, way: str, link: Connection) -> None:
    """Serve the blocks of a prompt until the link closes."""
    torch.set_num_threads(1)
    blocks = shape.blocks(tokens)
    pool = shape.pool(blocks, seed=1)
    if way == "nixl":
        agent = _agent("source")
        agent.register_memory([(pool.data_ptr(), pool.numel(), 0, "")], mem_type="DRAM")
        link.send((agent.get_agent_metadata(), pool.data_ptr()))
        link.poll(LEASE_S)
        return
    rows = pool.numpy()
    with socket.create_server(("127.0.0.1", 0)) as server:
        link.send((b"", server.getsockname()[1]))
        connection, _ = server.accept()
        with connection:
            while connection.recv(1):
                for block in shape.scattered(blocks, seed=1):
                    for layer in range(shape.layers):
                        connection.sendall(rows[layer, block])


def target(shape: KvShape, tokens: int, way: str, link: Connection) -> None:
    """Pull the blocks once for each message; answer with seconds, state, and whether every byte came."""
    found: Found = link.recv()
    torch.set_num_threads(1)
    blocks = shape.blocks(tokens)
    here, there = shape.scattered(blocks, seed=2), shape.scattered(blocks, seed=1)
    pool = shape.pool(blocks, seed=0)
    wanted = shape.pool(blocks, seed=1)[:, there]
    pull = (_by_nixl if way == "nixl" else _by_socket)(shape, pool, (here, there), found)
    link.send("ready")
    while link.recv():
        pool.zero_()
        began_s = time.perf_counter()
        state = pull()
        link.send((time.perf_counter() - began_s, state, bool(torch.equal(pool[:, here], wanted))))


def _by_socket(shape: KvShape, pool: torch.Tensor, places: tuple[list[int], list[int]], found: Found) -> Any:
    connection = socket.create_connection(("127.0.0.1", found[1]), timeout=POLL_S)
    rows = pool.numpy()

    def pull() -> str:
        try:
            connection.sendall(b"x")
            for block in places[0]:
                for layer in range(shape.layers):
                    row = memoryview(rows[layer, block])
                    while row:
                        if not (received := connection.recv_into(row)):
                            return "closed"
                        row = row[received:]
        except OSError as error:
            return type(error).__name__
        return "DONE"

    return pull


def _by_nixl(shape: KvShape, pool: torch.Tensor, places: tuple[list[int], list[int]], found: Found) -> Any:
    agent = _agent("target")
    agent.register_memory([(pool.data_ptr(), pool.numel(), 0, "")], mem_type="DRAM")
    name = agent.add_remote_agent(found[0])

    def rows(address: int, blocks: list[int]) -> Any:
        size, each = pool.shape[2], pool.shape[1] * pool.shape[2]
        spans = [
            (address + layer * each + block * size, size, 0)
            for layer in range(shape.layers)
            for block in blocks
        ]
        return agent.get_xfer_descs(spans, mem_type="DRAM")

    def pull() -> str:
        began_s = time.perf_counter()
        ours, theirs = rows(pool.data_ptr(), places[0]), rows(found[1], places[1])
        try:
            transfer = agent.initialize_xfer("READ", ours, theirs, name)
            state = str(agent.transfer(transfer))
            while state == "PROC" and time.perf_counter() - began_s < POLL_S:
                state = str(agent.check_xfer_state(transfer))
        except Exception as error:  # NIXL's classes have no other base
            return type(error).__name__
        return state

    return pull


def _agent(name: str) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def main() -> None:
    role, layers, token_bytes, tokens, way, path = sys.argv[1:]
    peer = source if role == "source" else target
    with Client(path, "AF_UNIX") as link, suppress(EOFError):
        peer(KvShape(int(layers), int(token_bytes)), int(tokens), way, link)


if __name__ == "__main__":
    main()
