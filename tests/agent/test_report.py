import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.report import Reporter, iteration_line
from megatron_bamboo.agent.telling import Teller
from megatron_bamboo.evaluation.due import Kind
from megatron_bamboo.evaluation.outcome import Evaluated
from megatron_bamboo.membership.decision import StepReport
from megatron_bamboo.membership.restores import Restores
from megatron_bamboo.membership.table import Change, Nowhere, Said, Table
from megatron_bamboo.planner.arrangement import equal_pipelines

SHAPE = JobShape(equal_pipelines(4, 2, 8), "lazy", train_iters=20, global_batch_size=16)
NOW = datetime(2026, 11, 29, 17, 0, 0)
REPORT = StepReport(7, 0, (7.123456).hex(), 1e-3, (3.21).hex(), 112, 0.312, ())


def test_an_iteration_reads_as_in_megatron() -> None:
    line = (
        "iteration        7/      20 | consumed samples:          112 | "
        "elapsed time per iteration (ms): 312.0 | learning rate: 1.000000E-03 | "
        "global batch size:    16 | lm loss: 7.123456E+00 |"
    )
    assert iteration_line(REPORT, SHAPE) == f"{line} grad norm: 3.210 |"
    assert iteration_line(replace(REPORT, grad_norm=None), SHAPE) == line


def test_an_iteration_with_a_scaled_loss_says_the_scale_and_whether_it_was_skipped() -> None:
    taken = iteration_line(replace(REPORT, loss_scale=2.0**16), SHAPE)
    assert taken.endswith("| lm loss: 7.123456E+00 | loss scale: 65536 | grad norm: 3.210 |")
    skipped = iteration_line(replace(REPORT, loss_scale=2.0**16, grad_norm="inf"), SHAPE)
    assert skipped.endswith("| grad norm: inf | skipped: the gradient overflowed |")


class Journal(Nowhere):
    """Keeps what is said in memory."""

    def __init__(self) -> None:
        self.facts: list[dict[str, Any]] = []

    def keep(self, changes: Sequence[Change]) -> None:
        self.facts += [json.loads(c.text) for c in changes if isinstance(c, Said)]


def test_reports_out_of_order_are_said_in_order(tmp_path: Path) -> None:
    lines: list[str] = []
    steps: list[int] = []
    journal = Journal()
    table = Table(journal)
    reporter = Reporter(table, SHAPE, lambda: NOW)
    for step in (2, 1, 4, 3):
        reporter.passed(replace(REPORT, step=step))
    # Another coordinator that finds the same reports says nothing twice.
    reporter = Reporter(table, SHAPE, lambda: NOW)
    for step in (1, 2, 3, 4):
        reporter.passed(replace(REPORT, step=step))
    teller = Teller(tmp_path, lines.append, steps.append)
    teller.tell(journal.facts)
    teller.close()
    assert steps == [1, 2, 3, 4]
    assert lines[1].startswith(" [2026-11-29 17:00:00] iteration        2/")
    losses = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [loss["step"] for loss in losses] == [1, 2, 3, 4]
    assert float.fromhex(losses[0]["loss"]) == 7.123456


def test_a_save_is_said_after_its_step() -> None:
    journal = Journal()
    shape = replace(SHAPE, start_step=4)
    reporter = Reporter(Table(journal), shape, lambda: NOW)
    reporter.saved(5, "/ckpt", 0.314, None)
    reporter.saved(6, "/ckpt", 0.5, "OSError: [Errno 28] No space left on device")
    assert journal.facts == []
    reporter.passed(replace(REPORT, step=5))
    reporter.passed(replace(REPORT, step=6))
    lines = [fact["line"] for fact in journal.facts]
    assert [line.split("] ")[1][:44] for line in lines] == [
        "iteration        5/      20 | consumed sampl",
        "saved step 5 to /ckpt in 0.31 s",
        "iteration        6/      20 | consumed sampl",
        "step 6 was not saved to /ckpt: OSError: [Err",
    ]


def test_an_evaluation_is_said_after_its_step_and_its_losses_are_kept(tmp_path: Path) -> None:
    journal = Journal()
    table = Table(journal)
    reporter = Reporter(table, SHAPE, lambda: NOW)
    losses = {"lm loss": (2.5).hex()}
    for kind in Kind:
        reporter.evaluated(Evaluated(1, kind, 0, 0.5, losses))
    assert journal.facts == []
    reporter.passed(replace(REPORT, step=1))
    # Another coordinator that finds the same says nothing twice.
    Reporter(table, SHAPE, lambda: NOW).evaluated(Evaluated(1, Kind.TEST, 0, 0.5, losses))
    lines: list[str] = []
    teller = Teller(tmp_path, lines.append)
    teller.tell(journal.facts)
    teller.close()
    ends = [line.split("] ")[1] for line in lines]
    values = "| lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 |"
    assert ends[0].startswith("iteration        1/")
    assert ends[1:] == [
        f"validation loss at iteration 1 {values}",
        f"validation loss at iteration 1 on validation set {values}",
        f"validation loss at iteration 1 on test set {values}",
    ]
    written = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert written[1:] == [{"evaluated": kind, "step": 1, "losses": losses} for kind in Kind]


def test_an_evaluation_that_is_done_again_says_so() -> None:
    journal = Journal()
    table = Table(journal)
    Restores(1, 1, 3, 5).write(table)
    reporter = Reporter(table, replace(SHAPE, start_step=3), lambda: NOW)
    reporter.go_back(Restores.of(table))
    for step in (4, 5, 6):
        reporter.passed(replace(REPORT, step=step))
        reporter.evaluated(Evaluated(step, Kind.INTERVAL, 1, 0.5, {"lm loss": (2.5).hex()}))
    told = [fact for fact in journal.facts if "evaluation" in fact]
    assert [fact["evaluation"].get("again") for fact in told] == [1, 1, None]
    assert [fact["line"].endswith("| done again |") for fact in told] == [True, True, False]
