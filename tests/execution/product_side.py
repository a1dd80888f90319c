"""The training by the product: prepared and run as ``bamboo run`` does, with forked workers.

The workers are the product's own; around two of their methods is noted what a run does not save:
each microbatch's loss, and the gradients just before they are applied.
"""

import os
from pathlib import Path
from typing import Any

from product_job import run_product, train
from safetensors.torch import load_file
from trained_stages import Job, StageTensors, save_stage

from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.execution.executor import Executor
from megatron_bamboo.model.stage import Stage


def train_job(job: Job, result: Path) -> None:
    """Train with one worker a stage, and leave every stage in the folder ``result``."""
    outcome = run_product(job.flags, job.num_workers, job.job_dir, lambda: _work(job, result))
    assert outcome.status is Status.FINISHED, outcome.message


def fail_to_train(job: Job, expected: str) -> None:
    """Train as far as it goes; it must end with this message."""
    outcome = run_product(job.flags, job.num_workers, job.job_dir, lambda: train(job.flags))
    assert (outcome.status, outcome.lost) == (Status.FAILED, ()), outcome
    assert expected in outcome.message, outcome.message


def _work(job: Job, result: Path) -> int:
    pipeline, stage = divmod(int(os.environ["BAMBOO_NODE"].removeprefix("node")), job.num_stages)
    tensors = _recorded(job, pipeline)
    status = train(job.flags)
    state = job.job_dir / "state" / f"{os.environ['BAMBOO_NODE']}-stage{stage}"
    saved = load_file(f"{state}-primary.safetensors")
    tensors |= {f"state/{name}": value for name, value in saved.items()}
    save_stage(result, pipeline, stage, tensors)
    return status


def _recorded(job: Job, pipeline: int) -> StageTensors:
    """Note losses and gradients in the tensors returned, for as long as this process lives."""
    tensors: StageTensors = {}
    current = {"step": 0}
    forward_backward, apply = Executor.forward_backward_func, Stage.apply

    def noted_forward_backward(executor: Executor, **arguments: Any) -> list[Any]:
        reports = forward_backward(executor, **arguments)
        step = current["step"] = executor.progress().step
        for microbatch, report in enumerate(reports):
            number = job.global_microbatch(microbatch, pipeline)
            tensors[f"loss/{step}/{number}"] = report["lm loss"].clone()
        return reports

    def noted_apply(stage: Stage, gradient_norm: float) -> None:
        for unit in stage.units.values():
            for name, parameter in unit.named_parameters():
                gradient = unit.reduced_part(parameter).view(parameter.shape)
                tensors[f"gradient/{current['step']}/{unit.name}/{name}"] = gradient.clone()
        apply(stage, gradient_norm)

    Executor.forward_backward_func = noted_forward_backward  # type: ignore[method-assign]
    Stage.apply = noted_apply  # type: ignore[method-assign]
    return tensors
