"""The tokenizer that Megatron-core's datasets are given.

The same encoding as Megatron's ``GPT2BPETokenizer``, through the ``tokenizers`` library. It has no
padding token: documents are packed, so that no sample is ever padded.
"""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_bamboo.data.bpe import END_OF_DOCUMENT, load_bpe
from megatron_bamboo.quiet import quiet_megatron_import

with quiet_megatron_import():
    from megatron.core.tokenizers import MegatronTokenizerBase

TOKENIZER_TYPES = ("GPT2BPETokenizer",)


class GPT2BPETokenizer(MegatronTokenizerBase):
    """Byte-pair encoding from ``vocab.json`` and ``merges.txt``."""

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        super().__init__(str(vocab_file), {"merge_path": str(merge_file)})
        self._bpe = load_bpe(vocab_file, merge_file)
        self._vocab: dict[str, int] = self._bpe.get_vocab()
        self._inverse = {token_id: token for token, token_id in self._vocab.items()}
        # Part of the description under which Megatron-core caches a dataset's indices. File names
        # are left out: the indices depend on no token, and a moved file must not rebuild them.
        self.unique_identifiers = OrderedDict({"class": type(self).__name__})

    def tokenize(self, text: str) -> list[int]:
        """The token ids of a text; ``<|endoftext|>`` in it is text like any other."""
        ids: list[int] = self._bpe.encode(text).ids
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        text: str = self._bpe.decode(list(ids), skip_special_tokens=False)
        return text

    def apply_chat_template(self) -> NoReturn:
        """Refused: a pretraining vocabulary has no chat template."""
        raise ValueError("a GPT-2 BPE vocabulary has no chat template")

    @property
    def vocab(self) -> dict[str, int]:
        """Token text to id."""
        return self._vocab

    @property
    def inv_vocab(self) -> dict[int, str]:
        """Id to token text."""
        return self._inverse

    @property
    def vocab_size(self) -> int:
        """Number of ids, unpadded."""
        return max(self._inverse) + 1

    @property
    def eod(self) -> int:
        """The id that ends a document."""
        return self._vocab[END_OF_DOCUMENT]

    @property
    def eos(self) -> int:
        """GPT-2 has one end token."""
        return self.eod


def padded_vocab_size(
    vocab_size: int, make_divisible_by: int = 128, tensor_parallel_size: int = 1
) -> int:
    """The embedding's rows: Megatron pads the vocabulary so that it divides over tensor ranks."""
    multiple = make_divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple
