"""Whether the entry point's parser takes words: ``python -m kha_megatron.training.words --lr 1``.

Megatron's parser is made by importing Megatron, which takes seconds and much memory: a launcher
that lives as long as its ranks asks a process of its own, which ends with 2 and a line if not.
"""

from kha_megatron.mcore import cpu
from kha_megatron.training.arguments import add_kha_arguments


def main() -> None:
    """Parse ``sys.argv``, and nothing else."""
    cpu.install(despite_cuda=True, quiet=True)  # a machine that launches needs no GPU
    from megatron.training.arguments import parse_args

    parse_args(add_kha_arguments)


if __name__ == "__main__":
    main()
