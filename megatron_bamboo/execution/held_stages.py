"""The stages that a worker holds, and those of a new cut that it is to hold.

While pipelines are cut anew a worker has both: it trains with the stages of the old cut until the
step's commit has passed, and those of the new one get their state meanwhile. Both are of one number
only by chance, so they are kept apart. A stage that is held later than from the beginning gets its
state from who has it, so nothing is drawn for it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from megatron_bamboo.model.stage import Stage
from megatron_bamboo.planner.arrangement import PipelineShape


@dataclass(frozen=True, slots=True)
class Holding:
    """Some stages of a pipeline."""

    numbers: Collection[int]
    shape: PipelineShape

    @property
    def cut(self) -> object:
        """What tells these stages from others of the same numbers."""
        return self.shape.spans, self.shape.num_chunks


BuildStage = Callable[[int, PipelineShape, bool], Stage]


class HeldStages:
    """One worker's stages.

    Args:
        build: a stage of a pipeline, with its initial weights or without.
        first: what is held in the beginning.
        draws: what is held then has its initial weights.
    """

    def __init__(self, build: BuildStage, first: Holding, draws: bool = True) -> None:
        self._build = build
        self._draws = draws
        self._cut = first.cut
        self.stages: dict[int, Stage] = {}
        """By number, with which the worker trains; always the same dictionary."""
        self.coming: dict[int, Stage] = {}
        """By number, of the new cut; none where there is none. Always the same dictionary."""
        self._coming_cut: object = None
        self._fill(self.stages, first)
        self._draws = False

    def hold(self, now: Holding, coming: Holding | None = None) -> None:
        """Hold exactly these stages: build what is new, drop what is not held any more.

        Args:
            coming: of the new cut, where there is to be one.
        """
        if coming is None:
            self.coming.clear()
            self._hold_now(now)
        elif now.numbers:
            self._hold_now(now)
            if self._coming_cut != coming.cut:
                self.coming.clear()
            self._fill(self.coming, coming)
        else:
            # One that joins has nothing of the old cut, and has built what it is to hold.
            self._hold_now(coming)
            self.coming.update(self.stages)
        self._coming_cut = None if coming is None else coming.cut

    def promote(self) -> None:
        """Train with the stages of the new cut from now on; where there is none nothing changes."""
        if not self.coming:
            return
        self._cut = self._coming_cut
        self.stages.clear()
        self.stages.update(self.coming)
        self.coming.clear()

    def _hold_now(self, wanted: Holding) -> None:
        if wanted.cut != self._cut:
            self._cut = wanted.cut
            self.stages.clear()
        self._fill(self.stages, wanted)

    def _fill(self, held: dict[int, Stage], wanted: Holding) -> None:
        for number in held.keys() - set(wanted.numbers):
            del held[number]
        for number in sorted(set(wanted.numbers) - held.keys()):
            held[number] = self._build(number, wanted.shape, self._draws)
