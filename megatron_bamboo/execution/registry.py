"""Which groups this worker is in, from the plan, and the groups themselves, made when first used,
or ahead of that.

A group's members follow from the plan, so every member computes the same list. The key of its
rendezvous is the moment since which the list is in force: an epoch, before or after its planned
change. A pair that no loss has touched keeps its connections, also when its members first use it in
different epochs. Collective groups are made anew in every epoch: who waits in one may be asked to
send something again first, and those who wait for that may be the ones that it waits for.
"""

import queue
import threading
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta

from megatron_bamboo.execution.errors import PeerLost
from megatron_bamboo.execution.groups import Group, make_group
from megatron_bamboo.membership.torch_store import BambooStore
from megatron_bamboo.membership.workers import node_of, workers_of
from megatron_bamboo.planner.plan import PipelinePlan, Plan

COMMIT_GROUP = "commit"


@dataclass(frozen=True, slots=True)
class Membership:
    """A group's members in rank order, and since when they are its members."""

    members: tuple[str, ...]
    epoch: int
    is_changed: bool = False
    """Whether they are its members since the epoch's planned change only."""

    @property
    def since(self) -> str:
        """Since when, as a part of a key."""
        return f"{self.epoch}/changed" if self.is_changed else str(self.epoch)


def primary_group(stages: Sequence[int]) -> str:
    """Name of the group that reduces the gradients of the units that have these stages, one in
    each pipeline: their primaries in pipeline order."""
    return f"primaries/{_joined(stages)}"


def holder_group(stages: Sequence[int]) -> str:
    """Name of the group that gathers the parameters of such units: their primaries in pipeline
    order, then the workers of their replicas."""
    return f"holders/{_joined(stages)}"


def pair_group(node: str, peer: str) -> str:
    """Name of the group of two neighbours."""
    return "pair/" + "+".join(sorted((node, peer)))


def _joined(stages: Sequence[int]) -> str:
    return "-".join(map(str, stages))


def _is_pair(name: str) -> bool:
    return name.startswith("pair/")


def neighbours(pipeline: PipelinePlan, node: str, tied: bool) -> frozenset[str]:
    """The nodes that a node exchanges messages with; a symmetric relation."""
    stages, last = pipeline.stages, len(pipeline.stages) - 1
    edges = {(stages[s], stages[s + 1]) for s in range(last)}
    if stages and (tied or pipeline.shape.num_chunks > 1):
        edges.add((stages[last], stages[0]))
    for primary, holder in zip(stages, pipeline.replicas, strict=True):
        if holder is not None:
            edges.add((primary, holder))
    near = {b for a, b in edges if a == node} | {a for a, b in edges if b == node}
    return frozenset(near - {node})


def memberships(
    plan: Plan,
    worker: str,
    tied: bool,
    tensor_size: int,
    sharded: bool = False,
) -> dict[str, tuple[str, ...]]:
    """The members of every group that a worker is in under a plan; groups of one are left out.

    Args:
        plan: that of the worker's tensor rank; the commit is among the workers of all of them.
        sharded: the pipelines share the optimizer's state.
    """
    groups = {COMMIT_GROUP: workers_of(map(node_of, plan.nodes), tensor_size)}
    for stages in plan.arrangement.places():
        primaries, shadows = _holders(plan, stages)
        if worker in primaries:
            groups[primary_group(stages)] = primaries
        if sharded and worker in (*primaries, *shadows):
            groups[holder_group(stages)] = (*primaries, *shadows)
    for peer in all_neighbours(plan, worker, tied):
        groups[pair_group(worker, peer)] = tuple(sorted((worker, peer)))
    return {name: members for name, members in groups.items() if len(members) > 1}


def _holders(plan: Plan, stages: Sequence[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Who runs and who shadows one stage of each pipeline, in pipeline order."""
    # A pipeline that is dissolved has none.
    pairs = [pair for pair in zip(plan.pipelines, stages, strict=True) if pair[0].stages]
    shadows = (pipe.replicas[stage] for pipe, stage in pairs)
    primaries = tuple(pipe.stages[stage] for pipe, stage in pairs)
    return primaries, tuple(worker for worker in shadows if worker is not None)


def all_neighbours(plan: Plan, worker: str, tied: bool) -> frozenset[str]:
    """Whom a worker exchanges messages with under a plan, before and after its change."""
    number, change = plan.pipeline_of(worker), plan.change
    near = neighbours(plan.pipelines[number], worker, tied)
    if change is None:
        return near
    moves = (*change.transfers, *change.moves)
    ends = [{m.source, m.target} for m in moves if worker in (m.source, m.target)]
    later = neighbours(change.pipelines[plan.pipeline_after(worker)], worker, tied)
    return (near | later | frozenset().union(*ends)) - {worker}


class _Formation:
    """A group that is being made, in a thread of its own.

    gloo tries to connect to a member that has died after it published its address until the
    group's timeout, and nothing ends that. So whoever waits for the group can be released without
    it; a group that is made after all is left at once.

    An error holds, by its traceback, all that was made before it. So it is handed over and not
    kept: in a cycle it would live until all of this large process is searched for garbage.
    """

    def __init__(self, make: Callable[[], Group], store: BambooStore) -> None:
        self.store = store
        self.is_awaited = False
        """Whether somebody waits for it, or will at once."""
        self._make = make
        self._lock = threading.Lock()
        self._is_settled = False
        self._outcome: queue.SimpleQueue[Group | BaseException] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="formation", daemon=True).start()

    def wait(self) -> Group:
        """The group, once it is made; making it has a deadline of its own. Called once.

        Raises:
            PeerLost: a member did not come, or is lost.
        """
        outcome = self._outcome.get()
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        finally:
            del outcome  # this frame is in its traceback from now on

    def give_up(self, members: tuple[str, ...]) -> None:
        """Release whoever waits."""
        self.store.cancel()
        self._settle(PeerLost(members, "making a group", None))

    def discard(self) -> None:
        """Let go of what was made, where nobody waits for it; it has been given up before."""
        outcome = self._outcome.get_nowait()
        if not isinstance(outcome, BaseException):
            outcome.release()

    def _run(self) -> None:
        try:
            group = self._make()
        except BaseException as error:  # it is raised where the group is waited for
            self._settle(error)
            return
        if not self._settle(group):
            group.release()

    def _settle(self, outcome: Group | BaseException) -> bool:
        """Hand over what there is to wait for; False if something was before."""
        with self._lock:
            if self._is_settled:
                return False
            self._is_settled = True
            self._outcome.put(outcome)
            return True


class GroupRegistry:
    """The groups of one worker; safe to use from several threads."""

    def __init__(
        self, node: str, make_store: Callable[[str], BambooStore], timeout: timedelta
    ) -> None:
        self._node = node
        self._make_store = make_store
        self._timeout = timeout
        self._lock = threading.Lock()
        self._memberships: dict[str, Membership] = {}
        self._groups: dict[str, tuple[Group, BambooStore]] = {}
        self._forming: dict[str, tuple[Membership, _Formation]] = {}
        self._lost: set[str] = set()
        self._left_epoch = -1
        self._renewed: dict[str, int] = {}
        """By worker the epoch of which all of its pairs are, or of a later one."""

    def update(
        self, epoch: int, groups: dict[str, tuple[str, ...]], is_changed: bool = False
    ) -> None:
        """Follow a plan, or its change.

        Pairs stay as long as both live: another plan may need them again.
        """
        with self._lock:
            kept = {
                name: before
                for name, before in self._memberships.items()
                if _is_pair(name)
                or (is_changed and before.epoch == epoch and before.members == groups.get(name))
            }
            new = {name: Membership(m, epoch, is_changed) for name, m in groups.items()}
            self._memberships = new | kept
            self._drop(lambda name, _members: name not in kept)
            self._give_up(lambda name, before: self._memberships.get(name) is not before)

    def add_pairs(self, epoch: int, groups: dict[str, tuple[str, ...]]) -> None:
        """Learn of a plan's new pairs before it is followed, so that they can be made already."""
        with self._lock:
            for name, members in groups.items():
                if _is_pair(name):
                    self._memberships.setdefault(name, Membership(members, epoch))

    def add(self, name: str, members: tuple[str, ...], epoch: int) -> None:
        """Learn of a collective group that no plan knows of; it ends with the epoch at the latest.

        All members do so in the same epoch, with the same name, which is used for nothing else.
        """
        with self._lock:
            self._memberships.setdefault(name, Membership(members, epoch))

    def get(self, name: str) -> Group | None:
        """The group of this name, made if need be; None where this worker is alone in it.

        Raises:
            PeerLost: a member did not come, or is lost; the next plan has another membership.
        """
        with self._lock:
            if name in self._groups:
                return self._groups[name][0]
            membership = self._memberships.get(name)
            if membership is None:
                return None
            self._refuse_over(name, membership)
            formation = self._formation(name, membership)
            formation.is_awaited = True
        try:
            group = formation.wait()
        finally:
            with self._lock:
                # Of a pair that was left meanwhile the next one may be under way already.
                if self._forming.get(name) == (membership, formation):
                    del self._forming[name]
        return self._keep(name, membership, group, formation.store)

    def is_current(self, name: str, group: Group | None) -> bool:
        """Whether ``get`` would say just this, without waiting for any other worker."""
        with self._lock:
            if name in self._groups:
                return self._groups[name][0] is group
            return name not in self._memberships and group is None

    def form_collectives(self) -> None:
        """Begin to make all collective groups, while this worker computes.

        Nobody waits for that: who comes to use one finds it made, or waits for the rest.
        """
        with self._lock:
            for name, membership in self._memberships.items():
                is_there = name in self._groups or name in self._forming
                if not (_is_pair(name) or is_there or self._is_over(name, membership)):
                    self._formation(name, membership)

    def renew_pairs(self, epoch: int, workers: Collection[str]) -> tuple[str, ...]:
        """Leave all pairs of before an epoch that some workers are in, so that they are made anew;
        with whom they were.

        What is under way in them is never mistaken for what comes later. Both members do so.
        """
        with self._lock:
            self._renewed |= dict.fromkeys(workers, epoch)
            old = {n: m for n, m in self._memberships.items() if self._is_renewed(n, m)}
            for name in old:
                del self._memberships[name]
            self._give_up(self._is_renewed)
            self._drop(lambda name, _members: name in old)
            members = {member for membership in old.values() for member in membership.members}
            return tuple(sorted(members - {self._node}))

    def members(self, name: str) -> tuple[str, ...]:
        """The members of a group of this name; nobody where this worker is alone in it."""
        with self._lock:
            membership = self._memberships.get(name)
            return () if membership is None else membership.members

    def leave(self, epoch: int, lost: Collection[str]) -> None:
        """End the collective groups of an epoch and of those before it, and all groups that a lost
        node is a member of, for good; also those that are being made."""
        with self._lock:
            self._lost |= set(lost)
            self._left_epoch = max(self._left_epoch, epoch)
            self._give_up(self._is_over)
            self._drop(lambda name, members: not _is_pair(name) or bool(self._lost & members))

    def forget(self, nodes: Collection[str]) -> None:
        """End the groups that nodes are members of which were let go; they come to no other."""
        with self._lock:
            self._lost |= set(nodes)
            self._give_up(self._is_over)
            self._drop(lambda _name, members: bool(self._lost & members))

    def end(self, names: Collection[str]) -> None:
        """End groups that no plan knows of, which will not be used again."""
        with self._lock:
            for name in names:
                self._memberships.pop(name, None)
            self._drop(lambda name, _members: name in names)

    def close(self) -> None:
        """End all groups."""
        with self._lock:
            for group, _store in self._groups.values():
                group.release()
            self._groups.clear()
            self._give_up(lambda _name, _membership: True)

    def _formation(self, name: str, membership: Membership) -> _Formation:
        """That of a group, begun if need be."""
        if self._forming.get(name, (None,))[0] is not membership:
            # The first member tells apart the groups of one name of different tensor ranks.
            key = f"group/{membership.since}/{name}/{membership.members[0]}/"
            store, timeout = self._make_store(key), self._timeout
            formation = _Formation(
                lambda: make_group(store, name, membership.members, self._node, timeout), store
            )
            self._forming[name] = (membership, formation)
        return self._forming[name][1]

    def _give_up(self, is_over: Callable[[str, Membership], bool]) -> None:
        """Release who waits for such groups, and let go of those that nobody waits for yet."""
        for name, (membership, formation) in list(self._forming.items()):
            if is_over(name, membership):
                formation.give_up(membership.members)
                if not formation.is_awaited:
                    del self._forming[name]
                    formation.discard()

    def _keep(self, name: str, membership: Membership, group: Group, store: BambooStore) -> Group:
        with self._lock:
            if self._is_over(name, membership):
                group.release()
            self._refuse_over(name, membership)
            self._groups[name] = (group, store)
            return group

    def _drop(self, is_over: Callable[[str, Set[str]], bool]) -> None:
        for name, (group, _store) in list(self._groups.items()):
            if is_over(name, set(group.members)):
                group.release()
                del self._groups[name]

    def _is_over(self, name: str, membership: Membership) -> bool:
        left = not _is_pair(name) and membership.epoch <= self._left_epoch
        renewed = self._is_renewed(name, membership)
        return left or renewed or bool(self._lost & set(membership.members))

    def _is_renewed(self, name: str, membership: Membership) -> bool:
        renewed = (self._renewed.get(member, -1) for member in membership.members)
        return _is_pair(name) and any(membership.epoch < epoch for epoch in renewed)

    def _refuse_over(self, name: str, membership: Membership) -> None:
        if self._is_over(name, membership):
            gone = sorted(self._lost & set(membership.members)) or membership.members
            raise PeerLost(tuple(gone), f"making {name}", None)
