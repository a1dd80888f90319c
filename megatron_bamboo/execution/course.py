"""How far one worker has come on its way through its programs.

Shared by who runs actions, who performs each, and who changes what is to be run when a plan comes.
"""

from collections import deque
from dataclasses import dataclass, field

from megatron_bamboo.execution.epochs import EpochWatch
from megatron_bamboo.execution.ledger import CommitLedger
from megatron_bamboo.execution.step_state import StepState
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.schedule.actions import GATHER_OPS, Action
from megatron_bamboo.schedule.schedule import Program


@dataclass(slots=True)
class Course:
    """The step under way, what is left of it, and the plan that it follows."""

    plan: Plan
    """The plan in force."""
    ledger: CommitLedger
    state: StepState = field(default_factory=lambda: StepState(step=0))
    stepped: int = 0
    """The last step that was applied here."""
    queue: deque[Action] = field(default_factory=deque)
    """What is still to be run, in order."""
    taken_over: dict[int, float] = field(default_factory=dict)
    """By stage that waits for its first work here: when its loss was announced."""
    watch: EpochWatch | None = None

    def begin(self, watch: EpochWatch, step: int) -> None:
        """Start after ``step`` steps."""
        self.watch = watch
        self.state = StepState(step)
        self.stepped = step

    def begin_step(self, step: int, program: Program, attempt: int) -> None:
        """Make the program of a step what is to be run, for the first time or anew."""
        self.state = StepState(step, attempt)
        self.queue = deque(program)

    @property
    def epochs(self) -> EpochWatch:
        """Where plans come from."""
        assert self.watch is not None, "start() comes first"
        return self.watch

    @property
    def is_in_step(self) -> bool:
        """Whether the step's program is under way, and not all of it behind this worker."""
        return self.stepped < self.state.step

    @property
    def is_passed(self) -> bool:
        """Whether the step's commit has passed."""
        return self.ledger.passed_vector(self.state.step) is not None

    def step_of(self, action: Action) -> int:
        """The step that an action belongs to; a gather may be run again in the one after."""
        return self.stepped if action.op in GATHER_OPS else self.state.step
