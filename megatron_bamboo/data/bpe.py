"""GPT-2 style byte-pair encoding over ``vocab.json`` and ``merges.txt``.

Kept apart from the Megatron tokenizer class so that training a vocabulary and encoding text in
worker processes need neither torch nor Megatron-core.
"""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from megatron_bamboo.errors import UserError

END_OF_DOCUMENT = "<|endoftext|>"


def make_bpe(model: BPE) -> Tokenizer:
    """A tokenizer that splits and decodes text as GPT-2 does."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def load_bpe(vocab_file: str | Path, merge_file: str | Path) -> Tokenizer:
    """Read the two files; a UserError if one is missing, unreadable, or lacks the end token."""
    for flag, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
        if not Path(path).is_file():
            raise UserError(f"{flag}: no such file: {path}")
    try:
        model = BPE.from_file(str(vocab_file), str(merge_file))
    except Exception as error:  # the library raises bare Exception for any content it rejects
        raise UserError(f"cannot read {vocab_file} with {merge_file} as BPE: {error}") from error
    tokenizer = make_bpe(model)
    if tokenizer.token_to_id(END_OF_DOCUMENT) is None:
        raise UserError(f"{vocab_file} has no {END_OF_DOCUMENT} token, which ends each document")
    return tokenizer
