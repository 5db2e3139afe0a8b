"""Pre-training a GPT or hybrid model with Knocking-Heads Attention on Megatron's own training loop.

``torchrun ... -m kha_megatron.training`` takes all of Megatron's arguments and the ``--kha-*``
ones; ``kha-megatron data prepare`` makes its data from text files.
"""
