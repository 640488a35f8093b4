"""A process that reads the ranks' module and starts another one, as a follower does."""

import multiprocessing
import os
import time

import services.worker.engines.vllm.rank  # noqa: F401


def rest() -> None:
    print(os.getpid(), flush=True)
    time.sleep(600.0)


if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=rest)
    child.start()
    child.join()
