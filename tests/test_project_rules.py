"""Rules that hold for the whole project."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PURE = (
    "schedule",
    "planner",
    "recovery",
    "simulator",
    "evaluation",
    "membership/decision",
    "membership/waits",
    "membership/greeting",
    "membership/keys",
    "membership/lobby",
    "membership/sealing",
    "membership/strangers",
    "data/samples",
    "observe/events",
    "checkpoint/folder",
    "checkpoint/moments",
    "checkpoint/writers",
    "rehearsal/draw",
    "rehearsal/fault",
    "rehearsal/leaks",
    "rehearsal/work",
    "watching/history",
    "watching/loss_kinds",
    "watching/render",
    "watching/status",
    "watching/summary",
)


def pure_modules() -> list[str]:
    """The modules that decide: they must run anywhere, in milliseconds (invariant 8)."""
    package = ROOT / "megatron_bamboo"
    paths = [path for name in PURE for path in (package / name).rglob("*.py")]
    paths += [package / f"{name}.py" for name in PURE if (package / f"{name}.py").is_file()]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(paths)]


def imported_by(modules: list[str]) -> set[str]:
    """The top-level packages that a fresh process holds after importing these modules."""
    lines = "\n".join(f"import {module}" for module in modules)
    code = f"{lines}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-c", code]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


@pytest.mark.parametrize(
    "modules", [pure_modules(), ["megatron_bamboo.cli"]], ids=["pure packages", "command"]
)
def test_no_torch(modules: list[str]) -> None:
    assert not {"torch", "megatron", "numpy"} & imported_by(modules)


def requirements(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


@pytest.mark.parametrize(
    "name", ["requirements.txt", "requirements-dev.txt", "requirements-gpu.txt"]
)
def test_requirements_are_exact_and_never_name_the_unrelated_apex(name: str) -> None:
    for requirement in requirements(name):
        assert re.fullmatch(r"[a-z0-9-]+(\[[a-z0-9_,]+\])?==[0-9][0-9a-z.]*", requirement)
        assert not requirement.startswith("apex")


def test_test_files_have_names_of_their_own() -> None:
    """Tests are no packages: pytest imports each by its name alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
