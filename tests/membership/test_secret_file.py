"""Where a job's secret is found, and who may be able to read it."""

import os
from pathlib import Path

import pytest

from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.keys import Secret
from megatron_bamboo.membership.secret_file import (
    SECRET_FILE,
    SECRET_VARIABLE,
    check_secret,
    find_or_make_secret,
    find_secret,
    without_secret,
)

TEXT = "a secret that is as long as it must be"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


def write(path: Path, text: str = TEXT, mode: int = 0o600) -> Path:
    path.write_text(text + "\n")
    path.chmod(mode)
    return path


def test_the_launcher_makes_one_that_only_its_owner_reads(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        made = find_or_make_secret(tmp_path)
    finally:
        os.umask(old)
    path = tmp_path / SECRET_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert made == find_secret(tmp_path) == find_or_make_secret(tmp_path)
    (tmp_path / "other").mkdir()
    assert find_or_make_secret(tmp_path / "other") != made


def test_a_named_file_comes_first_and_then_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / SECRET_FILE)
    named = write(tmp_path / "named", TEXT + " 2")
    assert find_secret(tmp_path) == Secret.of(TEXT)
    monkeypatch.setenv(SECRET_VARIABLE, TEXT + " 3")
    assert find_secret(tmp_path) == find_or_make_secret(tmp_path) == Secret.of(TEXT + " 3")
    assert find_secret(tmp_path, named) == Secret.of(TEXT + " 2")
    assert find_or_make_secret(tmp_path, named) == Secret.of(TEXT + " 2")
    assert SECRET_VARIABLE not in without_secret(os.environ)
    assert without_secret(os.environ).items() <= os.environ.items()


def test_nothing_is_made_where_one_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_or_make_secret(tmp_path, write(tmp_path / "named"))
    monkeypatch.setenv(SECRET_VARIABLE, TEXT)
    find_or_make_secret(tmp_path)
    assert not (tmp_path / SECRET_FILE).exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666, 0o610])
def test_a_file_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / SECRET_FILE, mode=mode)
    with pytest.raises(UserError, match=rf"{path} .* open to others \(mode 0{mode:o}\).*600"):
        find_secret(tmp_path)
    for refuse in (find_or_make_secret, check_secret):
        with pytest.raises(UserError, match="open to others"):
            refuse(tmp_path)


@pytest.mark.parametrize("text", ["", "short", "\xff\xfe"])
def test_what_is_no_secret_is_refused_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = write(tmp_path / SECRET_FILE, text)
    with pytest.raises(UserError, match=rf"{path} holds no usable secret .*openssl") as refused:
        find_secret(tmp_path)
    assert not text or text not in str(refused.value)
    monkeypatch.setenv(SECRET_VARIABLE, text)
    with pytest.raises(UserError, match=f"{SECRET_VARIABLE} holds no usable secret"):
        find_secret(tmp_path)


def test_without_a_secret_nothing_starts(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=f"cannot be read .* or the secret itself in {SECRET_VARIABLE}"
    ):
        find_secret(tmp_path)
    for refuse in (find_or_make_secret, check_secret):
        with pytest.raises(UserError, match="cannot be read"):
            refuse(tmp_path, tmp_path / "named")
    check_secret(tmp_path)
    assert list(tmp_path.iterdir()) == []
