import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "takeover_stretch.py"


def tables(options: str) -> list[list[str]]:
    """The rows of both tables for two stages."""
    sizes = ["--stages", "2", "--moments", "2", *options.split()]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *sizes], capture_output=True, text=True, check=True
    )
    return [table.splitlines()[2:] for table in result.stdout.split("\n\n")[1:]]


def test_both_tables_have_a_row_for_each_mode_and_number_of_chunks() -> None:
    distribution, quarters = tables("--chunks 1 2 --microbatches 2")
    modes = [f"| {mode} | {chunks} |" for chunks in (1, 2) for mode in ("lazy", "bubble", "eager")]
    assert [row[: len(mode)] for row, mode in zip(distribution, modes, strict=True)] == modes
    assert len(quarters) == 2 * len(modes)
    # Two stages take 9 (one chunk) or 15 for 6 (12) of work each; then one worker does it all.
    assert [row.split(" | ")[2] for row in distribution] == ["9", "9", "11", "15", "15", "19"]


def test_with_mirrors_a_loss_at_the_end_repeats_one_backward() -> None:
    """Six microbatches take 21, and one more forward (but with eager) and backward take 3 or 2."""
    _, quarters = tables("--chunks 1 --microbatches 6 --mirror-gradients 5")
    at_end = {row.split(" | ")[0]: row.split(" | ")[3].split()[3] for row in quarters}
    assert at_end == {"| lazy": "0.143", "| bubble": "0.143", "| eager": "0.074"}
