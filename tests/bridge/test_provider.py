"""Models that a recipe builds from `KHAModelProvider`."""

from tests.bridge import cases

HEADS = ("knock_query", "knock_value", "gate_value", "moh_router")


def loss_and_gradients():
    """Run one step. Return whether each head parameter has a gradient."""
    from kha_megatron.bridge.provider import KHAModelProvider
    from tests.distributed import models

    models.initialize()
    provider = KHAModelProvider(
        num_layers=2,
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


def test_a_provider_trains(bridge_ranks):
    names = [f"decoder.layers.{i}.self_attention.{k}.weight" for i in (0, 1) for k in HEADS]
    assert bridge_ranks(loss_and_gradients, 1)[0] == dict.fromkeys(names, True)


def recipe(file):
    """Override, check, write and read one of Bridge's recipes with our provider."""
    from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config
    from megatron.bridge.training.config import ConfigContainer, runtime_config_update
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    from kha_megatron.bridge.provider import KHAModelProvider

    cfg = vanilla_gpt_pretrain_config()
    sizes = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 6,
        "kv_channels": 10,
    }
    cfg.model = KHAModelProvider(**sizes, kha_value="mlp", **cases.LOCAL)
    with cases.quiet():
        overrides = ["model.kha_query=linear", "model.kha_moh={shared:1,active:2}"]
        cfg = process_config_with_overrides(cfg, cli_overrides=overrides)
        runtime_config_update(cfg)
        cfg.to_yaml(file)
        read = ConfigContainer.from_yaml(file)
    return type(read.model).__name__, str(cfg.model.kha), str(read.model.kha)


def test_a_recipe_takes_the_provider(bridge_ranks, tmp_path):
    found = bridge_ranks(recipe, 1, str(tmp_path / "run_config.yaml"))[0]
    assert found == ("KHAModelProvider", *["query=linear value=mlp moh(shared=1, active=2)"] * 2)
