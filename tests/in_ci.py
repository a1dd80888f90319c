"""Which cases CI runs: some of each kind. ``pytest -m slow`` runs the others, too."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def in_ci(cases: Iterable[Any], *chosen: Any) -> list[ParameterSet]:
    """All cases as parameters; those that are not chosen are left to campaigns."""
    return [_parameter((case,), is_chosen) for case, is_chosen in _choose(cases, chosen)]


def several_in_ci(cases: Iterable[tuple[Any, ...]], *chosen: tuple[Any, ...]) -> list[ParameterSet]:
    """The same for cases of several parameters."""
    return [_parameter(case, is_chosen) for case, is_chosen in _choose(cases, chosen)]


def _choose(cases: Iterable[Any], chosen: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
    known = list(cases)
    unknown = [case for case in chosen if case not in known]
    assert not unknown, f"there are no such cases: {unknown}"
    return ((case, case in chosen) for case in known)


def _parameter(values: tuple[Any, ...], is_chosen: bool) -> ParameterSet:
    return pytest.param(*values, marks=[] if is_chosen else [pytest.mark.slow])
