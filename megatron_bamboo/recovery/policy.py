"""Which answer a loss or an arrival gets: one object for the runtime and for the simulator.

Each of the papers' systems is a policy, so that all can be run on the same trace. Bamboo takes
over and heals, and changes no pipeline's microbatches. Oobleck has no replicas: it does the step
again in other pipelines, whose state comes from live holders. With checkpoints alone (Varuna) all
start anew from the last one, in the fastest pipelines of those who live. ``auto`` takes over at
once, shares the batch out anew at the next iteration, and makes other pipelines where that pays.

A policy is pure: what it answers follows from the view, the event and the time that it is given.
"""

from megatron_bamboo.planner.propose import Planner
from megatron_bamboo.recovery.after_loss import AfterLoss
from megatron_bamboo.recovery.between_steps import BetweenSteps
from megatron_bamboo.recovery.decision import Verdict
from megatron_bamboo.recovery.names import PolicyName
from megatron_bamboo.recovery.prices import Prices
from megatron_bamboo.recovery.prospects import Prospects
from megatron_bamboo.recovery.times import IterationTimes
from megatron_bamboo.recovery.view import Event, View


class Policy:
    """The decisions of one policy about one job.

    Args:
        planner: of the model; its costs have bytes.
        num_microbatches: of the global batch.
        fault_tolerance: so many pipelines more than one, where there are nodes for it.

    Raises:
        ValueError: the costs have no bytes.
    """

    def __init__(
        self,
        name: PolicyName,
        planner: Planner,
        times: IterationTimes,
        prices: Prices,
        num_microbatches: int,
        fault_tolerance: int,
    ) -> None:
        self.name = name
        prospects = Prospects(
            planner, times, prices, num_microbatches, fault_tolerance, name.redundancy
        )
        self._after_loss = AfterLoss(name, prospects, prices)
        self._between_steps = BetweenSteps(name, prospects, prices)

    def decide(self, view: View, event: Event, now: float) -> Verdict:
        """What is done about an event, and why.

        Args:
            now: seconds, on the clock of the view's history.
        """
        if view.plan is None:
            return self._after_loss.start(view, f"{event}; there is no plan yet")
        if view.lost:
            return self._after_loss.answer(view, view.plan, event, now)
        return self._between_steps.answer(view, view.plan, event, now)
