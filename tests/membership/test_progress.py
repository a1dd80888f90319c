import pytest

from megatron_bamboo.membership.progress import NodeProgress
from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.takeover import Progress


def test_progress_comes_back_exactly() -> None:
    done = frozenset(Action.parse(text) for text in ("1.0F0", "1.0SEND_F0", "2.0RF0", "1.0F10"))
    received = frozenset({Action.parse("1.0RECV_F0"), Action.parse("1.0RECV_B0")})
    written = NodeProgress("node1", 7, Progress(done, received))
    assert NodeProgress.from_json(written.to_json()) == written
    assert '"received": ["1.0RECV_F0", "1.0RECV_B0"]' in written.to_json()


def test_what_is_no_action_is_refused() -> None:
    with pytest.raises(ValueError, match="is no action"):
        NodeProgress.from_json('{"node": "n", "step": 1, "done": ["1.0f0"], "received": []}')
