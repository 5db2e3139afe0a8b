"""HybridModel with KHA equals the GPTModel it is made of: same weights, same numbers.

Tolerance: float32, and the same operations in the same order, so differences come from fused or
reordered sums only; 1e-5 relative (of norms) is far above them and far below any mistake.
"""

import re
from contextlib import nullcontext

import pytest

from kha_megatron.errors import ConfigError
from kha_megatron.heads import Knock, MixtureOfHeads
from kha_megatron.heads.config import HeadsConfig

TOLERANCE = 1e-5
MIXED = HeadsConfig(Knock(query="linear", key="gate", value="mlp"))
MIXTURE = HeadsConfig(Knock(value="mlp"), MixtureOfHeads(shared=3, active=2, balance=5.0))
PER_LAYER = HeadsConfig(MixtureOfHeads(shared=3, active=[2, 3, 1], balance=5.0))
"""The loss is averaged over attention layers, and each of them has its own number of heads."""
MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 20}
TP = {"tensor_model_parallel_size": 2}
EP = TP | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
LAYERS = 3

CASES = {
    "dense without QK-norm": (1, {}, {"qk_layernorm": False}, "*-*-*-"),
    "experts after a dense layer": (1, {}, MOE | {"moe_layer_freq": [0, 1, 1]}, "*-*E*E"),
    "sequence parallel": (2, TP, TP | {"sequence_parallel": True}, "*-*-*-"),
    "experts and sequence parallel": (
        2,
        EP,
        EP | {"sequence_parallel": True, "moe_token_dispatcher_type": "alltoall"} | MOE,
        "*E*E*E",
    ),
}


def gpt_name(name):
    """Return the GPTModel's name of a tensor, for patterns of attention and MLP in turn."""
    name = name.replace("final_norm", "final_layernorm")
    return re.sub(r"(?<=decoder\.layers\.)\d+", lambda number: str(int(number[0]) // 2), name)


def compared(kha, sizes, overrides, pattern):
    """Relative errors of the outputs and of every gradient against the GPTModel's."""
    from megatron.core.distributed import DistributedDataParallel as Ddp
    from megatron.core.distributed import DistributedDataParallelConfig as DdpConfig
    from megatron.core.distributed import finalize_model_grads

    from tests.distributed import models

    models.initialize(**sizes)
    config = models.transformer_config(num_layers=LAYERS, **overrides)
    gpt = models.gpt_model(config, kha)
    twice = {"num_layers": len(pattern), "is_hybrid_model": True, "moe_layer_freq": 1}
    config = models.transformer_config(**overrides | twice)
    hybrid = models.hybrid_model(config, kha, pattern=pattern)
    weights = gpt.state_dict()
    hybrid.load_state_dict({n: weights[gpt_name(n)] for n in hybrid.state_dict()})

    found = {}
    for name, model in (("gpt", gpt), ("hybrid", hybrid)):
        ddp = Ddp(model.config, DdpConfig(), model)
        ddp.zero_grad_buffer()
        tokens, positions, mask = models.batch()
        losses = ddp(tokens, positions, mask, labels=tokens)
        losses.mean().backward()
        finalize_model_grads([ddp])
        found[name] = {"losses": losses.detach()} | {
            n: p.main_grad.clone() for n, p in model.named_parameters()
        }
        vars(ddp).clear()
    got, want = found["hybrid"], found["gpt"]
    assert len(got) == len(want)
    return {n: _error(value, want[gpt_name(n)]) for n, value in got.items()}


def _error(got, want):
    assert want.norm() > 0
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("case", "kha"),
    [
        *((case, MIXED) for case in CASES),
        ("dense without QK-norm", PER_LAYER),
        pytest.param("sequence parallel", MIXTURE, marks=pytest.mark.whole),
    ],
)
def test_losses_and_every_gradient_equal_the_gpt_form(ranks, case, kha):
    n, *settings = CASES[case]
    for errors in ranks(compared, n, kha, *settings):
        assert sum(".knock_" in name for name in errors) == len(kha.variants) * LAYERS
        assert sum(".moh_router" in name for name in errors) == (
            LAYERS if kha.get(MixtureOfHeads) else 0
        )
        assert {name: e for name, e in errors.items() if not e < TOLERANCE} == {}


def refuse_stacks(own_configs):
    from tests.distributed import models
    from tests.mcore.layer_configs import own_layer_configs

    models.initialize()
    messages = []
    for overrides, kha, pattern in (
        ({}, MIXED, "M*G"),
        ({"experimental_attention_variant": "dsa"}, MIXED, "D-"),
        ({}, MIXED, "+-"),
        ({}, MIXTURE, "**-"),
        ({"mtp_num_layers": 1}, MIXTURE, "*-/*-"),
        ({}, MIXED, "*E"),
        ({"heterogeneous_block_specs": True}, MIXED, "*-"),
        ({"use_kitchen": True}, MIXED, "*-"),
    ):
        config = models.transformer_config(num_layers=2, is_hybrid_model=True)
        for name, value in overrides.items():
            setattr(config, name, value)
        contract = own_layer_configs() if own_configs else nullcontext()
        with contract, pytest.raises(ConfigError) as caught:
            models.hybrid_model(config, kha, pattern=pattern)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("own_configs", [False, True], ids=["", "own-configs"])
def test_stacks_that_cannot_be_built_are_refused(ranks, own_configs):
    messages = ranks(refuse_stacks, 1, own_configs)[0]
    mamba, sparse, latent, unordered, predicting, experts, *options = messages
    assert "Hybrid layers G M require --transformer-impl transformer_engine" in mamba
    assert "does not support DeepSeek sparse attention (D)" in sparse
    assert "+ in --hybrid-layer-pattern requires multi_latent_attention=True" in latent
    assert "requires --hybrid-layer-pattern to alternate" in unordered
    assert "does not support multi-token prediction" in predicting
    assert "E in --hybrid-layer-pattern requires --num-experts" in experts
    for option, message in zip(("heterogeneous_block_specs", "use_kitchen"), options, strict=True):
        assert f"KHA does not support {option}=True in hybrid models" in message


def build_with_unknown_layers():
    from kha_megatron.errors import VersionError
    from kha_megatron.mcore.hybrid import KHAHybridStack
    from tests.distributed import models

    models.initialize()
    config = models.transformer_config(is_hybrid_model=True)
    for layers in ({}, {"layer_config_list": [config]}):
        with pytest.raises(VersionError, match="cannot read the hybrid layers"):
            KHAHybridStack(config, None, kha=MIXED, pg_collection=None, **layers)


def test_layers_in_an_unknown_form_are_refused(ranks):
    """Otherwise, no layer would be checked."""
    ranks(build_with_unknown_layers, 1)


MICROBATCHES = 3


def accumulated_gradients():
    """Relative errors of gradients that Megatron's schedule accumulates over microbatches.

    The reference is the mean of the gradients of each microbatch alone, where no schedule scales
    the auxiliary loss.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.distributed import models
    from tests.mcore.layer_configs import own_layer_configs

    models.initialize()
    config = models.transformer_config(num_layers=4, is_hybrid_model=True)
    with own_layer_configs():
        model = models.hybrid_model(config, MIXTURE, pattern="*-*-")
    assert not any(layer.config is config for layer in model.decoder.layers)
    batches = [models.batch(seed) for seed in range(MICROBATCHES)]
    for tokens, positions, mask in batches:
        model(tokens, positions, mask, labels=tokens).mean().backward()
    want = {name: p.grad / MICROBATCHES for name, p in model.named_parameters()}
    model.zero_grad()

    def forward_step(batches, model):
        tokens, positions, mask = next(batches)
        losses = model(tokens, positions, mask, labels=tokens)
        return losses, lambda losses: (losses.mean(), {})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=MICROBATCHES,
        seq_length=models.SEQUENCE,
        micro_batch_size=models.BATCH,
        forward_only=False,
    )
    return {name: _error(p.grad, want[name]) for name, p in model.named_parameters()}


def test_auxiliary_losses_are_scaled_if_layers_have_their_own_configs(ranks):
    errors = ranks(accumulated_gradients, 1)[0]
    assert sum(".moh_router" in name for name in errors) == 2
    assert {name: e for name, e in errors.items() if not e < TOLERANCE} == {}


def build_megatrons_stack():
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import ModuleSpec

    from kha_megatron.mcore.hybrid import hybrid_submodules
    from tests.distributed import models
    from tests.mcore.layer_configs import own_layer_configs

    models.initialize()
    config = models.transformer_config(is_hybrid_model=True)
    stack = ModuleSpec(module=HybridStack, submodules=hybrid_submodules(config, MIXTURE))
    with own_layer_configs(), pytest.raises(ConfigError, match="kha_hybrid_stack_spec"):
        HybridModel(config, stack, models.VOCAB, models.SEQUENCE, hybrid_layer_pattern="*-")


def test_auxiliary_losses_in_megatrons_stack_are_refused(ranks):
    """Its layers only have copies of the config, and Megatron scales no loss of a copy."""
    ranks(build_megatrons_stack, 1)


def build_submodules():
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    from kha_megatron.mcore.hybrid import hybrid_submodules
    from tests.distributed import models

    models.initialize()
    config = models.transformer_config(transformer_impl="transformer_engine")
    submodules, stock = hybrid_submodules(config, MIXED), hybrid_stack_spec.submodules
    names = "mamba_layer", "gdn_layer", "mlp_layer", "mtp_block_spec"
    unchanged = [getattr(submodules, name) is getattr(stock, name) for name in names]
    return unchanged, submodules.attention_layer.submodules.self_attention.module.__name__


@pytest.mark.te
def test_layers_next_to_kha_are_megatrons(ranks_with_engine):
    assert ranks_with_engine(build_submodules, 1)[0] == ([True] * 4, "KHASelfAttention")


def fused_attention_classes():
    """Return the class of each latent attention in a decoder and in multi-token prediction."""
    from megatron.core.transformer.attention import Attention

    from tests.distributed import models

    models.initialize()
    config = models.transformer_config(
        num_layers=2,
        is_hybrid_model=True,
        multi_latent_attention=True,
        mla_down_proj_fusion=True,
        mtp_num_layers=1,
        hidden_size=64,
        transformer_impl="transformer_engine",
    )
    kha = HeadsConfig(Knock(value="linear"))
    model = models.hybrid_model(config, kha, pattern="+-/+-")
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    return [(type(attention).__name__, attention.kha == kha) for attention in attentions]


@pytest.mark.te
def test_latent_attention_is_fused_in_multi_token_prediction(ranks_with_engine):
    """Megatron overwrites the attention class in the layer specs of multi-token prediction."""
    fused = ("KHAFusedMLASelfAttention", True)
    assert ranks_with_engine(fused_attention_classes, 1)[0] == [fused, fused]


def build_local_fused_prediction():
    from tests.distributed import models

    models.initialize()
    latent = {"multi_latent_attention": True, "mla_down_proj_fusion": True}
    config = models.transformer_config(mtp_num_layers=1, is_hybrid_model=True, **latent)
    with pytest.raises(ConfigError, match="requires --transformer-impl transformer_engine"):
        models.hybrid_model(config, HeadsConfig(Knock(value="linear")), pattern="+-/+-")


def test_fused_latent_attention_in_multi_token_prediction_requires_te(ranks):
    ranks(build_local_fused_prediction, 1)


def latent_frequencies():
    from argparse import Namespace

    from kha_megatron.mcore.patches import scale_rope
    from tests.distributed import models

    models.initialize()
    latent = {"multi_latent_attention": True}
    scale_rope(Namespace(use_rope_scaling=True, rope_scaling_factor=8.0, **latent))
    config = models.transformer_config(rotary_base=10**9, **latent)
    return models.attention(
        config, HeadsConfig(Knock(value="linear"))
    ).rotary_pos_emb.inv_freq.tolist()


def test_latent_attention_ignores_rope_scaling(ranks):
    (found,) = ranks(latent_frequencies, 1)
    assert found == pytest.approx([1.0, 10**-4.5])  # Llama 3 would divide the second one by 8
