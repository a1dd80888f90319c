import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.schedule.actions import TAIL_OPS, Action, Op

numbers = st.integers(0, 10**6)
microbatch_actions = st.builds(
    Action, numbers, numbers, st.sampled_from([op for op in Op if op not in TAIL_OPS]), numbers
)
tail_actions = st.builds(
    Action, numbers, st.none(), st.sampled_from([op for op in Op if op in TAIL_OPS]), st.none()
)


@given(st.one_of(microbatch_actions, tail_actions))
def test_text_form_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2.0B3", Action(2, 0, Op.B, 3)),
        ("10.1SEND_F12", Action(10, 1, Op.SEND_F, 12)),
        ("0.0RF0", Action(0, 0, Op.RF, 0)),
        ("2.1SEND_MIRROR7", Action(2, 1, Op.SEND_MIRROR, 7)),
        ("2.1RECV_MIRROR7", Action(2, 1, Op.RECV_MIRROR, 7)),
        ("2REDUCE", Action(2, None, Op.REDUCE, None)),
        ("0SEND_TIE", Action(0, None, Op.SEND_TIE, None)),
    ],
)
def test_text_form_is_the_documented_one(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text",
    [
        *("", "2.0B", "2B3", ".0B3", "2.B3", "0B3", "2.0X3", "2.03", "REDUCE", "2.0REDUCE"),
        *(
            "2REDUCE0",
            "2.0REDUCE1",
            "02.0B3",
            "2.00B3",
            "2.0B03",
            "02REDUCE",
            "2.0b3",
            "2.0Send_F1",
        ),
        *(
            " 2.0B3",
            "2.0B3 ",
            "2.0 B3",
            "2.0B3\n",
            "2.0B-3",
            "-1.0B3",
            "+2.0B3",
            "2.0B3x",
            "2.0B3,",
        ),
        *("2.0SENDF1", "2.0RECV_F", "2.0B٣", "2.0B3 2.0B4", "2.0B1e3", "2,0B3", "2.0B1_0"),
    ],
)
def test_anything_else_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no action: write STAGE\.CHUNK OP MICROBATCH"):
        Action.parse(text)


def test_actions_sort_by_stage_first_and_tail_ops_among_them() -> None:
    texts = ["1.0F0", "0REDUCE", "0.0B1", "0.0F1", "0.0F0", "1REDUCE"]
    ordered = sorted(Action.parse(text) for text in texts)
    assert list(map(str, ordered)) == ["0REDUCE", "0.0F0", "0.0F1", "0.0B1", "1REDUCE", "1.0F0"]
