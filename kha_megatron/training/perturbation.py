"""Initial perturbations for null runs (``kha-megatron compare --null``)."""

from typing import Any

import torch
from megatron.core import mpu

from kha_megatron.errors import ConfigError


def perturb_after_load(models: list[torch.nn.Module], size: float, seed: int) -> None:
    """Perturb the token embedding once the weights of a pretrained model have been loaded."""
    handles: dict[torch.nn.Module, Any] = {}

    def perturb(model: torch.nn.Module, _: Any) -> None:
        handles.pop(model).remove()
        perturb_embedding([model], size, seed)

    for model in models:
        handles[model] = model.register_load_state_dict_post_hook(perturb)


@torch.no_grad()
def perturb_embedding(models: list[Any], size: float, seed: int) -> None:
    """Multiply each weight of the token embedding by ``1 + size * N(0, 1)``, in place.

    Call this before the models are wrapped. Ranks with the same weights (data-parallel ranks, and
    the first and last pipeline stage if they share the embedding) draw the same noise.

    Raises:
        ConfigError: If ``size`` is too small to change any weight in this dtype.
    """
    for model in models:
        if hasattr(model, "embedding"):  # also in the last stage with multi-token prediction
            weight = model.embedding.word_embeddings.weight
        elif model.post_process and model.share_embeddings_and_output_weights:
            weight = model.output_layer.weight
        else:
            continue
        generator = torch.Generator().manual_seed(seed + mpu.get_tensor_model_parallel_rank())
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        before = weight.double()
        weight.copy_(before * (1 + size * noise.to(weight.device)))
        if torch.equal(weight.double(), before):
            raise ConfigError(
                f"--kha-perturb-embedding {size:g} changes no weight in {weight.dtype}. "
                f"Use at least {torch.finfo(weight.dtype).eps:g}."
            )
