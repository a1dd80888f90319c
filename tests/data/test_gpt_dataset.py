import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prepared_data import Prepared, build_train_dataset, prepare_all, prepare_train_dataset

from megatron_bamboo.data import gpt_dataset
from megatron_bamboo.data.data_files import Part, has_samples
from megatron_bamboo.data.gpt_dataset import DataNeeds, read_microbatch
from megatron_bamboo.data.tokenizer import GPT2BPETokenizer
from megatron_bamboo.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(prepared: Prepared) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(prepared.vocab_file, prepared.merge_file)


@pytest.fixture
def options(prepared: Prepared, tmp_path: Path) -> DataNeeds:
    return DataNeeds(
        prepared.data_path,
        sequence_length=32,
        seed=1234,
        num_samples=200,
        split="100,0,0",
        cache_path=str(tmp_path / "cache"),
    )


def test_a_microbatch_is_what_get_batch_gives(
    options: DataNeeds, tokenizer: GPT2BPETokenizer
) -> None:
    assert len(prepare_train_dataset(options, tokenizer)) >= 200
    batch = read_microbatch(build_train_dataset(options, tokenizer), range(4, 7))
    assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert {value.shape for value in batch.values()} == {(3, 32)}
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
    assert torch.equal(batch["position_ids"][2], torch.arange(32))
    assert batch["loss_mask"].dtype == torch.float32 and bool((batch["loss_mask"] == 1).all())


def test_an_attention_mask_comes_only_if_asked_for(
    options: DataNeeds, tokenizer: GPT2BPETokenizer
) -> None:
    prepare_train_dataset(options, tokenizer)
    masked = build_train_dataset(options, tokenizer, create_attention_mask_in_dataloader=True)
    mask = read_microbatch(masked, range(2))["attention_mask"]
    assert mask.shape == (2, 1, 32, 32)
    assert torch.equal(mask[1, 0], torch.ones(32, 32).triu(1).bool())  # true where hidden


def test_samples_depend_on_the_seed_alone(
    options: DataNeeds, tokenizer: GPT2BPETokenizer, tmp_path: Path
) -> None:
    def tokens(**changes: object) -> torch.Tensor:
        changed = replace(options, **changes)
        prepare_train_dataset(changed, tokenizer)
        torch.rand(1)  # no generator's state enters
        return read_microbatch(build_train_dataset(changed, tokenizer), range(50))["tokens"]

    assert torch.equal(tokens(), tokens(cache_path=str(tmp_path / "other")))
    assert not torch.equal(tokens(), tokens(seed=1235))


def times_of_files(options: DataNeeds) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path(options.cache_path or "").rglob("*")}


def test_workers_only_load(options: DataNeeds, tokenizer: GPT2BPETokenizer) -> None:
    with pytest.raises(UserError, match="not prepared"):
        build_train_dataset(options, tokenizer)
    prepare_train_dataset(options, tokenizer)
    before = times_of_files(options)
    build_train_dataset(options, tokenizer)
    prepare_train_dataset(options, tokenizer)
    assert times_of_files(options) == before
    assert not [path for path in before if path.name.startswith(".")]


def test_new_data_under_an_old_name_gets_new_indices(
    options: DataNeeds, tokenizer: GPT2BPETokenizer, prepared: Prepared, tmp_path: Path
) -> None:
    moved = replace(options, data_path=str(tmp_path / "data"))
    for suffix in (".bin", ".idx"):
        shutil.copy(prepared.data_path + suffix, moved.data_path + suffix)
    prepare_train_dataset(moved, tokenizer)
    corpus = tmp_path / "other.jsonl"
    corpus.write_text('{"text": "%s"}\n' % ("another text " * 50), encoding="utf-8")
    assert prepared.preprocess(corpus=corpus) == 0
    for suffix in (".bin", ".idx"):
        os.replace(tmp_path / f"other_text_document{suffix}", moved.data_path + suffix)
    with pytest.raises(UserError, match="not prepared"):
        build_train_dataset(moved, tokenizer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_path": "/nowhere/data"}, "no such file: /nowhere/data.bin"),
        ({"split": "0,1,0"}, "the first above 0"),
        ({"split": "9:1"}, "three numbers"),
        ({"split": "٩,1,0"}, "three numbers"),
        ({"split": "9" * 400}, "three numbers"),
        ({"split": f"{'9' * 308},{'9' * 308}"}, "three numbers"),
        ({"split": "1,1000,0"}, "too few for one sample"),
        ({"sequence_length": 100_000}, "too few for one sample"),
    ],
)
def test_bad_options_are_one_line(
    options: DataNeeds, tokenizer: GPT2BPETokenizer, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message) as raised:
        prepare_train_dataset(replace(options, **changes), tokenizer)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("suffix", "size", "message"),
    [
        (".bin", 100, "bin has 100 bytes"),
        (".bin", 0, "is empty"),
        (".idx", 40, "cut short"),
        (".idx", 20, "cut short"),
        (".idx", 0, "is not an index"),
    ],
)
def test_truncated_files_are_refused(
    options: DataNeeds,
    tokenizer: GPT2BPETokenizer,
    prepared: Prepared,
    tmp_path: Path,
    suffix: str,
    size: int,
    message: str,
) -> None:
    broken = replace(options, data_path=str(tmp_path / "data"))
    for name in (".bin", ".idx"):
        shutil.copy(prepared.data_path + name, broken.data_path + name)
    os.truncate(broken.data_path + suffix, size)
    with pytest.raises(UserError, match=message):
        prepare_train_dataset(broken, tokenizer)


def change_index(index: bytearray, part: str, number: int, value: int) -> None:
    """Overwrite one number: of the header at its offset, or of an array by its place."""
    (num_sequences,) = struct.unpack_from("<Q", index, 18)
    pointers = 34 + 4 * num_sequences
    form, offset = {
        "version": ("<Q", 9),
        "code": ("<B", 17),
        "length": ("<i", 34 + 4 * number),
        "pointer": ("<q", pointers + 8 * number),
        "document": ("<q", pointers + 8 * num_sequences + 8 * number),
    }[part]
    struct.pack_into(form, index, offset, value)


@pytest.mark.parametrize(
    ("part", "number", "value", "message"),
    [
        ("version", 0, 2, "has version 2, not 1"),
        ("code", 0, 9, "type code 9"),
        ("code", 0, 6, "type code 6, which are no integers"),
        ("length", 3, -1, "lengths below 0"),
        ("length", 3, 1, "points to other places"),
        ("pointer", 0, 8, "points to other places"),
        ("pointer", 5, -8, "points to other places"),
        ("document", 0, 1, "has documents that do not go"),
        ("document", 4, 39, "has documents that do not go"),
        ("document", 40, 41, "has documents that do not go"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(
    options: DataNeeds,
    tokenizer: GPT2BPETokenizer,
    prepared: Prepared,
    tmp_path: Path,
    part: str,
    number: int,
    value: int,
    message: str,
) -> None:
    broken = replace(options, data_path=str(tmp_path / "data"))
    shutil.copy(f"{prepared.data_path}.bin", f"{broken.data_path}.bin")
    index = bytearray(Path(f"{prepared.data_path}.idx").read_bytes())
    change_index(index, part, number, value)
    Path(f"{broken.data_path}.idx").write_bytes(index)
    with pytest.raises(UserError, match=f"{message}.*; run `bamboo preprocess` again") as raised:
        prepare_train_dataset(broken, tokenizer)
    assert "\n" not in str(raised.value)


def test_an_index_of_nothing_is_refused(
    options: DataNeeds, tokenizer: GPT2BPETokenizer, tmp_path: Path
) -> None:
    empty = replace(options, data_path=str(tmp_path / "data"))
    (tmp_path / "data.bin").touch()
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 0, 0)
    (tmp_path / "data.idx").write_bytes(header)
    with pytest.raises(UserError, match="has documents that do not go"):
        prepare_train_dataset(empty, tokenizer)


def test_negative_tokens_are_refused(
    options: DataNeeds, tokenizer: GPT2BPETokenizer, tmp_path: Path
) -> None:
    negative = replace(options, data_path=str(tmp_path / "data"))
    (tmp_path / "data.bin").write_bytes(struct.pack("<100i", *range(99), -1))
    index = struct.pack("<9sQBQQiqqq", b"MMIDIDX\x00\x00", 1, 4, 1, 2, 100, 0, 0, 1)
    (tmp_path / "data.idx").write_bytes(index)
    with pytest.raises(UserError, match="holds token -1"):
        prepare_train_dataset(negative, tokenizer)


def test_tokens_of_another_vocabulary_are_refused(options: DataNeeds, prepared: Prepared) -> None:
    tokenizer = GPT2BPETokenizer(prepared.vocab_file, prepared.merge_file)
    smallest = {token: number for token, number in tokenizer.vocab.items() if number < 50}
    tokenizer._inverse = {number: token for token, number in smallest.items()}
    with pytest.raises(UserError, match="another --vocab-file"):
        prepare_train_dataset(options, tokenizer)


def test_an_unwritable_cache_is_one_line(
    options: DataNeeds, tokenizer: GPT2BPETokenizer, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--data-cache-path"):
        prepare_train_dataset(replace(options, cache_path=str(tmp_path / "file")), tokenizer)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [(None, "gave no training dataset"), ([{"tokens": 1}] * 199, "has 199 samples, .* takes 200")],
)
def test_a_provider_that_gives_too_little_is_refused(
    options: DataNeeds, tokenizer: GPT2BPETokenizer, dataset: object, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        gpt_dataset.prepare_datasets(options, tokenizer, lambda folder: (dataset,))


def test_parts_that_are_evaluated_change_nothing_of_the_training_samples(
    options: DataNeeds, tokenizer: GPT2BPETokenizer
) -> None:
    alone = prepare_all(replace(options, split="60,30,10"), tokenizer)
    assert (alone.validation, alone.test) == (None, None)
    more = replace(options, split="60,30,10", num_validation_samples=300, num_test_samples=20)
    together = prepare_all(more, tokenizer)
    assert together.validation is not None and together.test is not None
    assert len(together.validation) >= 300 and len(together.test) >= 20
    one, other = (read_microbatch(data.train, range(50))["tokens"] for data in (alone, together))
    assert torch.equal(one, other)


def test_a_part_for_validation_without_a_sample_is_refused(
    options: DataNeeds, tokenizer: GPT2BPETokenizer
) -> None:
    with pytest.raises(UserError, match=r"the validation part .* give --split more for validation"):
        prepare_all(replace(options, split="100,0,0", num_validation_samples=1), tokenizer)


def test_whether_there_is_a_sample_for_a_test(
    options: DataNeeds, tokenizer: GPT2BPETokenizer
) -> None:
    path, length = options.data_path, options.sequence_length
    assert has_samples(path, "60,30,10", length, Part.TEST)
    for split in ("90,10,0", "90,10", "100", "1000000,0,1"):
        assert not has_samples(path, split, length, Part.TEST)


def test_validation_samples_may_have_files_of_their_own(
    options: DataNeeds, tokenizer: GPT2BPETokenizer
) -> None:
    path = options.data_path
    apart = replace(
        options, paths_apart=(path, None), num_validation_samples=20, num_test_samples=20
    )
    found = prepare_all(apart, tokenizer)
    assert found.validation is not None and found.test is None
    alone = prepare_train_dataset(options, tokenizer)
    one, other = (read_microbatch(data, range(50))["tokens"] for data in (found.train, alone))
    assert torch.equal(one, other)
    assert prepare_all(replace(apart, paths_apart=(path, path)), tokenizer).test is not None
