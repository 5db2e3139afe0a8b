"""Test ``--kha-perturb-embedding``."""

import pytest
import torch

from kha_megatron.errors import ConfigError
from kha_megatron.heads.config import HeadsConfig


def perturbed(size, dtype="float32", *, seed=3, **layout):
    """Return name, weight before and weight after of each changed parameter."""
    from megatron.core import parallel_state as ranks

    from kha_megatron.training.perturbation import perturb_embedding
    from tests.distributed import models

    models.initialize(**layout)
    config = models.transformer_config(
        tensor_model_parallel_size=ranks.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=ranks.get_pipeline_model_parallel_world_size(),
    )
    model = models.gpt_model(
        config,
        HeadsConfig(),
        pre_process=ranks.is_pipeline_first_stage(),
        post_process=ranks.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    model.to(getattr(torch, dtype))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    try:
        perturb_embedding([model], size, seed)
    except ConfigError as error:
        return str(error)
    changed = []
    for name, weight in model.named_parameters():
        if not torch.equal(before[name], weight):
            changed.append((name, before[name].double(), weight.detach().double()))
    return changed


EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


def test_only_the_embedding_is_perturbed(ranks):
    (((name, before, after),),) = ranks(perturbed, 1, 1e-6)
    assert name == EMBEDDING
    share = after / before - 1
    assert share.std() == pytest.approx(1e-6, rel=0.1)
    assert share.abs().max() < 5e-6
    (((_, _, other),),) = ranks(perturbed, 1, 1e-6, seed=4)
    assert not torch.equal(after, other)


def test_ranks_that_hold_the_same_weights_move_alike(ranks):
    ((first,), (last,)) = ranks(perturbed, 2, 1e-6, pipeline_model_parallel_size=2)
    name, _, embedding = first
    output_name, _, output = last
    assert name == EMBEDDING
    assert output_name == OUTPUT
    assert torch.equal(embedding, output)
    ((first,), (second,)) = ranks(perturbed, 2, 1e-3, tensor_model_parallel_size=2)
    _, before, after = first
    _, other_before, other_after = second
    assert not torch.allclose(after / before, other_after / other_before, rtol=1e-6)


def test_a_perturbation_below_the_dtype_is_refused(ranks):
    (answer,) = ranks(perturbed, 1, 1e-6, "bfloat16")
    assert answer == (
        "--kha-perturb-embedding 1e-06 changes no weight in torch.bfloat16. Use at least 0.0078125."
    )
    (((_, before, after),),) = ranks(perturbed, 1, 2**-8, "bfloat16")
    assert 0.2 < (before != after).double().mean() < 0.9
