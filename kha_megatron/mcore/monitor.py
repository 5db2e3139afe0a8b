"""What a built model really knocks."""

from collections.abc import Iterable

import torch
from megatron.core import mpu
from megatron.core.transformer.attention import Attention

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import HeadSizes, HeadTensor
from kha_megatron.mcore.attention import KnockedAttention
from kha_megatron.mcore.knocking import HeadWeight


def describe_model(models: list[torch.nn.Module], kha: KHAConfig) -> str:
    """One line on what is knocked, in how many layers, and what it adds. Call it on every rank.

    Args:
        models: the virtual pipeline stages of this rank.
        kha: what was asked for.

    Returns:
        For example ``knocks value=mlp in 12 of 12 layers: 589,824 parameters added``, counted over
        all pipeline stages. Layers of a hybrid model without attention do not count.

    Raises:
        ConfigError: a requested matrix is missing, or one is there that was not requested. Raised
            on every rank, whichever pipeline stage the layer is on.
    """
    layers = [layer for model in models for layer in model.decoder.layers]
    every = [a for x in layers if isinstance(a := getattr(x, "self_attention", None), Attention)]
    attentions = [attention for attention in every if isinstance(attention, KnockedAttention)]
    sizes = HeadSizes(query_heads=1, kv_heads=1, head_dim=1)  # which no name depends on
    wanted = _kinds(kha.tensors(sizes))
    wrong = sum(
        _kinds(m.tensor for m in _weights(attention)) != wanted
        or getattr(attention, "kind", None) != kha.attention
        for attention in every
    )
    added = sum(weight.tensor.size for attention in attentions for weight in _weights(attention))
    totals = torch.tensor(
        [len(attentions) if kha.mechanisms else 0, len(every), added, wrong],
        dtype=torch.int64,
        device=torch.cuda.current_device(),
    )
    torch.distributed.all_reduce(totals, group=mpu.get_pipeline_model_parallel_group())
    knocked, total, added, wrong = totals.tolist()
    if wrong or ((kha.mechanisms or kha.attention) and not total):
        raise ConfigError(
            f"{wrong} of {total} layers were built without the asked-for KHA on {kha}: another "
            "layer spec was used (check --spec and pre-wrap hooks)"
        )
    return f"knocks {kha} in {knocked} of {total} layers: {added:,} parameters added"


def _weights(attention: Attention) -> list[HeadWeight]:
    return [module for module in attention.children() if isinstance(module, HeadWeight)]


def _kinds(tensors: Iterable[HeadTensor]) -> set[tuple[str, ...]]:
    """What tells the tensors of one configuration from those of another."""
    return {(tensor.name, *tensor.matrices) for tensor in tensors}
