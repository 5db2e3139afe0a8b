"""What a built model really knocks."""

import torch
from megatron.core import mpu

from kha_megatron.config import PROJECTIONS, KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.mcore.attention import KHASelfAttention


def describe_model(models: list[torch.nn.Module], kha: KHAConfig) -> str:
    """One line on what is knocked, in how many layers, and what it adds. Call it on every rank.

    Args:
        models: the virtual pipeline stages of this rank.
        kha: what was asked for.

    Returns:
        For example ``knocks value=mlp in 12 of 12 layers: 589,824 parameters added``, counted over
        all pipeline stages.

    Raises:
        ConfigError: a requested matrix is missing on this rank.
    """
    layers = [layer for model in models for layer in model.decoder.layers]
    attentions = [a for layer in layers if isinstance(a := layer.self_attention, KHASelfAttention)]
    for layer in layers:
        for projection in PROJECTIONS:
            built = getattr(layer.self_attention, f"knock_{projection}", None)
            found = None if built is None else built.variant
            if found != getattr(kha, projection):
                raise ConfigError(
                    f"layer {layer.layer_number} was to knock {projection} with "
                    f"{getattr(kha, projection)}, but the built model has {found}: "
                    "another layer spec was used (check --spec and pre-wrap hooks)"
                )
    added = sum(
        p.numel() for a in attentions for n, p in a.named_parameters() if n.startswith("knock_")
    )
    totals = torch.tensor(
        [len(attentions) if kha.variants else 0, len(layers), added],
        dtype=torch.int64,
        device=torch.cuda.current_device(),
    )
    torch.distributed.all_reduce(totals, group=mpu.get_pipeline_model_parallel_group())
    knocked, total, added = totals.tolist()
    return f"knocks {kha} in {knocked} of {total} layers: {added:,} parameters added"
