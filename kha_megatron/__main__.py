"""``python -m kha_megatron`` is the ``kha-megatron`` command."""

from kha_megatron.cli import main

main()
