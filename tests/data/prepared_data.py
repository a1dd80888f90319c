"""The files that the data tests share, and how the product's script opens them."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.data import gpt_dataset
from megatron_bamboo.data.gpt_dataset import DataNeeds, Datasets, OpenDatasets
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


def opener(needs: DataNeeds, tokenizer: GPT2BPETokenizer, **more: bool) -> OpenDatasets:
    """Opens the samples as the script's provider does, which reads these options."""
    args = argparse.Namespace(
        seed=needs.seed,
        seq_length=needs.sequence_length,
        data_path=[needs.data_path] if needs.paths_apart is None else None,
        train_data_path=[needs.data_path],
        split=needs.split if needs.paths_apart is None else None,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask_in_dataloader=False,
    )
    validation, test = needs.paths_apart or (None, None)
    args.valid_data_path = [validation] if validation else None
    args.test_data_path = [test] if test else None
    vars(args).update(more)
    numbers = (needs.num_samples, needs.num_validation_samples, needs.num_test_samples)

    def open_datasets(cache_folder: Path) -> Any:
        args.data_cache_path = str(cache_folder)
        begin(args, tokenizer)
        return train_valid_test_datasets_provider(numbers)

    return open_datasets


def prepare_all(needs: DataNeeds, tokenizer: GPT2BPETokenizer) -> Datasets:
    """The product's function, with the script's provider."""
    return gpt_dataset.prepare_datasets(needs, tokenizer, opener(needs, tokenizer))


def prepare_train_dataset(needs: DataNeeds, tokenizer: GPT2BPETokenizer) -> Any:
    """The training samples alone."""
    return prepare_all(needs, tokenizer).train


def build_train_dataset(needs: DataNeeds, tokenizer: GPT2BPETokenizer, **more: bool) -> Any:
    """The training samples, whose indices are there."""
    return gpt_dataset.build_datasets(needs, opener(needs, tokenizer, **more)).train
