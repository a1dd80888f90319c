"""``python -m megatron_bamboo`` is the ``bamboo`` command."""

from megatron_bamboo.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
