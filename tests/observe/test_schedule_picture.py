from pathlib import Path

import pytest
from matplotlib.image import imread

from megatron_bamboo.cli import main

SIZES = {"small": ("2", "1"), "large": ("8", "16")}


@pytest.mark.parametrize("size", SIZES)
def test_a_picture_of_any_size_is_wide_enough_and_no_wider_than_a_wall(
    tmp_path: Path, size: str
) -> None:
    stages, microbatches = SIZES[size]
    path = tmp_path / "schedule.png"
    options = ["--stages", stages, "--microbatches", microbatches, "--format", "png"]
    assert main(["schedule", *options, "--output", str(path)]) == 0
    height, width, _ = imread(path).shape
    assert 1000 < width < 6000
    assert 200 < height < 1000


def test_a_takeover_is_drawn_with_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "takeover.png"
    options = ["--stages", "3", "--chunks", "2", "--microbatches", "4", "--redundancy", "bubble"]
    drawn = ["--mirror-gradients", "1", "--lose", "0.1B2", "--format", "png", "--output", str(path)]
    assert main(["schedule", *options, *drawn]) == 0
    assert capsys.readouterr().out.startswith("rank 0 is lost at 17, before 0.1B2; rank 2 takes")
    assert (imread(path)[..., :3].min(axis=2) < 0.4).mean() > 0.1  # the lost rank's dark bar
