"""Models that a recipe builds from `KHAModelProvider`."""

import pytest
import torch

from tests.bridge import cases

HEADS = ("knock_query", "knock_value", "gate_value", "moh_router")


def loss_and_gradients(hybrid):
    """Run one step. Return whether each head parameter has a gradient."""
    from kha_megatron.bridge.provider import KHAHybridModelProvider, KHAModelProvider
    from tests.distributed import models

    models.initialize()
    provider_type = KHAHybridModelProvider if hybrid else KHAModelProvider
    layers = {"hybrid_layer_pattern": "*-*-"} if hybrid else {"num_layers": 2}
    provider = provider_type(
        **layers,
        bf16=False,
        params_dtype=torch.float32,
        hidden_size=24,
        ffn_hidden_size=36,
        num_attention_heads=6,
        num_query_groups=2,
        kv_channels=10,
        vocab_size=51,
        kha_query="linear",
        kha_value="mlp",
        kha_gate={"value": "shared"},
        kha_moh={"shared": 1, "active": 3},
        **cases.LOCAL,
    )
    with cases.quiet():
        provider.finalize()
        model = provider.provide_distributed_model(
            wrap_with_ddp=False,
            use_cpu_initialization=True,
        )[0]
    ids, positions, mask = models.batch()
    model(ids % 51, positions, mask, labels=ids % 51).mean().backward()
    return {
        name: bool(parameter.grad.abs().sum() > 0)
        for name, parameter in model.named_parameters()
        if name.rsplit(".", 2)[1] in HEADS
    }


@pytest.mark.parametrize(("hybrid", "layers"), [(False, (0, 1)), (True, (0, 2))])
def test_a_provider_trains(bridge_ranks, hybrid, layers):
    names = [f"decoder.layers.{i}.self_attention.{k}.weight" for i in layers for k in HEADS]
    assert bridge_ranks(loss_and_gradients, 1, hybrid)[0] == dict.fromkeys(names, True)


def recipe(file, name, layers):
    """Override, check, write and read one of Bridge's recipes with our provider."""
    from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config
    from megatron.bridge.training.config import ConfigContainer, runtime_config_update
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    from kha_megatron.bridge import provider

    cfg = vanilla_gpt_pretrain_config()
    sizes = {
        **layers,
        "seq_length": 1024,
        "hidden_size": 24,
        "num_attention_heads": 6,
        "kv_channels": 10,
    }
    cfg.model = getattr(provider, name)(**sizes, kha_value="mlp", **cases.LOCAL)
    with cases.quiet():
        overrides = ["model.kha_query=linear", "model.kha_moh={shared:1,active:2}"]
        cfg = process_config_with_overrides(cfg, cli_overrides=overrides)
        runtime_config_update(cfg)
        cfg.to_yaml(file)
        read = ConfigContainer.from_yaml(file)
    return type(read.model).__name__, str(cfg.model.kha), str(read.model.kha)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("KHAModelProvider", {"num_layers": 2}),
        ("KHAHybridModelProvider", {"hybrid_layer_pattern": "*-*-"}),
    ],
)
def test_a_recipe_takes_the_provider(bridge_ranks, tmp_path, name, layers):
    found = bridge_ranks(recipe, 1, str(tmp_path / "run_config.yaml"), name, layers)[0]
    assert found == (name, *["query=linear value=mlp moh(shared=1, active=2)"] * 2)
