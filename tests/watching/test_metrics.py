"""A job's status as Prometheus reads it."""

from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from story import LEADER, Story

from megatron_bamboo.planner.healing import Vacancy
from megatron_bamboo.watching.metrics import metrics_of
from megatron_bamboo.watching.status import JobStatus
from megatron_bamboo.watching.summary import status_of

GOLDEN = """\
bamboo_steps_total 8.0
bamboo_samples_total 128.0
bamboo_takeovers_total 1.0
bamboo_planned_changes_total 0.0
bamboo_restores_total 0.0
bamboo_steps_undone_total 0.0
bamboo_nodes_drained_total 0.0
bamboo_nodes_returned_total 1.0
bamboo_node_losses_total{kind="connection"} 0.0
bamboo_node_losses_total{kind="silence"} 1.0
bamboo_node_losses_total{kind="signal"} 0.0
bamboo_node_losses_total{kind="exit"} 0.0
bamboo_node_losses_total{kind="error"} 0.0
bamboo_node_losses_total{kind="hang"} 0.0
bamboo_node_losses_total{kind="link"} 0.0
bamboo_node_losses_total{kind="no_record"} 0.0
bamboo_node_losses_total{kind="other"} 0.0
bamboo_checkpoints_total{result="saved"} 1.0
bamboo_checkpoints_total{result="failed"} 0.0
bamboo_steps_wanted 100.0
bamboo_loss 1.25
bamboo_learning_rate 0.001
bamboo_gradient_norm 1.5
bamboo_step_seconds 0.25
bamboo_checkpoint_step 5.0
bamboo_nodes 5.0
bamboo_waits_for_nodes 0.0
bamboo_standbys 2.0
bamboo_nodes_leaving 0.0
bamboo_stages_without_replica 2.0
bamboo_stages_without_holder 0.0
bamboo_epoch 1.0
bamboo_coordinator_generation 1.0
bamboo_coordinator_leads 1.0
"""


class Collected:
    def __init__(self, status: JobStatus) -> None:
        self._status = status

    def collect(self) -> list[Metric]:
        return list(metrics_of(self._status))


def exposed(status: JobStatus) -> str:
    registry = CollectorRegistry()
    registry.register(Collected(status))
    return generate_latest(registry).decode()


def lossy() -> Story:
    story = Story(standbys=("node6",)).begin().train(5)
    story.event("checkpoint", step=5, failure=None, folder="ckpt", seconds=1.0)
    story.lose("node1", cause="nothing was heard of it for 5.1 s").train(3)
    story.join("node1.2")
    return story


def test_the_text_that_is_exposed() -> None:
    text = exposed(status_of(lossy().view()))
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert "\n".join(samples) + "\n" == GOLDEN
    types = [line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE")]
    assert all((kind == "counter") == name.endswith("_total") for name, kind in types)
    helps = [line.split(maxsplit=3)[3] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(helps) == len(set(helps)) == len(types)


def test_a_job_that_waits_for_nodes_does_not_look_healthy() -> None:
    story = Story().begin().wait_for_nodes()
    story.join("node1.2")
    samples = exposed(status_of(story.view())).splitlines()
    for name, value in (
        *(("nodes", 0.0), ("standbys", 1.0), ("waits_for_nodes", 1.0)),
        *(("stages_without_holder", 6.0), ("stages_without_replica", 0.0)),
    ):
        assert f"bamboo_{name} {value}" in samples


def test_it_parses_back() -> None:
    families = list(text_string_to_metric_families(exposed(status_of(lossy().view()))))
    values = {(s.name, s.labels.get("kind")): s.value for f in families for s in f.samples}
    assert values["bamboo_node_losses_total", "silence"] == 1
    assert values["bamboo_steps_total", None] == 8


def test_a_change_that_is_made_is_counted_and_all_stages_have_replicas_again() -> None:
    story = lossy().heal((Vacancy(0, 1), "node6")).make_change()
    text = exposed(status_of(story.view()))
    assert "bamboo_planned_changes_total 1.0" in text
    assert "bamboo_stages_without_replica 0.0" in text
    assert "bamboo_standbys 1.0" in text and "bamboo_nodes 6.0" in text


def test_the_next_coordinator_changes_its_own_number_only() -> None:
    before = exposed(status_of(lossy().view()))
    after = exposed(status_of(lossy().view(leader=replace(LEADER, generation=2))))
    assert after == before.replace("generation 1.0", "generation 2.0") != before


def test_what_is_not_known_yet_is_left_out() -> None:
    text = exposed(status_of(Story().view(leader=None)))
    assert "bamboo_steps_total 0.0" in text
    for name in ("loss", "epoch", "coordinator_generation", "checkpoint_step"):
        assert f"bamboo_{name} " not in text


def test_a_validation_loss_is_shown_once_there_is_one() -> None:
    assert "bamboo_validation" not in exposed(status_of(lossy().view()))
    story = lossy()
    losses = {"lm loss": (1.5).hex()}
    story.event("evaluation", step=6, kind="interval", epoch=1, seconds=1.0, losses=losses)
    status = status_of(story.view())
    assert "bamboo_validation_loss 1.5\n" in exposed(status)
    assert "bamboo_validation_step 6.0\n" in exposed(status)
