"""What `bamboo profile` measures: every chunk, and text that the schedule can read back."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpt_parts import VOCAB_SIZE, MakeGpt
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron_bamboo.agent import profile as command
from megatron_bamboo.cli import main
from megatron_bamboo.model.profile import profile, table
from megatron_bamboo.schedule.costs import Costs

FLAGS = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"


def forward_step(batches: Iterator[dict[str, Tensor]], model: GPTModel) -> tuple[Tensor, Any]:
    batch = next(batches)
    labels = batch["labels"] if model.post_process else None
    output = model(batch["tokens"], batch["position_ids"], None, labels=labels)
    return output, lambda losses: (losses.mean(), {})


@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_every_chunk_has_its_times(gpt: MakeGpt, precision: str) -> None:
    one = gpt(f"{FLAGS} {precision}")
    one.begin()
    costs = profile(one.options, one.layout, VOCAB_SIZE, one.provider, forward_step, repeats=1)
    costs.check_shape(2, 2)
    assert Costs.from_json(costs.to_json()) == costs
    assert json.loads(costs.to_json()).keys() == {"forward", "backward", "latency"}


def test_the_table_names_every_chunk() -> None:
    costs = Costs(forward=((0.001, 0.002), (0.003, 0.0045)), backward=((1.0, 2.0), (3.0, 4.0)))
    assert list(table(costs))[2:] == [
        "| 0 | 0 | 1.000 | 1000.000 |",
        "| 0 | 1 | 2.000 | 2000.000 |",
        "| 1 | 0 | 3.000 | 3000.000 |",
        "| 1 | 1 | 4.500 | 4000.000 |",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "costs.json", "missing.py"], "there is no script missing.py"),
        (["--output", "no/where.json", command.__file__], "there is no folder for it"),
        (["--output", "c", "--repeats", "0", command.__file__], "measure at least once"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
