from dataclasses import replace

from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.one_f_one_b import one_f_one_b
from megatron_bamboo.schedule.schedule import Program, Schedule


def actions(text: str) -> Program:
    return tuple(map(Action.parse, text.split()))


def texts(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, program)) for program in schedule.programs]


def two_stages(rank_0: str, rank_1: str) -> Schedule:
    return replace(one_f_one_b(2, 2), programs=(actions(rank_0), actions(rank_1)))


def test_send_follows_producer_and_receive_precedes_consumer() -> None:
    assert texts(lower(one_f_one_b(2, 2))) == [
        "0.0F0 0.0SEND_F0 0.0F1 0.0SEND_F1 0.0RECV_B0 0.0B0 0.0RECV_B1 0.0B1",
        "1.0RECV_F0 1.0F0 1.0B0 1.0SEND_B0 1.0RECV_F1 1.0F1 1.0B1 1.0SEND_B1",
    ]


def test_neighbours_on_one_worker_exchange_no_message() -> None:
    one_worker = actions("0.0F0 1.0F0 1.0B0 0.0B0 0.0F1 1.0F1 1.0B1 0.0B1")
    schedule = replace(one_f_one_b(2, 2), programs=(one_worker, ()), placement=(0, 0))
    assert lower(schedule) == schedule


def test_chunks_are_joined_from_the_last_stage_back_to_the_first() -> None:
    programs = (actions("0.0F0 0.1F0 0.1B0 0.0B0"), actions("1.0F0 1.1F0 1.1B0 1.0B0"))
    schedule = Schedule(programs, (0, 1), (None, None), num_chunks=2, num_microbatches=1)
    assert texts(lower(schedule)) == [
        "0.0F0 0.0SEND_F0 0.1RECV_F0 0.1F0 0.1SEND_F0 0.1RECV_B0 0.1B0 0.1SEND_B0 0.0RECV_B0 0.0B0",
        "1.0RECV_F0 1.0F0 1.0SEND_F0 1.1RECV_F0 1.1F0 1.1B0 1.1SEND_B0 1.0RECV_B0 1.0B0 1.0SEND_B0",
    ]


def test_what_was_computed_but_not_sent_is_sent_first() -> None:
    schedule = two_stages("0.0F1 0.0B0 0.0B1", "1.0F0 1.0B0 1.0F1 1.0B1")
    lowered = lower(schedule, done=frozenset(actions("0.0F0")))
    assert texts(lowered)[0] == "0.0SEND_F0 0.0F1 0.0SEND_F1 0.0RECV_B0 0.0B0 0.0RECV_B1 0.0B1"


def test_a_message_under_way_is_received_and_not_sent_again() -> None:
    schedule = two_stages("0.0F1 0.0B0 0.0B1", "1.0F0 1.0B0 1.0F1 1.0B1")
    lowered = lower(schedule, done=frozenset(actions("0.0F0 0.0SEND_F0")))
    assert texts(lowered) == [
        "0.0F1 0.0SEND_F1 0.0RECV_B0 0.0B0 0.0RECV_B1 0.0B1",
        "1.0RECV_F0 1.0F0 1.0B0 1.0SEND_B0 1.0RECV_F1 1.0F1 1.0B1 1.0SEND_B1",
    ]


def test_a_message_that_arrived_is_neither_sent_nor_received_again() -> None:
    schedule = two_stages("0.0F0 0.0F1 0.0B0 0.0B1", "1.0F0 1.0B0 1.0F1 1.0B1")
    lowered = lower(schedule, received=frozenset(actions("1.0RECV_F0")))
    assert texts(lowered) == [
        "0.0F0 0.0F1 0.0SEND_F1 0.0RECV_B0 0.0B0 0.0RECV_B1 0.0B1",
        "1.0F0 1.0B0 1.0SEND_B0 1.0RECV_F1 1.0F1 1.0B1 1.0SEND_B1",
    ]


def test_a_result_whose_consumer_is_done_is_not_sent() -> None:
    schedule = two_stages("0.0F0 0.0F1 0.0B0 0.0B1", "1.0B0 1.0F1 1.0B1")
    done = frozenset(actions("1.0F0"))
    assert texts(lower(schedule, done))[0].startswith("0.0F0 0.0F1 0.0SEND_F1")


def test_the_redundant_forward_of_a_promoted_replica_is_sent_from_the_log() -> None:
    schedule = Schedule(
        programs=(actions("1.0B0 0.0B0"), (), actions("2.0F0 2.0B0")),
        placement=(0, 0, 2),
        replicas=(2, None, None),
        num_chunks=1,
        num_microbatches=1,
    )
    lowered = lower(schedule, done=frozenset(actions("0.0F0 1.0RF0")))
    assert texts(lowered) == [
        "1.0SEND_F0 1.0RECV_B0 1.0B0 0.0B0",
        "",
        "2.0RECV_F0 2.0F0 2.0B0 2.0SEND_B0",
    ]


def test_the_redundant_forward_of_a_live_replica_sends_nothing() -> None:
    schedule = Schedule(
        programs=((), actions("1.0F0 1.0B0"), actions("2.0F0 2.0B0")),
        placement=(0, 1, 2),
        replicas=(2, 0, 1),
        num_chunks=1,
        num_microbatches=1,
    )
    lowered = lower(schedule, done=frozenset(actions("0.0F0 0.0SEND_F0 1.0RF0")))
    assert texts(lowered)[0] == ""
