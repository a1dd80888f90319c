"""Import Megatron-core without its import-time warnings.

On a machine without Transformer Engine and apex every process that imports megatron.core prints
half a dozen warnings. With eight nodes they bury what the user has to read, and nothing in them
can be acted on: which layer implementation is used is decided, and said, by the model package.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_megatron_import() -> Iterator[None]:
    """Hide the "not installed, falling back" warnings of imports made inside of the block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine).* not installed")
        yield
