"""What a built model really knocks."""

import torch
from megatron.core import mpu
from megatron.core.transformer.attention import Attention

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Projection
from kha_megatron.heads.knock import PROJECTIONS, Variant
from kha_megatron.mcore.attention import KnockedAttention


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
    wrong = sum(
        _built(attention) != kha.variants or getattr(attention, "kind", None) != kha.attention
        for attention in every
    )
    added = sum(
        p.numel() for a in attentions for n, p in a.named_parameters() if n.startswith("knock_")
    )
    totals = torch.tensor(
        [len(attentions) if kha.variants else 0, len(every), added, wrong],
        dtype=torch.int64,
        device=torch.cuda.current_device(),
    )
    torch.distributed.all_reduce(totals, group=mpu.get_pipeline_model_parallel_group())
    knocked, total, added, wrong = totals.tolist()
    if wrong or ((kha.variants or kha.attention) and not total):
        raise ConfigError(
            f"{wrong} of {total} layers were built without the asked-for KHA on {kha}: another "
            "layer spec was used (check --spec and pre-wrap hooks)"
        )
    return f"knocks {kha} in {knocked} of {total} layers: {added:,} parameters added"


def _built(attention: Attention) -> dict[Projection, Variant]:
    """The variants that an attention really has, as in ``KHAConfig.variants``."""
    knocking = {p: getattr(attention, f"knock_{p}", None) for p in PROJECTIONS}
    return {p: module.variant for p, module in knocking.items() if module is not None}
