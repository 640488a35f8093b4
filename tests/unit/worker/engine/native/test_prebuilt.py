"""Compiled beforehand: the best that the processor runs, from a folder that nobody else can write to."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import torch

from services.worker.engine.execute.kv_cache import KvShape
from services.worker.engine.execute.operators import HeadNorms
from services.worker.engine.execute.step_rows import Span
from services.worker.engine.load.torch_loading import load_library
from services.worker.engine.native import prebuilt
from services.worker.engine.native.attention import NativeAttention, NativeKvCache
from services.worker.engine.native.build import COMPILERS, SOURCE, BuildFailed, Toolchain
from services.worker.engine.native.check import wrong
from services.worker.engine.native.library import OPENMP, Library, loaded_openmp
from services.worker.engine.native.operators import NativeOperators
from tests.support import compiled as compiled_libraries

MakeCompiler = Callable[..., Toolchain]

V2 = "fpu sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
X86_NAMES = ["x86-64-v4", "x86-64-v3", "x86-64-v2"]


def cpuinfo_of(flags: str) -> str:
    return f"processor\t: 0\nmodel name\t: Some processor\nflags\t\t: {flags}\nbugs\t\t: avx512f\n\n" * 2


@pytest.mark.parametrize(
    ("machine", "flags", "names"),
    [
        ("x86_64", V4, X86_NAMES),
        ("x86_64", V4.replace("avx512vl", ""), X86_NAMES[1:]),
        ("x86_64", V3, X86_NAMES[1:]),
        ("x86_64", V3.replace("fma", ""), X86_NAMES[2:]),
        ("x86_64", V2, X86_NAMES[2:]),
        ("x86_64", "fpu sse sse2", []),
        ("aarch64", "", ["armv8-a"]),
        ("riscv64", V4, []),
    ],
)
def test_a_level_is_used_where_every_feature_of_it_is_there(
    machine: str, flags: str, names: list[str]
) -> None:
    found = prebuilt.usable_levels(machine, cpuinfo_of(flags))
    assert [level.name for level in found] == names


@pytest.fixture
def folder(tmp_path: Path, compiler: MakeCompiler) -> Path:
    """Libraries of all levels, each a scripted compiler's output."""
    prebuilt.make(tmp_path / "prebuilt", compiler())
    return tmp_path / "prebuilt"


@pytest.fixture
def processor(tmp_path: Path) -> Path:
    """A processor with everything, as the kernel describes it."""
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo_of(V4))
    return path


def levels_in(folder: Path) -> list[Path]:
    """Return the libraries, the best first."""
    names = [level.name for level in prebuilt.levels_of(platform.machine())]
    return [next(folder.glob(f"operators-{name}-*.so")) for name in names]


def test_there_is_one_of_each_level_for_everybody_to_read(folder: Path, tmp_path: Path) -> None:
    made = levels_in(folder)
    assert sorted(folder.iterdir()) == sorted(made)
    assert {path.stat().st_mode & 0o777 for path in made} == {0o555}
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if " -c " in line]
    names = [level.name for level in prebuilt.levels_of(platform.machine())]
    assert [f"-march={name} " in line for name, line in zip(names, lines, strict=True)] == [True] * len(names)


def test_the_best_of_those_that_are_there_is_found(folder: Path, processor: Path) -> None:
    for library in levels_in(folder):
        assert prebuilt.find(folder, None, cpuinfo=processor) == library
        library.unlink()
    with pytest.raises(BuildFailed, match="no library for this"):
        prebuilt.find(folder, None, cpuinfo=processor)


def test_a_library_of_another_source_or_runtime_is_not_found(
    folder: Path, processor: Path, tmp_path: Path
) -> None:
    runtime = tmp_path / "libgomp.so.1"
    runtime.write_bytes(b"of another torch")
    source = tmp_path / "source"
    source.mkdir()
    (source / "operators.cc").write_text("int a;")
    for openmp, where in ((runtime, SOURCE), (None, source)):
        with pytest.raises(BuildFailed, match="no library for this"):
            prebuilt.find(folder, openmp, source=where, cpuinfo=processor)


def test_a_folder_that_is_not_there_is_no_error(tmp_path: Path, processor: Path) -> None:
    assert prebuilt.find(tmp_path / "prebuilt", None, cpuinfo=processor) is None


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_a_folder_that_others_write_to_is_refused(folder: Path, processor: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(BuildFailed, match="only root and this user"):
        prebuilt.find(folder, None, cpuinfo=processor)


def test_a_folder_that_others_can_replace_is_refused(folder: Path, processor: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    folder.rename(shared / "prebuilt")
    shared.chmod(0o777)
    with pytest.raises(BuildFailed, match="others can replace"):
        prebuilt.find(shared / "prebuilt", None, cpuinfo=processor)


@pytest.mark.parametrize("mode", [0o575, 0o557])
def test_a_library_that_others_write_to_is_refused(folder: Path, processor: Path, mode: int) -> None:
    levels_in(folder)[0].chmod(mode)
    with pytest.raises(BuildFailed, match="only root and this user"):
        prebuilt.find(folder, None, cpuinfo=processor)


def test_a_link_in_place_of_a_library_is_refused(folder: Path, processor: Path, tmp_path: Path) -> None:
    library = levels_in(folder)[0]
    library.rename(tmp_path / "elsewhere.so")
    library.symlink_to(tmp_path / "elsewhere.so")
    with pytest.raises(BuildFailed, match="only root and this user"):
        prebuilt.find(folder, None, cpuinfo=processor)


@pytest.mark.parametrize("left", [0, 3, 20, 40])
def test_a_library_that_is_cut_short_is_refused(folder: Path, processor: Path, left: int) -> None:
    library = levels_in(folder)[0]
    library.chmod(0o755)
    library.write_bytes(library.read_bytes()[:left])
    with pytest.raises(BuildFailed, match="cut short"):
        prebuilt.find(folder, None, cpuinfo=processor)


# --- with a real compiler ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Libraries of all levels of this machine."""
    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("image") / "prebuilt"
    compiled_libraries.all_levels(tmp_path_factory.getbasetemp(), folder)
    return folder


def usable(folder: Path) -> list[Path]:
    levels = prebuilt.usable_levels(platform.machine(), prebuilt.CPUINFO.read_text())
    return [next(folder.glob(f"operators-{level.name}-*.so")) for level in levels]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_level_computes_and_those_with_fma_to_the_same_bits(
    compiled: Path, library_file: Path, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows, dim = 17, 20
    x, residual, weight, bias = drawn(rows, 300), drawn(rows, 96), drawn(96, 300), drawn(96)
    qkv, norm, cos, sin = drawn(rows, 4, dim), drawn(dim), drawn(rows, 1, dim), drawn(rows, 1, dim)

    def computed(path: Path) -> list[torch.Tensor]:
        """Norms, products with every end, heads, and attention over blocks."""
        library = Library(path, dtype)
        operators = NativeOperators(library, kv_heads=1, eps=1e-5, threads=2)
        normed = operators.norm(x, weight[0])
        linear = operators.projection([weight], bias)
        parts = [
            normed,
            operators.gated([weight], bias)(normed),
            linear(x),
            linear.add_to(residual.clone(), x),
        ]
        q, k, v = operators.heads(qkv.clone(), HeadNorms(norm, norm), cos, sin)
        pool = NativeKvCache(KvShape(1, 1, dim, 16, dtype), 2)
        attention = NativeAttention(library, pool, windows=[None], threads=2)
        attention.begin([Span(0, rows, rows, [1, 0], False)], torch.tensor([*range(16, 32), 0]))
        return [*parts, q, k, attention.attend(0, q, k, v)]

    expected = computed(library_file)
    for path in usable(compiled):
        assert wrong(Library(path, dtype), dtype) == ()
        if "x86-64-v2" not in path.name:
            for got, same in zip(computed(path), expected, strict=True):
                assert torch.equal(got, same), path.name


def test_no_compiler_and_no_cache_are_needed(compiled: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    library = load_library(tmp_path / "file" / "cache", torch.float32, beforehand=compiled)
    assert library.name == usable(compiled)[0].name


def test_its_threads_are_those_of_torch(compiled: Path, tmp_path: Path) -> None:
    """A second OpenMP runtime would keep threads of its own."""
    load_library(tmp_path, torch.float32, beforehand=compiled)
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    assert {path for path in paths if OPENMP.search(path)} == {str(loaded_openmp())}


@pytest.mark.parametrize("spoil", ["writable", "no library"])
def test_where_none_can_be_used_one_is_compiled_and_the_reason_is_told(
    compiled: Path, library_file: Path, folder: Path, tmp_path: Path, spoil: str
) -> None:
    """What a scripted compiler made is sealed, and no library."""
    if spoil == "writable":
        folder = tmp_path / "copy"
        shutil.copytree(compiled, folder)
        folder.chmod(0o777)
        reason = "only root and this user"
    else:
        openmp = loaded_openmp()
        for made, real in zip(levels_in(folder), levels_in(compiled), strict=True):
            made.rename(folder / real.name)
        assert openmp is None or prebuilt.find(folder, openmp) is not None
        reason = "cannot be loaded"
    with structlog.testing.capture_logs() as logs:
        library = load_library(library_file.parent, torch.float32, beforehand=folder)
    assert library.name == library_file.name
    (line,) = [entry for entry in logs if entry["event"] == "operators.prebuilt_refused"]
    assert reason in line["reason"]
