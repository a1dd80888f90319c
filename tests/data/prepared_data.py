"""The files that the data tests share, and how the product's script opens them."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.data import gpt_dataset
from megatron_bamboo.data.gpt_dataset import OpenDataset, TrainDataOptions
from megatron_bamboo.data.tokenizer import GPT2BPETokenizer
from megatron_bamboo.script.state import begin
from pretrain_gpt_bamboo import train_valid_test_datasets_provider


@dataclass(frozen=True)
class Prepared:
    """The files of a prepared data set."""

    corpus: Path
    vocab_file: Path
    merge_file: Path
    data_path: str

    def preprocess(self, *extra: str, corpus: Path | None = None, prefix: str = "other") -> int:
        """Run ``bamboo preprocess`` into the folder of the corpus."""
        files = ["--vocab-file", str(self.vocab_file), "--merge-file", str(self.merge_file)]
        source = corpus or self.corpus
        output = str(source.parent / prefix)
        return bamboo(
            ["preprocess", "--input", str(source), "--output-prefix", output, *files, *extra]
        )


def opener(options: TrainDataOptions, tokenizer: GPT2BPETokenizer, **more: bool) -> OpenDataset:
    """Opens the training samples as the script's provider does, which reads these options."""
    args = argparse.Namespace(
        seed=options.seed,
        seq_length=options.sequence_length,
        data_path=[options.data_path],
        split=options.split,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask_in_dataloader=False,
    )
    vars(args).update(more)

    def open_dataset(cache_folder: Path) -> Any:
        args.data_cache_path = str(cache_folder)
        begin(args, tokenizer)
        return train_valid_test_datasets_provider((options.num_samples, 0, 0))[0]

    return open_dataset


def prepare_train_dataset(options: TrainDataOptions, tokenizer: GPT2BPETokenizer) -> Any:
    """The product's function, with the script's provider."""
    return gpt_dataset.prepare_train_dataset(options, tokenizer, opener(options, tokenizer))


def build_train_dataset(
    options: TrainDataOptions, tokenizer: GPT2BPETokenizer, **more: bool
) -> Any:
    """The product's function, with the script's provider."""
    return gpt_dataset.build_train_dataset(options, opener(options, tokenizer, **more))
