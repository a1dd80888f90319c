"""What waits show of broken links: on whole steps of small jobs, played action by action."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bamboo.membership.waits import Sent, SentLog, Wait, Waiting
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.links import BrokenLink, broken_links, whom_to_fence
from megatron_bamboo.planner.plan import initial_plan
from megatron_bamboo.planner.taking_over import plan_after_loss
from megatron_bamboo.schedule.actions import SEND_OPS, Action, Op
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.tail import add_tail

NUM_STEPS = 3
LIMIT, LONG, SHORT = 10.0, 30.0, 9.0
COLLECTIVES = {Op.REDUCE, Op.COMMIT, Op.GATHER, Op.RGATHER}
MESSAGES = {Op.RECV_F, Op.RECV_B, Op.TIE, Op.RECV_REFRESH}


@dataclass(frozen=True, slots=True)
class Job:
    num_stages: int
    num_pipelines: int
    num_microbatches: int
    num_chunks: int
    sharded: bool


JOBS = st.builds(
    Job,
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 2),
    st.booleans(),
)


class Play:
    """All workers of a job run their programs; what goes over a cut link never arrives."""

    def __init__(self, job: Job, random: Random) -> None:
        self.random = random
        self.num_stages, self.num_pipelines = job.num_stages, job.num_pipelines
        compute = compute_schedule(job.num_stages, job.num_chunks, job.num_microbatches)
        schedule = lower(add_redundancy(compute, Redundancy.LAZY))
        self.schedule = add_tail(schedule, tied=True, sharded=job.sharded and job.num_pipelines > 1)
        self.workers = range(job.num_stages * job.num_pipelines)
        arrangement = equal_pipelines(job.num_stages, job.num_pipelines, 4)
        self.plan = initial_plan(list(map(name, self.workers)), arrangement, "lazy")
        self.places = [(1, 0)] * len(self.workers)
        self.inbox: list[set[tuple[int, Action]]] = [set() for _ in self.workers]
        self.logs = [SentLog() for _ in self.workers]
        self.left: dict[object, set[int]] = {}
        self.cut: tuple[int, int] | None = None

    def action(self, worker: int) -> Action | None:
        """What a worker is at; None when it is done with all steps."""
        step, place = self.places[worker]
        return None if step > NUM_STEPS else self.program(worker)[place]

    def program(self, worker: int) -> tuple[Action, ...]:
        return self.schedule.programs[worker % self.num_stages]

    def run(self, num_events: int) -> None:
        """Random events, at most so many."""
        for _ in range(num_events):
            able = [worker for worker in self.workers if self.can_go_on(worker)]
            if not able:
                return
            self.go_on(self.random.choice(able))

    def can_go_on(self, worker: int) -> bool:
        action, step = self.action(worker), self.places[worker][0]
        if action is None:
            return False
        if action.op in MESSAGES:
            awaited = self.sender(worker, action)
            return awaited is None or (step, action) in self.inbox[worker]
        if action.op in COLLECTIVES:
            key, members = self.collective(worker, action)
            if not all(self.has_entered(member, key) for member in members):
                return False
            return self.cut is None or not set(self.cut) <= set(members) or worker != self.cut[1]
        return True

    def go_on(self, worker: int) -> None:
        action = self.action(worker)
        step, place = self.places[worker]
        assert action is not None
        if action.op in COLLECTIVES:
            self.left.setdefault(self.collective(worker, action)[0], set()).add(worker)
        if action.op in SEND_OPS | {Op.SEND_TIE, Op.SEND_REFRESH}:
            self.send(worker, action)
        is_last = place + 1 == len(self.program(worker))
        self.places[worker] = (step + 1, 0) if is_last else (step, place + 1)

    def send(self, worker: int, action: Action) -> None:
        receiver, message = self.receiver(worker, action)
        step = self.places[worker][0]
        self.logs[worker].note(name(receiver), step, message)
        if (worker, receiver) != self.cut:
            self.inbox[receiver].add((step, message))

    def receiver(self, worker: int, send: Action) -> tuple[int, Action]:
        schedule, base = self.schedule, worker - worker % self.num_stages
        match send.op:
            case Op.SEND_TIE:
                message = Action(self.num_stages - 1 - send.stage, None, Op.TIE, None)
                rank: int | None = schedule.placement[message.stage]
            case Op.SEND_REFRESH:
                message = Action(send.stage, None, Op.RECV_REFRESH, None)
                rank = schedule.replicas[send.stage]
            case _:
                message = schedule.receive_of(send)
                rank = schedule.placement[message.stage]
        assert rank is not None
        return base + rank, message

    def sender(self, worker: int, receive: Action) -> int | None:
        """Who sends a message; None where it is here already."""
        schedule, base = self.schedule, worker - worker % self.num_stages
        match receive.op:
            case Op.TIE:
                rank = schedule.placement[self.num_stages - 1 - receive.stage]
            case Op.RECV_REFRESH:
                rank = schedule.placement[receive.stage]
            case _:
                rank = schedule.placement[schedule.send_of(receive).stage]
        return None if base + rank == worker else base + rank

    def collective(self, worker: int, action: Action) -> tuple[object, tuple[int, ...]]:
        """Which one it is, and its members."""
        step, stage = self.places[worker][0], action.stage
        if action.op is Op.COMMIT:
            return (step, Op.COMMIT), tuple(self.workers)
        primaries = [self.num_stages * d + stage for d in range(self.num_pipelines)]
        if action.op is Op.REDUCE:
            return (step, Op.REDUCE, stage), tuple(primaries)
        replica = self.schedule.replicas[stage]
        assert replica is not None
        holders = [self.num_stages * d + replica for d in range(self.num_pipelines)]
        return (step, Op.GATHER, stage), (*primaries, *holders)

    def has_entered(self, worker: int, key: object) -> bool:
        action = self.action(worker)
        is_in = action is not None and action.op in COLLECTIVES
        in_it = is_in and self.collective(worker, action)[0] == key  # type: ignore[arg-type]
        return in_it or worker in self.left.get(key, ())

    def waits(self, seconds: float = LONG) -> Iterator[Wait]:
        """What those tell that cannot go on."""
        for worker in self.workers:
            action = self.action(worker)
            if action is None or self.can_go_on(worker):
                continue
            if action.op in COLLECTIVES:
                awaited = [w for w in self.collective(worker, action)[1] if w != worker]
            else:
                sender = self.sender(worker, action)
                assert sender is not None
                awaited = [sender]
            waiting = Waiting(tuple(map(name, awaited)), self.logs[worker].sent())
            step, place = self.places[worker]
            yield Wait(name(worker), place, step, str(action), waiting, seconds, LIMIT)


def name(worker: int) -> str:
    return f"node{worker}"


@settings(deadline=None, max_examples=60)
@given(JOBS, st.randoms(use_true_random=False), st.integers(0, 400))
def test_without_a_broken_link_nobody_is_suspected(job: Job, random: Random, events: int) -> None:
    play = Play(job, random)
    play.run(events)
    assert broken_links(list(play.waits()), play.plan) == ()
    play.run(10**5)
    assert {play.action(worker) for worker in play.workers} == {None}


@settings(deadline=None, max_examples=150)
@given(JOBS, st.randoms(use_true_random=False), st.data())
def test_a_cut_link_is_found_when_nobody_can_go_on(
    job: Job, random: Random, data: st.DataObject
) -> None:
    play = Play(job, random)
    play.run(data.draw(st.integers(0, len(play.program(0)) * len(play.workers))))
    play.cut = data.draw(
        st.tuples(st.sampled_from(play.workers), st.sampled_from(play.workers)).filter(
            lambda ends: ends[0] != ends[1]
        )
    )
    play.run(10**5)
    waits = list(play.waits())
    if any(wait.step == NUM_STEPS for wait in waits):
        return  # somebody may have ended, and tells nothing any more
    ends = {name(worker) for worker in play.cut}
    assert waits, "a cut link between two that share a commit stops the job"
    broken = broken_links(waits, play.plan)
    assert broken
    for link in broken:
        # A message's link is known exactly; of a collective that a member is at the end of one.
        if "did not come out" in link.evidence:
            assert set(link.nodes) & ends
        else:
            assert set(link.nodes) == ends
    if any(len(link.nodes) <= 2 for link in broken):
        assert whom_to_fence(broken, play.plan).node in ends
    assert broken_links([replace(w, seconds=SHORT) for w in waits], play.plan) == ()
    assert broken_links(waits, play.plan, least_seconds=LONG) == ()


def wait(worker: str, action: str, *awaits: str, sent: tuple[Sent, ...] = ()) -> Wait:
    return Wait(worker, 1, 5, action, Waiting(awaits, sent), LONG, LIMIT)


PLAN = initial_plan([f"node{n}" for n in range(6)], equal_pipelines(3, 2, 2), "lazy")
# node1 has sent the first two, and waits; node2 has got one of them.
WAITS = [
    wait("node0", "0.0RECV_B0", "node1"),
    wait("node1", "1.0RECV_B0", "node2", sent=(Sent("node2", 5, "2.0RECV_F0", 2),)),
    wait("node2", "2.0RECV_F1", "node1"),
]


def test_both_ends_and_the_action_are_named() -> None:
    (link,) = broken_links(WAITS, PLAN)
    assert link == BrokenLink(
        ("node1", "node2"),
        "the link between node1 and node2 is broken: node2 has waited for 30.0 s in 2.0RECV_F1 of "
        "step 5, epoch 0, for what node1 has sent",
    )
    fence = whom_to_fence([link], PLAN)
    assert fence.node == "node2"
    assert fence.reason == f"{link.evidence}; it is given up since it comes last in the plan"


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"waiting": Waiting(("node2",))}, id="it has sent nothing"),
        pytest.param({"seconds": SHORT}, id="it has just sent it"),
        pytest.param(
            {"waiting": Waiting(("node2",), (Sent("node2", 4, "2.0RECV_F0", 2),))},
            id="in another step",
        ),
        pytest.param(
            {"waiting": Waiting(("node2",), (Sent("node0", 5, "2.0RECV_F0", 2),))},
            id="to another node",
        ),
        pytest.param(
            {"waiting": Waiting(("node2",), (Sent("node2", 5, "2.0RECV_F0", 1),))},
            id="only what came before",
        ),
    ],
)
def test_the_awaited_one_may_not_have_done_its_part(changed: dict[str, object]) -> None:
    waits = [WAITS[0], replace(WAITS[1], **changed), WAITS[2]]
    assert broken_links(waits, PLAN) == ()


def test_who_works_is_waited_for() -> None:
    assert broken_links([WAITS[0], WAITS[2]], PLAN) == ()


def test_one_alone_in_what_all_others_have_left() -> None:
    sent = (Sent("node0", 6, "0.0RECV_F0", 1),)
    waits = [
        wait("node0", "0COMMIT", "node1", "node2"),
        replace(wait("node1", "1.0RECV_F0", "node0", sent=sent), step=6),
        replace(wait("node2", "2.0RECV_F0", "node1"), step=6),
    ]
    fence = whom_to_fence(broken_links(waits, PLAN), PLAN)
    assert fence.node == "node0"
    assert fence.reason.endswith("it is given up since all others have gone on")


def test_workers_of_one_node_have_no_link() -> None:
    sent = (Sent("node1:1", 5, "2TIE", 1),)
    waits = [wait("node1:0", "0TIE", "node1:1", sent=sent), wait("node1:1", "2TIE", "node1:0")]
    assert broken_links(waits, PLAN) == ()


def test_what_is_no_action_shows_nothing() -> None:
    waits = [wait("node0", "start", "node1"), wait("node1", "start", "node0")]
    assert broken_links(waits, PLAN) == ()


PAIRS = {pair: BrokenLink(pair, "why") for pair in (("node1", "node2"), ("node0", "node1"))}


def test_who_has_more_broken_links_is_given_up() -> None:
    fence = whom_to_fence(list(PAIRS.values()), PLAN)
    assert fence.node == "node1"
    assert fence.reason == "why; it is given up since it has 2 such links"


def test_who_alone_holds_a_stage_is_kept() -> None:
    # node1 has taken over stage 2 and is its only holder, node0 is that of stage 1.
    plan = plan_after_loss(PLAN, {"node2"}, None)
    links = [BrokenLink(("node1", "node4"), "why"), BrokenLink(("node1", "node5"), "why")]
    fence = whom_to_fence(links, plan)
    assert fence.node == "node5"
    assert fence.reason == (
        "why; it is given up since another node holds its stages and it comes last in the plan"
    )


def test_what_is_known_better_decides() -> None:
    links = [BrokenLink(("node0", "node4", "node5"), "less"), PAIRS["node0", "node1"]]
    assert whom_to_fence(links, PLAN).node == "node1"
