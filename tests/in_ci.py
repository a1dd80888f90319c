"""Which cases CI runs: some of each kind. ``pytest -m slow`` runs the others, too."""

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def in_ci(cases: Iterable[Any], *chosen: Any) -> list[ParameterSet]:
    """All cases as parameters; those that are not chosen are left to campaigns."""
    cases = list(cases)
    unknown = [case for case in chosen if case not in cases]
    assert not unknown, f"there are no such cases: {unknown}"
    return [pytest.param(c, marks=[] if c in chosen else [pytest.mark.slow]) for c in cases]
