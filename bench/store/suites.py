"""Suites: which command measures, with which arguments, and which way a figure is better."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec

from bench.store.records import NAME, Direction, StoreError

SHIPPED: Final = Path(__file__).parents[1] / "suites.toml"
MAX_VARIANTS: Final = 100
Scalar: TypeAlias = str | int | float | bool


class BenchSuite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One command that prints ``RESULT {json}``, in as many variants as its parameters have combinations."""

    module: Annotated[
        str, msgspec.Meta(pattern=r"^[a-zA-Z_][\w.]*$")
    ]  # module of the source tree that is run
    arguments: list[str] = []  # arguments that are no parameters, as they stand on the command line
    parameters: dict[str, list[Scalar]] = {}  # values of each varied option, by its name
    higher: list[str] = []  # patterns of the figures that are better when higher
    lower: list[str] = []  # patterns of the figures that are better when lower
    starts: Annotated[int, msgspec.Meta(ge=1, le=200)] = 1  # starts of the command for one record
    device: str = "cpu"  # device where no parameter names one
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 4 * 3600.0  # time limit of one start

    def variants(self, over: dict[str, list[str]], given: Sequence[str] = ()) -> list[list[str]]:
        """Return the arguments of each variant. ``over`` replaces parameters, ``given`` is appended.

        Raises StoreError for more than ``MAX_VARIANTS``.
        """
        parameters: dict[str, Sequence[Scalar]] = {**self.parameters, **over}
        combinations = list(itertools.islice(itertools.product(*parameters.values()), MAX_VARIANTS + 1))
        if len(combinations) > MAX_VARIANTS:
            raise StoreError(f"more than {MAX_VARIANTS} variants", "give fewer values to its parameters")
        options = [zip(parameters, values, strict=True) for values in combinations]
        return [[*_options(each), *given] for each in options]

    def better(self, figures: Iterable[str]) -> dict[str, Direction]:
        """Return the direction of the figures that have one."""
        found: dict[str, Direction] = {}
        for name in figures:
            if any(fnmatchcase(name, pattern) for pattern in self.higher):
                found[name] = "higher"
            elif any(fnmatchcase(name, pattern) for pattern in self.lower):
                found[name] = "lower"
        return found


def _options(values: Iterable[tuple[str, Scalar]]) -> list[str]:
    words = []
    for name, value in values:
        if value is not False:
            words.append("--" + name.replace("_", "-"))
            words += [] if value is True else [str(value)]
    return words


def parameters_of(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line by name, several values joined by blanks."""
    found: dict[str, str] = {}
    name = "arguments"
    for word in arguments:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            found[name] = value
        else:
            found[name] = f"{found.get(name, '')} {word}".strip()
    return found


def suites_of(path: Path = SHIPPED) -> dict[str, BenchSuite]:
    """Return the suites of a file by name. Raises StoreError, which names what is wrong."""
    try:
        suites = msgspec.convert(tomllib.loads(path.read_text("utf-8")), dict[str, BenchSuite])
        msgspec.convert(list(suites), list[Annotated[str, msgspec.Meta(pattern=NAME)]])
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}", "name a file of suites") from error
    except (ValueError, msgspec.ValidationError) as error:
        raise StoreError(f"{path}: {error}", f"{SHIPPED} shows the form") from error
    return suites


def suite_named(name: str, path: Path = SHIPPED) -> BenchSuite:
    """Raises StoreError with the known names."""
    suites = suites_of(path)
    if name not in suites:
        raise StoreError(f"there is no suite {name!r}", f"use one of {', '.join(suites)}")
    return suites[name]
