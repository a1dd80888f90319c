import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "takeover_stretch.py"


def test_both_tables_have_a_row_for_each_mode_and_number_of_chunks() -> None:
    options = ["--stages", "2", "--chunks", "1", "2", "--microbatches", "2", "--moments", "2"]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=True
    )
    tables = result.stdout.split("\n\n")[1:]
    distribution, quarters = (table.splitlines()[2:] for table in tables)
    modes = [f"| {mode} | {chunks} |" for chunks in (1, 2) for mode in ("lazy", "bubble", "eager")]
    assert [row[: len(mode)] for row, mode in zip(distribution, modes, strict=True)] == modes
    assert len(quarters) == 2 * len(modes)
    # Two stages take 9 (one chunk) or 15 for 6 (12) of work each; then one worker does it all.
    assert [row.split(" | ")[2] for row in distribution] == ["9", "9", "11", "15", "15", "19"]
