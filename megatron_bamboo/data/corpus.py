"""Real English text that every Python installation holds.

``python -m megatron_bamboo.data.corpus --output FILE`` writes JSON lines ``{"text": ...}``: the
language reference's help topics, then one document a module with the docstrings of the standard
library. Sources are parsed, never imported, because importing them all has side effects. The
order is sorted, so that two runs of one Python version write the same bytes.
"""

import argparse
import ast
import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

# Together with sys.stdlib_module_names, which leaves out the test suite already.
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})


def help_topics() -> Iterator[str]:
    """The topics of Python's ``help()``: the language reference as text."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name].strip()


def standard_library_sources(folder: Path) -> Iterator[Path]:
    """The source files of the standard library in sorted order."""
    for name in sorted(sys.stdlib_module_names):
        if (module := folder / f"{name}.py").is_file():
            yield module
        for path in sorted((folder / name).rglob("*.py")):
            if not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts):
                yield path


def docstrings(source: str) -> Iterator[str]:
    """A module's docstrings, outermost first, in the order of the source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escape sequences in the sources are not ours to fix
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node) or "").strip()
            if text:
                yield text


def documents() -> Iterator[str]:
    """All documents of the corpus, none of them empty."""
    yield from help_topics()
    for path in standard_library_sources(Path(sysconfig.get_path("stdlib"))):
        text = "\n\n".join(docstrings(path.read_text(encoding="utf-8", errors="replace")))
        if text:
            yield text


def write_corpus(output: Path) -> int:
    """Write the corpus whole or not at all; the number of bytes written."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    with partial.open("w", encoding="utf-8") as stream:
        for text in documents():
            stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    num_bytes = partial.stat().st_size
    os.replace(partial, output)
    return num_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Write the corpus to the file named."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_bamboo.data.corpus",
        description="Write the English text of this Python installation as JSON lines.",
    )
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    args = parser.parse_args(argv)
    sys.stderr.write(f"{args.output}: {write_corpus(args.output):,} bytes of text\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
