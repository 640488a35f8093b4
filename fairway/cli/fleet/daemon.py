"""`fairway up --detach`: the supervisor as a separate process, which reports through a pipe until READY.

The messages are ``{"event": …}``, then one of ``{"ready": endpoints}``, ``{"running": endpoints}`` and
``{"failed": …}``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from fairway.cli.errors import CliError
from fairway.cli.fleet.installation import AlreadyRunning, run_installation
from fairway.cli.fleet.options import UpOptions, search_path
from fairway.cli.fleet.progress import (
    PipeProgress,
    StartProgress,
    failed_message,
    outcome_of,
    read_messages,
)
from fairway.cli.fleet.supervisor import rotate_log, tail
from fairway.cli.state import PRIVATE_UMASK, Endpoints, StateDir
from fairway.cli.terminal.output import err
from fairway.log_stream import LogStream


def start_detached(options: UpOptions, progress: StartProgress) -> tuple[Endpoints, bool]:
    """Return once the detached installation is READY, with True, or is already running, with False.

    Raises CliError with the reason when it does not become READY; no process is left then.
    """
    state = StateDir.at(Path(options.state_dir))
    os.umask(PRIVATE_UMASK)
    state.create()
    log = state.log("supervisor")
    receive, send = os.pipe()
    with state.writing():
        rotate_log(log)
        output = log.open("ab")
    with output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fairway.cli.fleet.daemon", options.to_json(), str(send)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(send,),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": search_path(os.environ)},
        )
    os.close(send)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM cleans up like Ctrl-C
    try:
        for message in read_messages(receive):
            if (answer := outcome_of(message, progress)) is not None:
                return answer
    except BaseException:
        _end(process)
        raise
    process.wait(timeout=30)
    raise CliError(
        "SUPERVISOR_LOST",
        f"the supervisor ended with {process.returncode}\n--- last lines of {log}\n{tail(log)}",
        next_step="start again; without --detach it stays in the foreground",
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a supervisor that failed to start; it stops its children itself."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=120)


def main(argv: list[str]) -> int:
    """Run an installation in this process; ``argv`` is the options' JSON and the pipe's descriptor."""
    sys.stdout = sys.stderr = LogStream.on(sys.stderr)
    progress = PipeProgress(int(argv[2]), err())
    options = UpOptions.from_json(argv[1])
    failure: CliError | None = None

    def on_ready(endpoints: Endpoints) -> None:
        progress.send({"ready": asdict(endpoints)})
        progress.close()

    try:
        run_installation(
            options, progress, on_ready, own_log=StateDir.at(Path(options.state_dir)).log("supervisor")
        )
    except AlreadyRunning as running:
        if running.endpoints is not None:
            progress.send({"running": asdict(running.endpoints)})
            return 0
        failure = running
    except CliError as exc:
        failure = exc
    if failure is None:
        return 0
    progress.send(failed_message(failure))
    return int(failure.exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
