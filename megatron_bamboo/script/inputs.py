"""The files that decide what is trained: a node that has others must not join."""

import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import megatron_bamboo
from megatron_bamboo.config import Options

Input = tuple[str, str]
"""What names a file, and its path."""


def inputs_of(options: Options) -> tuple[Input, ...]:
    """The files that the flags name, and the script's own modules that are imported by now."""
    data = options.data
    named = [
        *((flag, f"{path}{end}") for flag, path in data.sources for end in (".idx", ".bin")),
        ("--vocab-file", data.vocab_file),
        ("--merge-file", data.merge_file),
    ]
    if options.bamboo.bamboo_costs is not None:
        named.append(("--bamboo-costs", options.bamboo.bamboo_costs))
    return (*named, *sorted(_own_modules()))


def _own_modules() -> Iterator[Input]:
    """Those that are neither installed nor this package's, which all are compared anyway."""
    paths = sysconfig.get_paths()
    libraries = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    libraries += [*site.getsitepackages(), site.getusersitepackages()]
    libraries.append(str(Path(megatron_bamboo.__file__).parent))
    installed = [Path(library).resolve() for library in libraries]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Modules that are made at run time may name a file that is none.
        if name == "__main__" or file is None or not Path(file).is_absolute():
            continue
        path = Path(file).resolve()
        is_source = path.suffix == ".py" and path.is_file()
        if is_source and not any(path.is_relative_to(place) for place in installed):
            yield "module", str(path)
