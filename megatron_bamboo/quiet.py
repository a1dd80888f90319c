"""Import Megatron-core without its import-time warnings, and never with the wrong apex.

On a machine without Transformer Engine and apex every process that imports megatron.core prints
half a dozen warnings. With eight nodes they bury what the user has to read, and nothing in them
can be acted on: which layer implementation is used is decided by the model package.

The package index has an unrelated package called ``apex``. Megatron-core would import it in place
of NVIDIA's and fail somewhere inside, so it is noticed here, before.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from megatron_bamboo.errors import UserError

USER_ERROR_STATUS = 2


@contextmanager
def quiet_megatron_import() -> Iterator[None]:
    """Hide the "not installed, falling back" warnings of imports made inside of the block.

    Used while modules are imported, where nobody can catch an error: a wrong apex ends the process.
    """
    try:
        check_apex()
    except UserError as error:
        sys.stderr.write(f"megatron_bamboo: {error}\n")
        raise SystemExit(USER_ERROR_STATUS) from None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine).* not installed")
        yield


def check_apex() -> None:
    """A UserError if an ``apex`` is installed that is not NVIDIA's; it is not imported."""
    spec = find_spec("apex")
    if spec is None:
        return
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        raise UserError(
            "the installed package `apex` is not NVIDIA's but an unrelated one: pip uninstall apex "
            "(NVIDIA's comes from https://github.com/NVIDIA/apex or NVIDIA's container)"
        )
