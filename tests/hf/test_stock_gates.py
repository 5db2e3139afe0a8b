"""Gates of stock classes, against the multiplication in each one's own forward."""

from contextlib import ExitStack

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, Qwen3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from kha_megatron.announcements import forget
from kha_megatron.errors import ConfigError
from kha_megatron.hf.instruments import STOCK_GATES, measure
from tests.hf.conftest import SIZES, tokens

FULL = {"layer_types": ["full_attention"] * 3}
SPARSE = {"moe_intermediate_size": 14, "num_experts_per_tok": 2}
ROUTED = SPARSE | {"n_routed_experts": 4}
EXPERTS = SPARSE | {"num_experts": 4}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 9}
LATENT = {
    "q_lora_rank": 9,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 6,
}
CHOSEN = LATENT | {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
"""Attention to four tokens that an indexer chooses."""
ONES = {"n_group": 1, "topk_group": 1}
SETTINGS = {
    "qwen3_next": FULL | {"mlp_only_layers": [0, 1, 2]},
    "qwen3_5_text": FULL,
    "qwen3_5_moe_text": FULL | SHARED,
    "qwen4_exp_text": FULL
    | SHARED
    | {
        "hc_lowrank": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 10,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "axk2": CHOSEN | ROUTED,
    "lfm3": FULL | {"use_sandwich_norm": False},
    "step3p5": FULL | SPARSE | {"num_local_experts": 4, "share_expert_dim": 9, "sliding_window": 8},
    "bailing_hybrid": LATENT
    | SPARSE
    | ONES
    | {"num_local_experts": 4, "layer_types": ["linear_attention"] + ["full_attention"] * 2},
    "dots3_note_text": CHOSEN
    | ROUTED
    | {"use_dsa": True, "use_sliding_window": False, "shared_experts_intermediate_size": 9},
    "laguna": FULL | SHARED,
    "afmoe": EXPERTS | {"layer_types": ["sliding_attention"] + ["full_attention"] * 2},
    "hy_v4": CHOSEN | ROUTED,
    "inkling2_text": ROUTED
    | {
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 3,
        "swa_head_dim": 10,
        "d_rel": 4,
        "rel_extent": 8,
        "sliding_window_size": 8,
        "unpadded_vocab_size": 97,
    },
    "muse_glimmer_text": FULL | {"hidden_size": 24},
    "muse_spark_text": FULL
    | SPARSE
    | {"num_local_experts": 4, "moe_hidden_size": 12, "hidden_size": 24},
    "beam": FULL | EXPERTS | ONES,
}
NOT_SINKS = {"qwen4_exp_text", "axk2", "dots3_note_text", "hy_v4", "inkling2_text"}
"""Those that choose tokens, or have sinks of their own."""


def build(kind):
    """A random model of a class; of those that transformers only has with an encoder of pictures,
    the text model."""
    given = SIZES | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | SETTINGS[kind]
    make = (AutoModelForCausalLM if kind in CAUSAL else AutoModel).from_config
    if kind == "step3p5":
        from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

        config, make = Step3p7TextModel.config_class(**given), Step3p7TextModel._from_config
    elif kind in CONFIG_MAPPING:
        config = CONFIG_MAPPING[kind](**given)
    else:
        pytest.skip(f"this transformers has no {kind}")
    torch.manual_seed(1)
    # torch's grouped product takes no rows of 14 features
    model = make(config, experts_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "gate_bias" in name:
            torch.nn.init.normal_(parameter)
        elif "gate_proj" in name or "g_proj" in name or "q_gate" in name or "q_proj" in name:
            parameter.data *= 3  # wide enough that some gates are shut
    return model


class Multiplications(TorchFunctionMode):
    """Remembers each product of which a factor came from a sigmoid or softplus."""

    def __init__(self):
        super().__init__()
        self.activated, self.factors = {}, {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("sigmoid", "softplus"):
            self.activated[place(result)] = result  # kept, so that its place is nobody else's
        elif name in ("mul", "__mul__", "__rmul__"):
            for factor in args:
                if isinstance(factor, torch.Tensor) and place(factor) in self.activated:
                    self.factors[place(result)] = factor, result
        return result


def place(tensor):
    return tensor.untyped_storage().data_ptr()


def multiplied(model, ids):
    """By layer, what attention's output was multiplied by; None where there is no attention."""
    layers, found = model.get_decoder().layers, {}
    with torch.no_grad(), Multiplications() as seen, ExitStack() as hooks:
        for number, layer in enumerate(layers):
            attention = getattr(layer, "self_attn", None)
            if hasattr(attention, "num_key_value_groups"):

                def hear(_, given, number=number):
                    found[number], _ = seen.factors[place(given[0])]

                hooks.enter_context(attention.o_proj.register_forward_pre_hook(hear))
        logits = model(ids, use_cache=False)[0]
    return [found.get(number) for number in range(len(layers))], logits


@pytest.mark.parametrize("kind", STOCK_GATES)
def test_figures_are_those_of_the_gate_that_multiplies(kind):
    model, ids = build(kind), tokens(1, 9)
    gates, logits = multiplied(model, ids)
    handed = []
    model.register_forward_hook(lambda _, given, result: handed.append(result[0]))
    found = measure(model, ids)
    torch.testing.assert_close(handed[0], logits, rtol=0, atol=0)  # the same model
    assert [gate is not None for gate in gates].count(True) >= 2
    for figures, gate in zip(found, gates, strict=True):
        if gate is None:
            assert not figures.figures
            continue
        assert 0 < (gate < 0.1).float().mean() < 1
        assert figures.figures["gate-score/output"] == pytest.approx(gate.mean().item(), rel=1e-5)
        shut = (gate < 0.1).float().mean().item()
        assert figures.figures["gate-shut/output"] == pytest.approx(shut, rel=1e-5)
        assert bool(figures.sinks) == (kind not in NOT_SINKS)


def test_a_gate_that_is_not_known_is_named(capsys):
    forget()
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES))
    model.model.layers[1].self_attn.gate_proj = torch.nn.Linear(22, 60)
    found = measure(model, tokens(1, 9))
    assert not any(figures.figures for figures in found)
    said = "gate_proj of Qwen3Attention is not measured: what qwen3 does with it is not known"
    assert said in capsys.readouterr().err


def test_layers_that_text_passes_in_turns_are_refused():
    config = CONFIG_MAPPING["hrm_text"](**SIZES | {"hidden_size": 24})
    with pytest.raises(ConfigError, match="hrm_text has no list of layers that text passes once"):
        measure(AutoModelForCausalLM.from_config(config).eval(), tokens(1, 9))
