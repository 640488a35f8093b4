"""Where the user's caches are."""

from __future__ import annotations

from pathlib import Path

from services.runtime.folders import cache_folder, folder_variables


def test_the_environment_may_name_it() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere")


def test_a_relative_name_counts_as_none() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "somewhere"}) == cache_folder({}) == Path.home() / ".cache"


def test_of_the_environment_only_what_names_folders_is_handed_on() -> None:
    assert folder_variables({"PATH": "/bin", "HOME": "", "CPATH": "/x"}) == {"PATH": "/bin", "HOME": ""}
