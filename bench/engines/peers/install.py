"""Install the peers of the engine's benchmark: ``make bench-engine-peers``, minutes each.

Each gets a virtual environment of its own, so that none of their dependencies meets ours. Packages come from
where pip is configured to look. llama.cpp is built from the sources that its Python package carries, with
cmake and ninja; that takes ten minutes of two cores, and a compiler.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from email.parser import HeaderParser
from functools import partial
from pathlib import Path
from typing import Final

from bench.engines.peers.catalog import INSTALLED, SERVER, VERSIONS, has_stamp, python_of
from scripts.setup_env import has_nvidia_gpu, install_torch, pinned, pip

# What vLLM names and a run of random ids on a CPU does not need, or needs in another build.
NOT_TAKEN: Final = ("torch", "setuptools<81", "opencv", "mistral_common", "numba", "torchcodec")
TAKEN_INSTEAD: Final = ("mistral_common>=1.11.6", "numba==0.65.0", "opencv-python-headless")
# No tests, no web page, no encryption: a server on this machine's own address.
CMAKE_OPTIONS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_CURL=OFF",
)


def install(
    there: Path, stamp: str, fill: Callable[[str, Path], None], *, interpreter: str = sys.executable
) -> None:
    """The environment ``there`` is whole; one that is whole already is left alone.

    ``fill`` receives its Python and its folder. ``stamp`` names what is compared with.
    """
    if has_stamp(there, stamp):
        print(f"{there.name}: {stamp} is installed")
        return
    shutil.rmtree(there, ignore_errors=True)
    there.parent.mkdir(parents=True, exist_ok=True)
    print(f"{there.name}: installing {stamp}", flush=True)
    subprocess.run([interpreter, "-m", "venv", str(there)], check=True)
    fill(str(python_of(there.parent, there.name)), there)
    (there / INSTALLED).write_text(stamp)


def install_each(about: str, folder: Path, installers: Mapping[str, Callable[[Path], None]]) -> None:
    """Install the peers that the command line names, by default all, below ``folder`` or the folder named.

    An installer receives the folder of its environment. Raises SystemExit that names those that failed.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--folder", type=Path, default=folder)
    parser.add_argument("names", nargs="*", choices=[[], *installers], default=[])
    options = parser.parse_args()
    failed = []
    for name in options.names or installers:
        try:
            installers[name](options.folder.resolve() / name)
        except (subprocess.CalledProcessError, SystemExit, OSError, ValueError) as error:
            failed.append(name)
            print(f"{name}: not installed: {error}")
    if failed:
        raise SystemExit(f"not installed: {', '.join(failed)}; the benchmark names them as missing")


def install_transformers(python: str, _: Path) -> None:
    install_cpu_torch(python)
    pip(python, ["install", VERSIONS["transformers"], "psutil"])


def install_vllm(python: str, _: Path) -> None:
    """The wheel alone, after what it needs: its own requirements name builds for other devices."""
    install_cpu_torch(python)
    with tempfile.TemporaryDirectory() as scratch:
        pip(python, ["download", "--quiet", "--no-deps", "--dest", scratch, VERSIONS["vllm"]])
        (wheel,) = Path(scratch).glob("*.whl")
        needed = [each for each in requirements(wheel) if not each.startswith(NOT_TAKEN)]
        pip(python, ["install", *needed, *TAKEN_INSTEAD, f"torch=={pinned('torch')}"])
        pip(python, ["install", "--no-deps", str(wheel)])


def install_llama_cpp(python: str, there: Path) -> None:
    pip(python, ["install", "gguf", "numpy", "safetensors", "cmake", "ninja"])
    with tempfile.TemporaryDirectory() as scratch:
        package = ["--no-deps", "--no-binary", ":all:", "--dest", scratch, VERSIONS["llama_cpp"]]
        pip(python, ["download", "--quiet", *package])
        (archive,) = Path(scratch).glob("*.tar.gz")
        subprocess.run(["tar", "-xf", archive, "-C", scratch], check=True)
        (tree,) = Path(scratch).glob("*/vendor/llama.cpp")
        built = Path(scratch, "built")
        tools = there / "bin"
        ninja = f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
        options = ["-G", "Ninja", ninja, *CMAKE_OPTIONS]
        subprocess.run([tools / "cmake", "-S", tree, "-B", built, *options], check=True)
        subprocess.run([tools / "cmake", "--build", built, "--target", "llama-server"], check=True)
        shutil.copy2(built / SERVER, there / SERVER)


def install_litellm(python: str, _: Path) -> None:
    pip(python, ["install", VERSIONS["litellm"], "redis", "hiredis", "uvloop"])


def install_aiperf(python: str, _: Path) -> None:
    pip(python, ["install", VERSIONS["aiperf"]])


def install_guidellm(python: str, _: Path) -> None:
    install_cpu_torch(python)
    pip(python, ["install", VERSIONS["guidellm"], f"torch=={pinned('torch')}"])


INSTALLERS: Final[Mapping[str, Callable[[str, Path], None]]] = {
    "litellm": install_litellm,
    "transformers": install_transformers,
    "vllm": install_vllm,
    "llama_cpp": install_llama_cpp,
    "aiperf": install_aiperf,
    "guidellm": install_guidellm,
}


def requirements(wheel: Path) -> list[str]:
    """Return what a wheel requires, without its extras."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(files.read(name).decode())
    named: list[str] = headers.get_all("Requires-Dist") or []
    return [each for each in named if "extra ==" not in each]


def install_cpu_torch(python: str) -> None:
    """torch for the CPU, in the version that we pin, is installed for ``python``."""
    if has_nvidia_gpu():
        print("a GPU is here: the peers get torch for the CPU all the same")
    install_torch(python, gpu=False)
    pip(python, ["install", f"torch=={pinned('torch')}", "numpy"])  # what it needs comes along


def main() -> None:
    installers = {
        name: partial(install, stamp=VERSIONS[name], fill=fill) for name, fill in INSTALLERS.items()
    }
    install_each(__doc__.partition("\n")[0], Path(".fairway", "bench", "peers"), installers)


if __name__ == "__main__":
    main()
