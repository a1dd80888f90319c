"""The job that every scenario runs: a GPT of one small layer a stage, on a little real text."""

import json
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Self

from job_request import JobRequest

from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.data import train_tokenizer
from megatron_bamboo.data.corpus import documents
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.tail import add_tail

NUM_DOCUMENTS = 12
SEQUENCE_LENGTH = 16

FULL_RECOMPUTATION = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
# The first scale overflows, and a later one again.
FP16 = (
    *("--fp16", "--initial-loss-scale", "2097152", "--hysteresis", "1"),
    *("--loss-scale-window", "2"),
)
# Each step overflows.
ALL_SKIPPED = (
    *("--fp16", "--initial-loss-scale", "4294967296", "--hysteresis", "1"),
    *("--min-loss-scale", "4294967296"),
)
PARTS = ("--split", "60,30,10")
EVALUATED = (*PARTS, "--eval-interval", "2", "--eval-iters", "2")
VARIANTS: dict[str, tuple[str, ...]] = {
    "": (),
    "untied-rope": (
        "--untie-embeddings-and-output-weights",
        *("--position-embedding-type", "rope"),
    ),
    "recompute": FULL_RECOMPUTATION,
    "recompute-attention": ("--recompute-granularity", "selective"),
    "sequence-parallel": ("--sequence-parallel", *FULL_RECOMPUTATION),
    "sequence-parallel-alone": ("--sequence-parallel",),
    "bf16": ("--bf16",),
    "fp16": FP16,
    "all-skipped": ALL_SKIPPED,
    "zero": ("--use-distributed-optimizer",),
    "zero-bf16": ("--use-distributed-optimizer", "--bf16"),
    "zero-fp16": ("--use-distributed-optimizer", *FP16),
    "verify": ("--bamboo-verify-replicas", "1"),
    "zero-verify": ("--use-distributed-optimizer", "--bamboo-verify-replicas", "2"),
    "ported": ("--loss-weight", "0.5"),
    "emulated": (
        *("--transformer-impl", "emulated", "--bamboo-emulated-forward-ms", "4"),
        *("--bamboo-emulated-backward-ms", "8", "--bamboo-emulated-bandwidth", "20"),
    ),
    # The same training, without and with evaluations.
    "in-parts": PARTS,
    "evaluated": EVALUATED,
    "evaluated-zero": (*EVALUATED, "--use-distributed-optimizer"),
    "faulty": (),
    "own-loop": (),
    "hooked": (),
    "late": ("--sequence-parallel",),  # as "sequence-parallel-alone"
}
# Whose script is not the product's own.
SCRIPTS = {
    "ported": Path(__file__).with_name("ported_script.py"),
    "faulty": Path(__file__).with_name("faulty_script.py"),
    "hooked": Path(__file__).with_name("hooked_script.py"),
    "late": Path(__file__).with_name("late_script.py"),
    "own-loop": Path(__file__).parents[2] / "examples" / "own_loop.py",
}
SCRIPT = Path(__file__).parents[2] / "pretrain_gpt_bamboo.py"


@dataclass(frozen=True, slots=True)
class Shape:
    """P stages, D pipelines, M microbatches in each; node numbers go pipeline by pipeline.

    ``variant`` names what is not as by default: flags of its own, see ``VARIANTS``. With redundancy
    each stage sends its shadow K mirrors. A layer is a stage's, or a chunk's, unless their number
    is given. For unequal pipelines see ``unequal``.
    """

    num_stages: int
    num_pipelines: int
    num_microbatches: int = 4
    num_steps: int = 7
    variant: str = ""
    num_chunks: int = 1
    tensor_size: int = 1
    num_mirrors: int = 0
    num_layers: int = 0
    cuts: tuple[tuple[int, ...], ...] = ()
    """By unequal pipeline the layers of each stage."""
    shares: tuple[int, ...] = ()
    """By unequal pipeline its microbatches."""

    @classmethod
    def unequal(
        cls, cuts: tuple[tuple[int, ...], ...], shares: tuple[int, ...], **more: Any
    ) -> Self:
        """Pipelines with stages of so many layers, and so many microbatches."""
        most, layers = max(map(len, cuts)), sum(cuts[0])
        return cls(
            most, len(cuts), max(shares), num_layers=layers, cuts=cuts, shares=shares, **more
        )

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.num_layers or self.num_stages * self.num_chunks

    @property
    def stages(self) -> tuple[int, ...]:
        """By pipeline how many it has."""
        return tuple(map(len, self.cuts)) or (self.num_stages,) * self.num_pipelines

    @property
    def total_microbatches(self) -> int:
        """Those of a step."""
        return sum(self.shares) or self.num_microbatches * self.num_pipelines

    @property
    def num_nodes(self) -> int:
        """One node a stage."""
        return sum(self.stages)

    def node(self, pipeline: int, stage: int) -> str:
        """The node that a stage starts on."""
        return f"node{sum(self.stages[:pipeline]) + stage}"

    def place(self, node: str) -> tuple[int, int]:
        """The pipeline and the stage that a node starts with."""
        places = [(p, s) for p, number in enumerate(self.stages) for s in range(number)]
        return places[int(node.removeprefix("node"))]

    def pause(self, step: int) -> str:
        """What stops the first pipeline's last node in a step: nothing passes until it is woken."""
        last = self.num_stages - 1
        return f"{self.node(0, last)}@iter{step}:{last}.0F1:stop"

    def schedule(self, redundancy: str) -> Schedule:
        """What each worker of a pipeline runs in an undisturbed step, but for the tail."""
        sizes = (self.num_stages, self.num_chunks, self.num_microbatches)
        return _schedule(*sizes, redundancy, self._mirrors_with(redundancy))

    def flags(self, redundancy: str) -> tuple[str, ...]:
        """What its variant and its mirrors are asked for with."""
        number = self._mirrors_with(redundancy)
        mirrors = ("--bamboo-mirror-gradients", str(number)) if number else ()
        return (*VARIANTS[self.variant], *mirrors)

    def _mirrors_with(self, redundancy: str) -> int:
        return 0 if redundancy == "none" else self.num_mirrors

    def whole_schedule(self, redundancy: str) -> Schedule:
        """The same with its tail, as it is in a step in which copies are compared, if ever."""
        sharded = "--use-distributed-optimizer" in VARIANTS[self.variant] and self.num_pipelines > 1
        tied = "--untie-embeddings-and-output-weights" not in VARIANTS[self.variant]
        verifies = "--bamboo-verify-replicas" in VARIANTS[self.variant]
        return add_tail(self.schedule(redundancy), tied, sharded, verifies)

    def __str__(self) -> str:
        sizes = f"P{self.num_stages}-D{self.num_pipelines}-M{self.num_microbatches}"
        if self.cuts:
            cuts = "_".join("+".join(map(str, cut)) for cut in self.cuts)
            sizes = f"{cuts}-M{'_'.join(map(str, self.shares))}"
        more = [f"C{self.num_chunks}"] * (self.num_chunks > 1)
        more += [f"T{self.tensor_size}"] * (self.tensor_size > 1)
        more += [f"K{self.num_mirrors}"] * (self.num_mirrors > 0)
        more += [self.variant] * bool(self.variant)
        return "-".join([sizes, f"{self.num_steps}steps", *more])


@cache
def _schedule(
    num_stages: int, num_chunks: int, num_microbatches: int, redundancy: str, num_mirrors: int
) -> Schedule:
    """By the product's own passes and, as the jobs have no others, with its default costs."""
    compute = compute_schedule(num_stages, num_chunks, num_microbatches)
    return lower(add_redundancy(compute, Redundancy(redundancy), num_mirrors=num_mirrors))


def prepare_text(folder: Path) -> None:
    """Vocabulary and token files from the first documents of the product's corpus."""
    corpus = folder / "corpus.jsonl"
    texts = islice(documents(), NUM_DOCUMENTS)
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = ["--input", str(corpus), "--vocab-size", "320", "--output-dir", str(folder)]
    assert train_tokenizer.main(files) == 0
    prefix, vocabulary = ["--output-prefix", str(folder / "tiny")], _vocabulary(folder)
    preprocess = ["preprocess", "--input", str(corpus), *prefix, *vocabulary, "--append-eod"]
    assert bamboo(preprocess) == 0


def flags(data: Path, shape: Shape, redundancy: str) -> tuple[str, ...]:
    """Megatron's flags; dropout, tied embeddings and clipping are on, as by default."""
    values: dict[str, object] = {
        "num-layers": shape.layers,
        "tensor-model-parallel-size": shape.tensor_size,
        "hidden-size": 32,
        "num-attention-heads": 2,
        "seq-length": SEQUENCE_LENGTH,
        "max-position-embeddings": SEQUENCE_LENGTH,
        "micro-batch-size": 1,
        "global-batch-size": shape.total_microbatches,
        "train-iters": shape.num_steps,
        "lr": 1e-2,
        "clip-grad": 1.0,
        "split": "100,0,0",
        "data-path": data / "tiny_text_document",
        "distributed-timeout-minutes": 0.75,
        "bamboo-redundancy": redundancy,
    }
    if shape.cuts:
        values["bamboo-pipelines"] = ",".join("+".join(map(str, cut)) for cut in shape.cuts)
        values["bamboo-microbatches"] = ",".join(map(str, shape.shares))
    else:
        per_chunk = shape.layers // (shape.num_stages * shape.num_chunks)
        values["pipeline-model-parallel-size"] = shape.num_stages
        values["num-layers-per-virtual-pipeline-stage"] = per_chunk
    words = [w for name, v in values.items() for w in (f"--{name}", str(v))]
    return (*words, *shape.flags(redundancy), *_vocabulary(data))


def request(
    folder: Path, data: Path, shape: Shape, redundancy: str, injections: tuple[str, ...] = ()
) -> JobRequest:
    """One job of this GPT."""
    words = flags(data, shape, redundancy)
    script = str(SCRIPTS.get(shape.variant, SCRIPT))
    return JobRequest(str(folder), shape.num_nodes, words, script, injections, shape.tensor_size)


def _vocabulary(folder: Path) -> list[str]:
    return ["--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")]
