"""What the agent reads of the steps that its engine announced."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.worker.step_page import StepPage, size_of


@dataclass(eq=False)
class Member:
    handle: int


ONE, TWO, THREE = Member(1), Member(2), Member(3)


def in_memory(most: int) -> StepPage:
    return StepPage(memoryview(bytearray(size_of(most))).cast("Q"), most)


def test_a_step_is_announced_until_it_ends() -> None:
    page = in_memory(3)
    assert page.members() == ()
    page.began([ONE, TWO], [THREE])
    assert page.members() == (1, 2, 3)
    page.ended()
    assert page.members() == ()


def test_the_same_members_again_and_others_after_them() -> None:
    page = in_memory(3)
    for step in ([ONE, TWO], [ONE, TWO], [ONE, TWO], [TWO], [TWO, THREE], [ONE, TWO]):
        page.began(step)
        assert page.members() == tuple(member.handle for member in step)
        page.ended()


def test_a_step_with_prefills_does_not_hide_that_the_members_changed() -> None:
    page = in_memory(3)
    for decodes, prefills in (
        ([ONE], []),
        ([], [TWO]),
        ([ONE], []),
        ([ONE], [THREE]),
        ([ONE], []),
        ([ONE], []),
    ):
        page.began(decodes, prefills)
        assert page.members() == tuple(member.handle for member in (*decodes, *prefills))
        page.ended()


def test_two_steps_run_when_one_is_submitted_ahead() -> None:
    page = in_memory(2)
    page.began([ONE])
    page.began([ONE, TWO])
    assert page.members() == (1, 2)
    page.ended()
    assert page.members() == (1, 2)
    page.began([TWO])
    page.ended()
    assert page.members() == (2,)
    page.ended()
    assert page.members() == ()


def test_both_ends_share_a_file_that_only_its_user_reads(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    agent = StepPage.create(path, 64)
    engine = StepPage.open(path, 64)
    engine.began([THREE], [ONE])
    path.unlink()
    assert agent.members() == (3, 1)
    engine.ended()
    assert agent.members() == ()


def test_the_file_is_new_private_and_large_enough(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    StepPage.create(path, 4)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(path).st_size == size_of(4)
    with pytest.raises(FileExistsError):
        StepPage.create(path, 4)
    with pytest.raises(ValueError, match="length"):
        StepPage.open(path, 5)
