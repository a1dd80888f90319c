"""How many pipelines there are, how each is cut, and what work it has, from the flags that say so.

``--bamboo-pipelines`` gives each pipeline a cut of its own; without it all are cut alike, as
Megatron's flags say, and their number follows from the number of nodes.
"""

from dataclasses import dataclass, replace

from megatron_bamboo.config.costs import read_works
from megatron_bamboo.config.options import Options, ParallelOptions, TrainingOptions
from megatron_bamboo.errors import UserError
from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape, spans_of_layers
from megatron_bamboo.planner.cut import cut_at
from megatron_bamboo.planner.microbatches import Pace, split
from megatron_bamboo.schedule.schedule import MAX_CHUNKS, MAX_MICROBATCHES, MAX_STAGES

_STAGES, _LAYERS = "3,2", "2+2+1,3+2"


@dataclass(frozen=True, slots=True)
class LayerCut:
    """The layers of one pipeline's chunks: chunk c of stage s is the one at c * stages + s."""

    layers: tuple[int, ...]
    num_chunks: int = 1

    @property
    def num_stages(self) -> int:
        """Each on a node of its own."""
        return len(self.layers) // self.num_chunks


def arrange(options: Options, num_nodes: int) -> Arrangement:
    """The pipelines of so many nodes.

    Raises:
        UserError: with one line that says how to mend it.
    """
    given = options.bamboo.bamboo_pipelines
    if given is None:
        cuts = _equal_cuts(options, num_nodes)
    else:
        cuts = _given_cuts(given, options, num_nodes)
    numbers = _count_microbatches(options, cuts)
    return Arrangement(
        tuple(
            PipelineShape(spans_of_layers(cut.layers), number, cut.num_chunks)
            for cut, number in zip(cuts, numbers, strict=True)
        )
    )


def without_nodes(options: Options) -> tuple[Options, int]:
    """Options for one pipeline, or for those that have a cut of their own, and the nodes of these.

    How many microbatches each gets is left open, since nobody has said how many pipelines there
    will be.
    """
    alone = replace(options, bamboo=replace(options.bamboo, bamboo_microbatches=None))
    given = options.bamboo.bamboo_pipelines
    if given is None:
        return alone, options.parallel.pipeline_model_parallel_size
    words = given.split(",")
    return alone, sum(LayerCut(_parse_cut(given, word, options)).num_stages for word in words)


def _equal_cuts(options: Options, num_nodes: int) -> tuple[LayerCut, ...]:
    layers, parallel = options.model.num_layers, options.parallel
    stages = parallel.pipeline_model_parallel_size
    if stages > MAX_STAGES:
        raise UserError(
            f"--pipeline-model-parallel-size {stages} is more than the {MAX_STAGES} stages that a "
            "pipeline can have: lower it"
        )
    if stages > layers:
        raise UserError(
            f"{stages} stages cannot share {layers} layers: lower "
            "--pipeline-model-parallel-size or raise --num-layers"
        )
    if layers % stages:
        raise UserError(
            f"{layers} layers cannot be cut into {stages} equal stages: make "
            f"--num-layers a multiple of --pipeline-model-parallel-size"
        )
    chunks = _count_chunks(layers // stages, parallel)
    if num_nodes % stages:
        raise UserError(
            f"{num_nodes} nodes do not make whole pipelines of {stages} stages: start "
            f"{max(1, num_nodes // stages) * stages} nodes or change "
            "--pipeline-model-parallel-size"
        )
    places = stages * chunks
    return (LayerCut((layers // places,) * places, chunks),) * (num_nodes // stages)


def _given_cuts(text: str, options: Options, num_nodes: int) -> tuple[LayerCut, ...]:
    parallel, flag = options.parallel, f"--bamboo-pipelines {text}"
    if parallel.pipeline_model_parallel_size != 1:
        raise UserError(
            f"{flag} says how many stages there are: leave out --pipeline-model-parallel-size"
        )
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        raise UserError(
            f"{flag}: pipelines that are cut apart are not interleaved: leave out "
            "--num-layers-per-virtual-pipeline-stage"
        )
    cuts = tuple(LayerCut(_parse_cut(text, word, options)) for word in text.split(","))
    sizes = [cut.num_stages for cut in cuts]
    if sum(sizes) != num_nodes:
        raise UserError(f"{flag} needs {sum(sizes)} nodes, not {num_nodes}: start as many")
    if min(sizes) == 1 < max(sizes):
        raise UserError(
            f"{flag}: a pipeline of one stage cannot train beside longer ones: give it 2 or more"
        )
    return cuts


def _parse_cut(text: str, word: str, options: Options) -> tuple[int, ...]:
    """The layers by stage: as they are given, or as equal as can be, the first stages' more."""
    layers, flag = options.model.num_layers, f"--bamboo-pipelines {text}"
    try:
        numbers = tuple(int(number) for number in word.split("+"))
    except ValueError:
        raise UserError(
            f"{flag}: give the number of stages of each pipeline, like {_STAGES}, or the layers of "
            f"each stage, like {_LAYERS}"
        ) from None
    num_stages = numbers[0] if len(numbers) == 1 else len(numbers)
    if not 1 <= num_stages <= min(layers, MAX_STAGES):
        most = min(layers, MAX_STAGES)
        raise UserError(f"{flag}: a pipeline of {layers} layers can have 1 to {most} stages")
    if len(numbers) == 1:
        return tuple(-(-(layers - stage) // num_stages) for stage in range(num_stages))
    if min(numbers) < 1 or sum(numbers) != layers:
        raise UserError(f"{flag}: the stages {word} do not have {layers} layers, one at least each")
    return numbers


def _count_chunks(layers_per_stage: int, parallel: ParallelOptions) -> int:
    layers_per_chunk = parallel.num_layers_per_virtual_pipeline_stage or layers_per_stage
    if layers_per_stage % layers_per_chunk:
        raise UserError(
            f"the {layers_per_stage} layers of a stage cannot be cut into chunks of "
            f"{layers_per_chunk}: change --num-layers-per-virtual-pipeline-stage"
        )
    chunks = layers_per_stage // layers_per_chunk
    if chunks > MAX_CHUNKS:
        raise UserError(
            f"{chunks} chunks are more than the {MAX_CHUNKS} that a stage can have: raise "
            "--num-layers-per-virtual-pipeline-stage"
        )
    if chunks > 1 and parallel.pipeline_model_parallel_size == 1:
        raise UserError(
            "interleaving needs at least 2 stages: leave out "
            "--num-layers-per-virtual-pipeline-stage or raise --pipeline-model-parallel-size"
        )
    return chunks


def _count_microbatches(options: Options, cuts: tuple[LayerCut, ...]) -> tuple[int, ...]:
    """By pipeline: as given; the same where all are cut alike; else as the stages' work says."""
    training = options.training
    if options.bamboo.bamboo_microbatches is not None:
        numbers = _given_microbatches(options.bamboo.bamboo_microbatches, training, len(cuts))
    elif len(set(cuts)) == 1:
        numbers = _equal_microbatches(training, len(cuts))
    else:
        numbers = _split_microbatches(options, cuts)
    if max(numbers) > MAX_MICROBATCHES:
        raise UserError(
            f"{max(numbers)} microbatches are more than the {MAX_MICROBATCHES} that a pipeline can "
            "have: lower --global-batch-size or raise --micro-batch-size"
        )
    return numbers


def _given_microbatches(
    text: str, training: TrainingOptions, num_pipelines: int
) -> tuple[int, ...]:
    flag, size = f"--bamboo-microbatches {text}", training.micro_batch_size
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != num_pipelines or min(numbers) < 1:
        raise UserError(f"{flag}: give {num_pipelines} numbers, 1 or more for each pipeline")
    batch = training.global_batch_size
    if batch is not None and batch != size * sum(numbers):
        raise UserError(
            f"{flag}: {sum(numbers)} microbatches of {size} are {size * sum(numbers)} samples, not "
            f"--global-batch-size {batch}"
        )
    return numbers


def _equal_microbatches(training: TrainingOptions, num_pipelines: int) -> tuple[int, ...]:
    each = training.micro_batch_size * num_pipelines
    batch = training.global_batch_size or each
    if batch % each:
        raise UserError(
            f"--global-batch-size {batch} does not divide into microbatches of "
            f"{training.micro_batch_size} over {num_pipelines} pipelines: make it a multiple of "
            f"{each}"
        )
    return (batch // each,) * num_pipelines


def _split_microbatches(options: Options, cuts: tuple[LayerCut, ...]) -> tuple[int, ...]:
    """Those with which the slowest pipeline is fastest."""
    training = options.training
    batch = training.global_batch_size or training.micro_batch_size * len(cuts)
    total, left = divmod(batch, training.micro_batch_size)
    if left or total < len(cuts):
        raise UserError(
            f"--global-batch-size {batch} does not divide into microbatches of "
            f"{training.micro_batch_size}, one or more for each of {len(cuts)} pipelines"
        )
    works = read_works(options.bamboo, options.model.num_layers + 2)
    planned = [cut_at(works, spans_of_layers(cut.layers)) for cut in cuts]
    return split([Pace(cut.time_before, cut.work_of_slowest) for cut in planned], total)
