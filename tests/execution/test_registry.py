"""The groups of one worker, and its release from a group that can never be made."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from megatron_bamboo.execution import registry
from megatron_bamboo.execution.errors import PeerLost
from megatron_bamboo.execution.registry import (
    COMMIT_GROUP,
    GroupRegistry,
    holder_group,
    memberships,
)
from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.dissolving import go_on_after
from megatron_bamboo.planner.plan import initial_plan
from megatron_bamboo.planner.rebalancing import Balance
from megatron_bamboo.planner.taking_over import plan_after_loss
from megatron_bamboo.schedule.redundancy import Redundancy

NODES = tuple(f"node{number}" for number in range(6))
MEMBERS = ("node0", "node1")


class FakeStore:
    """A store that only says whether it was cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class FakeGroup:
    """A group that only says whether it was released."""

    def __init__(self, name: str, members: tuple[str, ...]) -> None:
        self.name = name
        self.members = members
        self.released = threading.Event()

    def release(self) -> None:
        self.released.set()


MakeGroup = Callable[..., FakeGroup]


def made_by(monkeypatch: pytest.MonkeyPatch, make: MakeGroup) -> GroupRegistry:
    monkeypatch.setattr(registry, "make_group", make)
    groups = GroupRegistry("node0", lambda prefix: FakeStore(), timedelta(seconds=60))
    groups.update(0, {"stage0": MEMBERS, "pair/node0+node1": MEMBERS, "pair/node0+node2": MEMBERS})
    return groups


def make_at_once(store: FakeStore, name: str, members: tuple[str, ...], *_: object) -> FakeGroup:
    return FakeGroup(name, members)


def test_a_group_that_no_plan_knows_of_ends_with_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = made_by(monkeypatch, make_at_once)
    groups.add("mend/3/1/node1", ("node1", "node0"), 0)
    group = groups.get("mend/3/1/node1")
    assert isinstance(group, FakeGroup) and groups.get("mend/3/1/node1") is group
    groups.leave(0, [])
    assert group.released.is_set()
    with pytest.raises(PeerLost):
        groups.get("mend/3/1/node1")


def test_a_group_that_is_never_made_releases_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, late = threading.Event(), []

    def connect_to_the_dead(
        store: FakeStore, name: str, members: tuple[str, ...], *_: object
    ) -> FakeGroup:
        may_go_on.wait(30)
        late.append(FakeGroup(name, members))
        return late[0]

    groups = made_by(monkeypatch, connect_to_the_dead)
    leaving = threading.Timer(0.1, lambda: groups.leave(0, ["node1"]))
    leaving.start()
    begin = time.monotonic()
    with pytest.raises(PeerLost):
        groups.get("stage0")
    assert time.monotonic() - begin < 10
    may_go_on.set()
    while not late:
        time.sleep(0.01)
    assert late[0].released.wait(10)


def test_collectives_are_made_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made, is_made = [], threading.Event()

    def make(store: FakeStore, name: str, members: tuple[str, ...], *_: object) -> FakeGroup:
        made.append(name)
        is_made.set()
        return FakeGroup(name, members)

    groups = made_by(monkeypatch, make)
    groups.form_collectives()
    assert is_made.wait(10)
    group = groups.get("stage0")
    assert group is not None and groups.get("stage0") is group
    groups.form_collectives()
    assert made == ["stage0"]


@pytest.mark.parametrize("end", ["leave", "update", "close"])
def test_what_was_made_ahead_and_never_used_is_released(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Whether it is made by then or comes later."""
    late, may_go_on = [], threading.Event()

    def make(store: FakeStore, name: str, members: tuple[str, ...], *_: object) -> FakeGroup:
        may_go_on.wait(0 if name == "stage0" else 30)
        late.append(FakeGroup(name, members))
        return late[-1]

    groups = made_by(monkeypatch, make)
    groups.update(0, {"stage0": MEMBERS, "stage1": MEMBERS})
    groups.form_collectives()
    until = time.monotonic() + 10
    while not late:
        assert time.monotonic() < until
        time.sleep(0.01)
    match end:
        case "leave":
            groups.leave(0, [])
        case "update":
            groups.update(1, {"stage0": MEMBERS})
        case _:
            groups.close()
    may_go_on.set()
    while len(late) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert all(group.released.wait(10) for group in late)


def test_a_failure_that_came_before_the_use_is_raised_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> FakeGroup:
        raise PeerLost(MEMBERS, "making a group", None)

    groups = made_by(monkeypatch, fail)
    groups.form_collectives()
    with pytest.raises(PeerLost):
        groups.get("stage0")


def test_a_failure_to_make_a_group_is_raised_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> FakeGroup:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        made_by(monkeypatch, fail).get("stage0")


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Only what nobody refers to goes: in a large process cycles stay for minutes."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_what_a_failure_has_made_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[FakeGroup]] = []

    def fail(store: FakeStore, name: str, members: tuple[str, ...], *_: object) -> FakeGroup:
        half_made = FakeGroup(name, members)
        made.append(weakref.ref(half_made))
        raise PeerLost(half_made.members, "making a group", None)

    groups = made_by(monkeypatch, fail)
    try:
        groups.get("stage0")
    except PeerLost as error:
        assert error.peers == MEMBERS and made[0]() is not None
    until = time.monotonic() + 10
    while made[0]() is not None:
        assert time.monotonic() < until, "a failure holds what it comes from"
        time.sleep(0.01)


def test_a_worker_that_is_alone_has_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made_by(monkeypatch, make_at_once).get("stage5") is None


def test_it_is_known_without_a_wait_whether_a_group_is_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = made_by(monkeypatch, lambda store, name, members, *_: FakeGroup(name, members))
    # One that is not made yet is none that there was, nor is its member alone.
    assert not groups.is_current("stage0", None)
    first = groups.get("stage0")
    assert groups.is_current("stage0", first) and not groups.is_current("stage0", None)
    assert groups.is_current("stage9", None) and not groups.is_current("stage9", first)
    groups.update(1, {"stage0": MEMBERS})
    assert not groups.is_current("stage0", first) and not groups.is_current("stage0", None)


def test_a_group_of_a_lost_node_is_no_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = made_by(monkeypatch, make_at_once)
    groups.leave(0, ["node1"])
    with pytest.raises(PeerLost):
        groups.get("pair/node0+node1")


def test_collectives_end_with_their_epoch_and_pairs_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = made_by(monkeypatch, make_at_once)
    stage, pair = groups.get("stage0"), groups.get("pair/node0+node1")
    groups.leave(0, ["node9"])
    assert isinstance(stage, FakeGroup) and isinstance(pair, FakeGroup)
    assert stage.released.is_set() and not pair.released.is_set()
    with pytest.raises(PeerLost):
        groups.get("stage0")
    groups.update(1, {"stage0": MEMBERS, "pair/node0+node1": MEMBERS})
    assert groups.get("stage0") is not stage
    assert groups.get("pair/node0+node1") is pair


def test_a_pair_of_the_next_plan_can_be_made_before_it_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = made_by(monkeypatch, make_at_once)
    after = {"stage0": ("node0", "node3"), "pair/node0+node3": ("node0", "node3")}
    groups.add_pairs(1, after)
    early = groups.get("pair/node0+node3")
    stage = groups.get("stage0")
    assert early is not None and stage is not None and stage.members == MEMBERS
    before = groups.get("pair/node0+node2")
    groups.update(1, after)
    assert groups.get("pair/node0+node3") is early
    # A plan to come may need it again.
    assert before is not None and groups.get("pair/node0+node2") is before


def test_all_members_compute_the_same_groups() -> None:
    plan = initial_plan(NODES, equal_pipelines(3, len(NODES) // 3, 4), "lazy")
    for later in (plan, plan_after_loss(plan, {"node4"}, None)):
        seen = {node: memberships(later, node, True, 1, sharded=True) for node in later.nodes}
        for node, groups in seen.items():
            for name, members in groups.items():
                assert node in members
                assert all(seen[member][name] == members for member in members)


def test_the_commit_is_among_all_workers_of_all_tensor_ranks() -> None:
    plan = initial_plan(NODES[:2], equal_pipelines(2, 1, 4), "lazy")
    for rank in (0, 1):
        own = plan.for_tensor_rank(rank, 2)
        groups = memberships(own, f"node0:{rank}", True, 2)
        assert groups[COMMIT_GROUP] == ("node0:0", "node0:1", "node1:0", "node1:1")
        assert groups[f"pair/node0:{rank}+node1:{rank}"] == (f"node0:{rank}", f"node1:{rank}")


def test_all_holders_of_a_stage_gather_its_parameters_primaries_first() -> None:
    plan = initial_plan(NODES, equal_pipelines(3, len(NODES) // 3, 4), "lazy")
    groups = memberships(plan, "node1", True, 1, sharded=True)
    holders = {name: members for name, members in groups.items() if name.startswith("holders")}
    assert holders == {
        holder_group((1, 1)): ("node1", "node4", "node0", "node3"),
        holder_group((2, 2)): ("node2", "node5", "node1", "node4"),
    }
    later = plan_after_loss(plan, {"node1"}, None)
    groups = memberships(later, "node0", True, 1, sharded=True)
    assert groups[holder_group((1, 1))] == ("node0", "node4", "node3")
    assert holder_group((2, 2)) not in groups


def test_groups_with_nodes_that_were_let_go_end_and_others_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = made_by(monkeypatch, make_at_once)
    everybody, two = ("node0", "node1", "node2"), ("node0", "node2")
    groups.update(1, {"stage0": MEMBERS, "commit": everybody, "pair/two": two})
    kept, ended = groups.get("stage0"), [groups.get("commit"), groups.get("pair/two")]
    groups.forget(["node2"])
    assert all(isinstance(group, FakeGroup) and group.released.is_set() for group in ended)
    assert groups.get("stage0") is kept
    for name in ("commit", "pair/two"):
        with pytest.raises(PeerLost):
            groups.get(name)


def test_pairs_are_made_anew_where_a_step_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose making ends only then; those of the new epoch stay."""
    keys = []
    release = threading.Event()

    def make(store: FakeStore, name: str, members: tuple[str, ...], *_: object) -> FakeGroup:
        keys.append(name)
        if name.endswith("node3") and keys.count(name) == 1:
            assert release.wait(10)
        return FakeGroup(name, members)

    groups = made_by(monkeypatch, make)
    pairs = {"pair/node0+node1": MEMBERS, "pair/node0+node3": ("node0", "node3")}
    groups.update(0, pairs)
    old = groups.get("pair/node0+node1")
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            groups.get("pair/node0+node3")
        except PeerLost as error:
            failed.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while "pair/node0+node3" not in keys:
        time.sleep(0.01)
    assert groups.renew_pairs(1, NODES) == ("node1", "node3")
    waiter.join(10)
    release.set()
    assert len(failed) == 1
    assert isinstance(old, FakeGroup) and old.released.is_set()
    groups.update(1, pairs)
    new = groups.get("pair/node0+node1")
    assert new is not old and groups.renew_pairs(1, NODES) == ()
    assert groups.get("pair/node0+node1") is new
    # Where only others begin anew, only the pairs with them are left.
    assert groups.renew_pairs(2, ["node3"]) == ("node3",)
    assert groups.get("pair/node0+node1") is new


def test_a_dissolved_pipeline_is_in_no_group() -> None:
    plan = initial_plan(NODES, equal_pipelines(2, 3, 4), "lazy")
    passed = StepDecision(3, True, (), "as the test wants it")
    balance = Balance((0, 1, 1, 0), Redundancy.LAZY)
    plan = go_on_after(plan, {"node2", "node3"}, passed, range(1, 101), balance)
    groups = memberships(plan, "node0", True, 1)
    assert groups[COMMIT_GROUP] == ("node0", "node1", "node4", "node5")
    assert groups["primaries/0-0-0"] == ("node0", "node4")
