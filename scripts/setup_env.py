"""Create the virtual environment and install into it. Standard library only; runs on the base interpreter.

    python3.11 scripts/setup_env.py [--dev | --test] [--torch cpu|cuda] [--venv FOLDER]

Torch comes in a step of its own. Without an NVIDIA GPU its wheel is taken from PyTorch's CPU index, and
nothing else ever is; where that index cannot be reached, pip's own index is used for it too. ``--torch``
decides for a machine that is not this one: an image is built where no GPU need be. ``--venv`` names the
folder of an environment beside .venv, for tests on another interpreter; ``--test`` installs what they need
without torch. A stamp file makes a second run a matter of milliseconds.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from typing import NoReturn

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONSTRAINTS = os.path.join(ROOT, "constraints.txt")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST = (3, 11)
# What an installation needs: the engine, and what converts the model that `fairway up` fetches.
SERVES = "torch,gguf"
NEEDED_BYTES = 1024**3
NEEDED_CPU_BYTES = 3 * 1024**3
NEEDED_GPU_BYTES = 10 * 1024**3


def main(argv: list[str]) -> None:
    check_python()
    extra = extra_of(argv)
    venv = os.path.join(ROOT, option(argv, "--venv") or ".venv")
    python = os.path.join(venv, "bin", "python")
    if is_current(venv, extra):
        return
    torch = "torch" in extra
    gpu = torch and wants_gpu(argv)
    check_disk(NEEDED_GPU_BYTES if gpu else NEEDED_CPU_BYTES if torch else NEEDED_BYTES)
    if not venv_is_whole(python):
        report("creating the virtual environment in " + os.path.relpath(venv, ROOT))
        create_venv(venv, python)
    if torch and not torch_present(python):
        install_torch(python, gpu)
    report(
        "installing the pinned dependencies" + (" and the tools for development" if "dev" in extra else "")
    )
    # Found by name and with its version met, torch itself is not touched here; what it needs comes along.
    pip(python, ["install", "--constraint", CONSTRAINTS, "--editable", f"{ROOT}[{extra}]"])
    for name in {extra, SERVES} if torch else {extra}:
        with open(stamp_path(venv, name), "w", encoding="utf-8") as stamp:
            stamp.write(fingerprint())


def extra_of(argv: list[str]) -> str:
    if "--test" in argv:
        return "test"
    return SERVES + (",dev" if "--dev" in argv else "")


def check_python() -> None:
    if sys.version_info[:2] < OLDEST:
        fail(
            f"Python {sys.version_info[0]}.{sys.version_info[1]} is too old: Fairway needs 3.11 or later",
            "install one and name it: make up PYTHON=python3.11",
        )
    probe = subprocess.call(
        [sys.executable, "-c", "import ensurepip, venv, ctypes, ssl"], stderr=subprocess.DEVNULL
    )
    if probe != 0:
        fail(
            f"{sys.executable} lacks venv, ensurepip, ctypes or ssl",
            "install the package that carries them (python3.11-venv on Debian and Ubuntu)",
        )


def check_disk(needed: int) -> None:
    free = shutil.disk_usage(ROOT).free
    if free < needed:
        fail(
            f"{free / 1024**3:.1f} GiB are free in {ROOT}; the installation needs {needed / 1024**3:.0f} GiB",
            "free some space and run it again; what is already installed stays",
        )


def venv_is_whole(python: str) -> bool:
    """True when the environment has this very Python, and pip, which is installed into it last."""
    if not os.path.exists(python):
        return False
    code = "import pip, sys; sys.exit(sys.version != sys.argv[1])"
    probe = subprocess.call(
        [python, "-c", code, sys.version], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return probe == 0


def create_venv(venv: str, python: str) -> None:
    if subprocess.call([sys.executable, "-m", "venv", "--clear", venv]) != 0 or not os.path.exists(python):
        fail("the virtual environment could not be created", "see the lines above; `make clean` starts over")


def wants_gpu(argv: list[str]) -> bool:
    """True for ``--torch cuda``, False for ``--torch cpu``; without the option, whether a GPU is here."""
    value = option(argv, "--torch")
    if value is None:
        return has_nvidia_gpu()
    if value not in ("cpu", "cuda"):
        fail(f"--torch {value or 'without a value'} is unknown", "write --torch cpu or --torch cuda")
    return value == "cuda"


def option(argv: list[str], name: str) -> str | None:
    """Return the option's value, empty where none follows it, or None without the option."""
    return "".join(argv[argv.index(name) + 1 :][:1]) if name in argv else None


def has_nvidia_gpu() -> bool:
    try:
        answer = subprocess.run(
            ["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and b"GPU" in answer.stdout


def torch_present(python: str) -> bool:
    """True when the environment has the torch version of the constraints, whatever its build."""
    code = "import importlib.metadata as m; print(m.version('torch').partition('+')[0])"
    answer = subprocess.run(
        [python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    return answer.returncode == 0 and answer.stdout.decode().strip() == pinned("torch")


def install_torch(python: str, gpu: bool) -> None:
    requirement = ["--constraint", CONSTRAINTS, "torch"]
    if gpu:
        report("installing torch for the NVIDIA GPU that is here (a few GB)")
        pip(python, ["install", *requirement])
        return
    with tempfile.TemporaryDirectory() as nothing:
        # These two keep an index or folder of the user's configuration out of this one step.
        only_cpu = dict(os.environ, PIP_EXTRA_INDEX_URL=CPU_INDEX, PIP_FIND_LINKS=nothing)
        question = [
            "index",
            "versions",
            "torch",
            "--index-url",
            CPU_INDEX,
            "--timeout",
            "5",
            "--retries",
            "0",
        ]
        report("no NVIDIA GPU: checking PyTorch's CPU index")
        reached = pip(python, question, env=only_cpu, quiet=True, must=False)
        if reached:
            report("installing torch from it")
            command = ["install", "--no-deps", "--index-url", CPU_INDEX, "--timeout", "30", "--retries", "2"]
            if pip(python, [*command, *requirement], env=only_cpu, must=False):
                return
    report(
        "that index cannot be used from here: taking torch from pip's own index (on Linux it may be large)"
    )
    pip(python, ["install", "--no-deps", *requirement])


def pip(
    python: str,
    arguments: list[str],
    env: dict[str, str] | None = None,
    quiet: bool = False,
    must: bool = True,
) -> bool:
    """Run pip; return whether it succeeded. Ends the script when it had to."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    if quiet:
        nowhere = subprocess.DEVNULL
        ok = subprocess.call(command, env=env, stdout=nowhere, stderr=nowhere, cwd=ROOT) == 0
    else:
        ok = run_reporting([*command, "--progress-bar=off"], env) == 0
    if must and not ok:
        fail(
            "pip could not install",
            "see its lines above: most often the network or a proxy; then run it again",
        )
    return ok


def run_reporting(command: list[str], env: dict[str, str] | None = None, every_s: float = 3.0) -> int:
    """Run pip and return its exit code. While it runs, print its newest step every ``every_s`` seconds."""
    began = time.monotonic()
    steps = ["pip starts"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, cwd=ROOT, encoding="utf-8") as process:
        assert process.stdout is not None
        reader = threading.Thread(target=read_steps, args=(process.stdout, steps), daemon=True)
        reader.start()
        try:
            while True:
                try:
                    return process.wait(every_s)
                except subprocess.TimeoutExpired:
                    report(f"{time.monotonic() - began:4.0f} s  {steps[-1]}")
        finally:
            if process.poll() is None:
                process.terminate()
            reader.join()


def read_steps(lines: Iterable[str], steps: list[str]) -> None:
    """Keep the newest line of pip that names a step, without its folder names and package list."""
    for line in lines:
        text = line.strip()
        if text.startswith(("Collecting", "Downloading", "Using cached", "Building", "Preparing")):
            steps[:] = [text[:100]]
        elif text.startswith("Installing collected packages"):
            steps[:] = [f"installing {text.count(',') + 1} packages"]


def pinned(name: str) -> str:
    with open(CONSTRAINTS, encoding="utf-8") as lines:
        for line in lines:
            found, _, version = line.strip().partition("==")
            if found == name:
                return version
    return fail(f"constraints.txt pins no {name}", "restore the file")


def fingerprint() -> str:
    digest = hashlib.sha256(sys.version.encode())
    for name in ("pyproject.toml", "constraints.txt", os.path.join("scripts", "setup_env.py")):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest() + " " + ROOT


def stamp_path(venv: str, extra: str) -> str:
    return os.path.join(venv, "installed-" + extra.replace(",", "-"))


def is_current(venv: str, extra: str) -> bool:
    try:
        with open(stamp_path(venv, extra), encoding="utf-8") as stamp:
            return stamp.read() == fingerprint() and os.path.exists(os.path.join(venv, "bin", "fairway"))
    except OSError:
        return False


def report(text: str) -> None:
    print("setup: " + text)
    sys.stdout.flush()


def fail(what: str, do: str) -> NoReturn:
    sys.stderr.write(f"setup: error: {what}\nsetup: next:  {do}\n")
    sys.exit(1)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("setup: interrupted; run it again to go on\n")
        sys.exit(130)
