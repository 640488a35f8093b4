"""One run of an installation, in the supervisor: from its checks and ports to the end of the last process."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Final

from fairway.cli.errors import CliError, ExitCode
from fairway.cli.fetching import with_model
from fairway.cli.fleet.bootstrap import Bootstrap
from fairway.cli.fleet.options import UpOptions
from fairway.cli.fleet.ports import choose_ports, load_ports, save_ports
from fairway.cli.fleet.progress import Progress
from fairway.cli.fleet.record import FleetRecord, lock_installation, sweep, wait_for_end
from fairway.cli.fleet.roles import (
    PREFERRED_PORTS,
    Addresses,
    check_settings,
    port_names,
    role_specs,
    store_specs,
)
from fairway.cli.fleet.supervisor import ProcessSupervisor
from fairway.cli.state import PRIVATE_UMASK, Endpoints, StateDir, ensure_secrets, read_secret, write_private

MIN_FREE_BYTES: Final = 1024**3
FETCHED_BYTES: Final = 2 * 1024**3  # the converted model, as it is imported, stored and cached by a worker
OnReady = Callable[[Endpoints], None]


class AlreadyRunning(CliError):
    """Another supervisor has the installation's lock. ``endpoints`` is None while that one is starting."""

    def __init__(self, state: StateDir, endpoints: Endpoints | None) -> None:
        super().__init__(
            "ALREADY_STARTING",
            f"another `fairway up` is starting or stopping the installation in {state.root}",
            next_step="wait for it, or end it with `fairway down`",
        )
        self.endpoints = endpoints


def run_installation(
    options: UpOptions, progress: Progress, on_ready: OnReady, *, own_log: Path | None = None
) -> None:
    """Start everything, call ``on_ready``, and keep it running until SIGINT or SIGTERM.

    ``own_log`` is this process's log file, if any: it is bounded like the others. Raises CliError when it
    cannot start, AlreadyRunning when it runs; no process is left then.
    """
    state = StateDir.at(Path(options.state_dir))
    check_start(options)
    os.umask(PRIVATE_UMASK)  # child processes inherit it
    state.create()
    with state.writing():
        lock = lock_installation(state.lock)
    if lock is None:
        raise AlreadyRunning(state, running_endpoints(state))
    with lock:
        leftovers = FleetRecord.load(state.fleet)
        if leftovers is not None and (names := sweep(leftovers, patience_s=10.0)):
            progress.event("leftovers", "stopped", f"of an earlier run: {', '.join(names)}")
        ports = choose_ports(
            port_names(options),
            fixed={
                name: port
                for name, port in (("gateway_http", options.http_port), ("gateway_grpc", options.grpc_port))
                if port
            },
            remembered=load_ports(state.ports),
            preferred=PREFERRED_PORTS,
        )
        with state.writing():
            state.endpoints.unlink(missing_ok=True)
            ensure_secrets(state)
            save_ports(state.ports, ports)
            write_private(state.options, options.to_json() + "\n")
        supervisor = ProcessSupervisor(progress, state.fleet, own_log=own_log)
        asyncio.run(
            _run(options, state, Addresses.for_options(options, ports), supervisor, progress, on_ready)
        )


def _flag(name: str) -> str:
    return "--set" if name == "settings" else "--" + name.replace("_", "-")


def _option_text(name: str, options: UpOptions) -> str:
    """Return the value of the named option as text."""
    value = not options.deploy if name == "no_model" else getattr(options, name)
    if isinstance(value, tuple):
        value = " ".join(f"{role}:{variable}={text}" for role, variable, text in value)
    return str(value) if value != "" else "not given"


def running_endpoints(state: StateDir) -> Endpoints | None:
    """Return the endpoints of the installation if it runs and is ready, else None."""
    record = FleetRecord.load(state.fleet)
    if record is None or record.phase != "ready" or not record.supervisor.alive:
        return None
    return Endpoints.load(state.endpoints)


def require_same_options(requested: UpOptions, given: Collection[str], state: StateDir) -> None:
    """Return if the running installation was started with the ``given`` options of the command line.

    Raises CliError with the differences.
    """
    try:
        running = UpOptions.from_json(state.options.read_text("utf-8"))
    except (OSError, ValueError, TypeError, KeyError):
        return  # another Fairway version started it
    ports = load_ports(state.ports)
    running = replace(
        running,
        http_port=ports.get("gateway_http", 0) if requested.http_port else 0,
        grpc_port=ports.get("gateway_grpc", 0) if requested.grpc_port else 0,
    )
    differing = [
        f"{_flag(name)} is {_option_text(name, running)}, not {_option_text(name, requested)}"
        for name in sorted(given)
        if _option_text(name, running) != _option_text(name, requested)
    ]
    if not differing:
        return
    raise CliError(
        "RUNS_OTHERWISE",
        f"Fairway runs in {state.root} with other options: {'; '.join(differing)}",
        next_step="`fairway down`, then the same command; replicas and model of what is deployed change with "
        "`fairway deployments update`",
        exit_code=ExitCode.REFUSED,
    )


async def _run(
    options: UpOptions,
    state: StateDir,
    addresses: Addresses,
    supervisor: ProcessSupervisor,
    progress: Progress,
    on_ready: OnReady,
) -> None:
    stop, kill_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (kill_now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    starting = asyncio.create_task(_start(options, state, addresses, supervisor, progress))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            raise CliError(
                "INTERRUPTED",
                "the start was interrupted; everything that it started is stopped",
                exit_code=ExitCode.INTERRUPTED,
            )
        endpoints = starting.result()
        with state.writing():
            endpoints.save(state.endpoints)
        supervisor.mark_ready()
        on_ready(endpoints)
        await stopped
    finally:
        starting.cancel()
        stopped.cancel()
        await asyncio.gather(starting, stopped, return_exceptions=True)
        state.endpoints.unlink(missing_ok=True)
        await supervisor.stop(now=kill_now)


async def _start(
    options: UpOptions,
    state: StateDir,
    addresses: Addresses,
    supervisor: ProcessSupervisor,
    progress: Progress,
) -> Endpoints:
    fetching = asyncio.create_task(with_model(options, state, progress))
    try:
        with state.writing():
            await supervisor.start(store_specs(state, os.environ))
            await supervisor.start(role_specs(state, addresses, os.environ, options.settings))
        options = await fetching
    finally:
        fetching.cancel()
    api_key = await Bootstrap(options, state, addresses, progress).run()
    return Endpoints(
        http=addresses.http_url,
        grpc=addresses.of("gateway_grpc"),
        api_key=api_key,
        admin_key=read_secret(state, "admin_key"),
        model=options.model_name if options.deploy else "",
        registry=addresses.of("registry"),
        controlplane=addresses.of("controlplane"),
        scheduler=addresses.of("scheduler"),
        workers=tuple(addresses.of(name) for name in addresses.worker_names),
        gateways=tuple(addresses.grpc_of(name) for name in addresses.gateway_names),
        schedulers=tuple(addresses.of(name) for name in addresses.scheduler_names),
        controlplanes=tuple(addresses.of(name) for name in addresses.controlplane_names),
        metrics={name: addresses.of(f"{name}_metrics") for name in addresses.role_names},
        supervisor_pid=os.getpid(),
        pids=supervisor.pids,
    )


def stop_installation(state: StateDir, progress: Progress, *, patience_s: float = 120.0) -> bool:
    """Stop the installation's supervisor and its remaining processes. Return False when nothing ran."""
    record = FleetRecord.load(state.fleet)
    if record is None:
        return False
    found = record.supervisor.alive
    if found:
        progress.event("supervisor", "stopping", f"process {record.supervisor.pid}; drains, then ends")
        record.supervisor.signal(signal.SIGTERM)
        if not wait_for_end([record.supervisor], timeout_s=patience_s):
            progress.event("supervisor", "failed", f"did not end within {patience_s:g} s; killed")
            record.supervisor.signal(signal.SIGKILL)
            wait_for_end([record.supervisor], timeout_s=5.0)
    latest = FleetRecord.load(state.fleet) or record
    swept = sweep(latest, patience_s=10.0)
    if swept:
        progress.event("leftovers", "stopped", ", ".join(swept))
    state.fleet.unlink(missing_ok=True)
    state.endpoints.unlink(missing_ok=True)
    return found or bool(swept)


def check_disk(folder: Path, *, needed: int = MIN_FREE_BYTES) -> None:
    """Raise CliError when less than ``needed`` bytes are free at ``folder``, which may not exist yet."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise CliError(
            "NO_DISK_SPACE",
            f"{free / 1024**2:.0f} MiB are free at {existing}; {needed / 1024**2:.0f} MiB are needed",
            next_step="free some space, or choose another place with --state-dir",
        )


def check_model(options: UpOptions) -> None:
    """Raise CliError when the model folder to deploy is not a checkpoint."""
    folder = options.model_folder
    if not options.deploy or (folder / "config.json").is_file():
        return
    raise CliError(
        "MODEL_MISSING",
        f"{folder} contains no model: there is no config.json",
        next_step="name a checkpoint folder with --model-dir, or start without one with --no-model",
        exit_code=ExitCode.USAGE if options.model_dir else ExitCode.FAILED,
    )


def check_start(options: UpOptions) -> None:
    """Raise CliError with the first reason that prevents the start."""
    check_disk(Path(options.state_dir), needed=MIN_FREE_BYTES + (FETCHED_BYTES if options.is_fetched else 0))
    check_model(options)
    check_settings(options)
    if options.replicas > options.workers:
        raise CliError(
            "TOO_MANY_REPLICAS",
            f"{options.replicas} replicas need as many workers; there are {options.workers}",
            next_step=f"add --workers {options.replicas}",
            exit_code=ExitCode.USAGE,
        )
