"""Pre-train GPT and hybrid models with Knocking-Heads Attention, using Megatron's training loop.

``torchrun ... -m kha_megatron.training`` accepts all of Megatron's arguments and the ``--kha-*``
arguments. You can prepare data with ``kha-megatron data prepare``.
"""
