"""The folder of checkpoints: whatever ends a write, the tracker names a whole checkpoint [9]."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.checkpoint import folder
from megatron_bamboo.checkpoint.folder import (
    PARTS,
    TRACKER,
    check_whole,
    claim,
    make_partial,
    publish,
    read_tracker,
    saved_steps,
    step_folder,
)
from megatron_bamboo.checkpoint.moments import SaveMoment
from megatron_bamboo.errors import UserError

CHANGES = ("rename", "replace", "fsync", "open", "mkdir", "unlink", "rmdir")


class Died(BaseException):
    """The process is gone: nothing catches this."""


def write(root: Path, step: int, epoch: int = 0, content: str = "x") -> Path:
    """What the writers do before the lead publishes."""
    partial = make_partial(root, step, epoch)
    for name in (*PARTS, "__0_0.distcp"):
        (partial / name).write_text(content)
    return partial


def save(root: Path, step: int, epoch: int = 0, content: str = "x") -> None:
    publish(write(root, step, epoch, content), root, step, lambda moment: None)


def die_at(monkeypatch: pytest.MonkeyPatch, number: int, after: bool) -> Callable[[], int]:
    """Let the process die before or after its call ``number`` that changes a folder."""
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number and not after:
                raise Died
            result = real(*args, **options)
            if calls == number:
                raise Died
            return result

        return call

    for name in CHANGES:
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return lambda: calls


def check_tracked_is_whole(root: Path, allowed: set[int]) -> int:
    tracked = read_tracker(root)
    assert tracked in allowed
    check_whole(step_folder(root, tracked))
    assert (step_folder(root, tracked) / "__0_0.distcp").exists()
    return tracked


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_death_at_any_call_leaves_a_whole_checkpoint_that_the_tracker_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    number, is_over = 0, False
    while not is_over:
        number += 1
        root = tmp_path / f"died-{number}"
        save(root, 10, content="old")
        with monkeypatch.context() as patched:
            count = die_at(patched, number, after)
            with contextlib.suppress(Died):
                save(root, 20, content="new")
            is_over = count() < number
        tracked = check_tracked_is_whole(root, {10, 20})
        assert tracked == 20 or not is_over
        for step in saved_steps(root):  # whatever has a final name is whole
            check_whole(step_folder(root, step))
        save(root, 20, epoch=1, content="new")  # the same job tries again, or a later one
        assert sorted(os.listdir(root)) == ["iter_0000010", "iter_0000020", TRACKER]
        assert read_tracker(root) == 20
        assert (step_folder(root, 20) / "common.pt").read_text() == "new"
    assert number > 15


def test_everything_is_synced_before_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real_sync, real_rename = folder._sync, os.rename
    monkeypatch.setattr(folder, "_sync", lambda p: (real_sync(p), done.append(f"sync {p.name}")))
    monkeypatch.setattr(
        os, "rename", lambda a, b: (real_rename(a, b), done.append(f"name {Path(b).name}"))
    )
    partial = write(tmp_path, 10)
    publish(partial, tmp_path, 10, lambda moment: done.append(moment))
    at = {what: index for index, what in enumerate(done)}
    named = at["name iter_0000010"]
    assert all(at[f"sync {name}"] < named for name in (*PARTS, "__0_0.distcp", partial.name))
    assert named < done.index(f"sync {tmp_path.name}") < at[f"name {TRACKER}"]
    assert done[-2:] == [f"sync {tmp_path.name}", SaveMoment.END]


def test_of_two_attempts_the_second_drops_its_own(tmp_path: Path) -> None:
    first, second = write(tmp_path, 10, epoch=0), tmp_path / "iter_0000010.partial-late"
    shutil.copytree(first, second)
    publish(first, tmp_path, 10, lambda moment: None)
    inode = (tmp_path / "iter_0000010").stat().st_ino
    publish(second, tmp_path, 10, lambda moment: None)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000010", TRACKER]
    assert (tmp_path / "iter_0000010").stat().st_ino == inode


def test_a_late_attempt_never_sets_the_tracker_back(tmp_path: Path) -> None:
    late = write(tmp_path, 10)
    os.rename(late, tmp_path / "kept")
    save(tmp_path, 20)
    publish(tmp_path / "kept", tmp_path, 10, lambda moment: None)
    assert read_tracker(tmp_path) == 20


def test_the_next_save_removes_what_earlier_ones_left(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (tmp_path / f"{TRACKER}.partial-abc").touch()
    (tmp_path / "notes.partial-mine").touch()
    save(tmp_path, 20)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000020", TRACKER, "notes.partial-mine"]


@pytest.mark.parametrize("content", ["", "release", "ten", "-1", "10 20", "\x00", "1" * 70])
def test_an_unreadable_tracker_is_said_with_the_choices(tmp_path: Path, content: str) -> None:
    save(tmp_path, 5)
    (tmp_path / TRACKER).write_text(content)
    with pytest.raises(UserError, match=r"write the newest whole one into it \(there are 5\)"):
        read_tracker(tmp_path)


def test_a_tracker_of_megatrons_is_read(tmp_path: Path) -> None:
    assert read_tracker(tmp_path) is None
    assert read_tracker(tmp_path / "not there") is None
    (tmp_path / TRACKER).write_text("1500\n")
    assert read_tracker(tmp_path) == 1500


@pytest.mark.parametrize("name", PARTS)
def test_a_checkpoint_that_lacks_a_part_is_said_with_the_choices(tmp_path: Path, name: str) -> None:
    save(tmp_path, 5)
    save(tmp_path, 10)
    (step_folder(tmp_path, 10) / name).unlink()
    with pytest.raises(UserError, match=rf"has no {name}: .*--ckpt-step.*there are 5, 10"):
        check_whole(step_folder(tmp_path, 10))
    with pytest.raises(UserError, match=r"there is no .*iter_0000020"):
        check_whole(step_folder(tmp_path, 20))


@given(
    folders=st.sets(st.integers(1, 6)),
    tracked=st.one_of(st.none(), st.integers(1, 6)),
    start=st.integers(0, 6),
)
def test_claiming_never_removes_and_leaves_the_way_free(
    tmp_path_factory: pytest.TempPathFactory,
    folders: set[int],
    tracked: int | None,
    start: int,
) -> None:
    root = tmp_path_factory.mktemp("claimed") / "save"
    for step in folders:
        step_folder(root, step).mkdir(parents=True)
        (step_folder(root, step) / "of").write_text(str(step))
    if tracked is not None:
        root.mkdir(exist_ok=True)
        (root / TRACKER).write_text(str(tracked))
    if tracked is not None and tracked > start:
        with pytest.raises(UserError, match=f"holds step {tracked}, but this run starts from"):
            claim(root, start)
        assert saved_steps(root) == sorted(folders)
        return
    aside = claim(root, start)
    assert saved_steps(root) == sorted(step for step in folders if step <= start)
    assert sorted(int((path / "of").read_text()) for path in aside) == sorted(
        step for step in folders if step > start
    )
    assert read_tracker(root) == tracked
    step_folder(root, start + 1).mkdir()
    assert len(claim(root, start)) == 1  # a second time too


def test_a_folder_that_cannot_be_made_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"--save .*file/save cannot be written to: Not a directory"
    ):
        claim(tmp_path / "file" / "save", 0)
