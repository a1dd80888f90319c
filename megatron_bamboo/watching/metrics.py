"""A job's status as metrics for Prometheus, each derived from the store whenever it is asked for.

Nothing is counted here: a counter is a number of facts in the store, so that it never falls,
whichever coordinator leads and however often whoever answers was started anew.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from megatron_bamboo.watching.loss_kinds import LossKind
from megatron_bamboo.watching.status import JobStatus


def metrics_of(status: JobStatus) -> Iterator[Metric]:
    """The metrics of a status; a gauge whose value is not known yet is left out."""
    progress, totals = status.progress, status.totals
    steps = progress.step + totals.undone_steps
    yield _counter("steps", "Optimizer steps, a loaded checkpoint's and undone ones too", steps)
    samples = progress.samples + totals.undone_samples
    yield _counter("samples", "Samples of these steps", samples)
    yield _counter("takeovers", "Stages that a shadow took over", totals.takeovers)
    yield _counter("planned_changes", "Planned changes that were made", totals.changes)
    yield _counter("restores", "Returns of all to a checkpoint", totals.restores)
    yield _counter("steps_undone", "Steps done again for these", totals.undone_steps)
    yield _counter("nodes_drained", "Nodes that left without a loss", totals.drained)
    yield _counter("nodes_returned", "Lost or drained nodes that joined again", totals.returned)
    kinds = Counter(loss.kind for loss in totals.losses)
    yield _labelled(
        "node_losses",
        "Nodes lost, by what showed it",
        "kind",
        ((kind, kinds[kind]) for kind in LossKind),
    )
    saves = (("saved", totals.saves), ("failed", totals.failed_saves))
    yield _labelled("checkpoints", "Checkpoints by how they ended", "result", saves)
    yield from _gauges(status)


def _gauges(status: JobStatus) -> Iterator[Metric]:
    progress, leader = status.progress, status.coordinator
    generation, leads = (None, None) if leader is None else (leader.generation, leader.leads)
    values: tuple[tuple[str, str, float | None], ...] = (
        ("steps_wanted", "The step after which the training ends", progress.last_step),
        ("loss", "Loss of the newest step", progress.loss),
        ("validation_loss", "Loss of the newest evaluation", progress.validation_loss),
        ("validation_step", "The step that it came after", progress.validation_step),
        ("learning_rate", "Learning rate of the newest step", progress.learning_rate),
        ("gradient_norm", "Gradient norm of the newest step", progress.gradient_norm),
        ("step_seconds", "Time that the newest step took", progress.step_seconds),
        ("checkpoint_step", "The newest step that was saved", progress.saved_step),
        ("nodes", "Nodes that train", len(status.nodes)),
        ("waits_for_nodes", "Whether nobody is left and nodes may come", bool(status.awaited)),
        ("standbys", "Nodes that wait to take a place", len(status.standbys)),
        ("nodes_leaving", "Nodes that are to leave", len(status.leaving)),
        ("stages_without_replica", "Stages that one node alone holds", len(status.unprotected)),
        ("stages_without_holder", "Stages that no live node holds", len(status.unheld)),
        ("epoch", "Number of the plan in force", status.epoch),
        ("coordinator_generation", "Number of the coordinator", generation),
        ("coordinator_leads", "Whether it has shown a sign of life lately", leads),
    )
    for name, text, value in values:
        if value is not None:
            yield GaugeMetricFamily(f"bamboo_{name}", text, value=float(value))


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(f"bamboo_{name}", text, value=value)


def _labelled(name: str, text: str, label: str, values: Iterable[tuple[str, int]]) -> Metric:
    family = CounterMetricFamily(f"bamboo_{name}", text, labels=[label])
    for word, value in values:
        family.add_metric([word], value)
    return family
