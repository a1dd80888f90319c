"""A short attack on a coordinator's port; ``hostile.py`` itself is the long one [10]."""

from pathlib import Path

import pytest
from hostile import MOST_GROWTH_BYTES, attack


@pytest.mark.multiprocess
def test_a_short_attack_changes_nothing_and_keeps_no_agent_waiting(tmp_path: Path) -> None:
    findings = attack(tmp_path, frames=1500, idle=300, seconds=1.0, seed=7)
    assert findings.is_unchanged
    assert findings.beats >= 3
    assert findings.grown_mib * 2**20 <= MOST_GROWTH_BYTES
    assert findings.descriptors_more < 300
    assert 0 < findings.log_lines <= 3
