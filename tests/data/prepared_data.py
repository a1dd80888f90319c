"""The files that the data tests share."""

from dataclasses import dataclass
from pathlib import Path

from megatron_bamboo.cli import main as bamboo


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
