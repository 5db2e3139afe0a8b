"""Verify conversions and notice mutations."""

import json
import math
import shutil

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from kha_megatron.conversion import megatron_model, to_hf
from kha_megatron.conversion.megatron_model import Outputs
from kha_megatron.conversion.verify import LOGIT_TOLERANCE, Pair, compare_outputs
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.hf import KHAModelConfig
from tests.conversion.models import CONFIGS, KHA_MOE, SIZES, edit_config, edit_tensors, make

LAYER = "model.layers.1."
EXPERT = LAYER + "mlp.experts.{}.{}_proj.weight"


def verify(one, other, **options):
    return Pair.open(one, other).compare(**options)


@pytest.fixture(scope="module")
def converted(sparse, tmp_path_factory):
    """Return a checkpoint and its converted directory."""
    folder = tmp_path_factory.mktemp("converted") / "hf"
    to_hf.plan_export(sparse[0]).write(folder)
    return sparse[0], folder


@pytest.fixture(scope="module")
def theirs(converted):
    """Return a verification, and the outputs of its only run of Megatron."""
    kept = []
    original = megatron_model.run_megatron
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            megatron_model,
            "run_megatron",
            lambda *args, **options: kept.append(original(*args, **options)) or kept[0],
        )
        return verify(*converted), kept[0]


def _swap(*pairs):
    def mutate(tensors):
        for one, other in pairs:
            tensors[one], tensors[other] = tensors[other], tensors[one]

    return mutate


def _change(name, function):
    return lambda tensors: tensors.update({name: function(tensors[name]).contiguous()})


MATRICES = ("gate", "up", "down")
SHARED = LAYER + "mlp.shared_experts.{}_proj.weight"
MUTATIONS = {
    "two experts swapped": _swap(*((EXPERT.format(0, m), EXPERT.format(3, m)) for m in MATRICES)),
    "gate and up swapped": _swap((SHARED.format("gate"), SHARED.format("up"))),
    "linear transposed": _change(LAYER + "self_attn.q_knock.proj.weight", torch.t),
    "mlp up transposed": _change(LAYER + "self_attn.v_knock.up_proj.weight", torch.t),
    "expert bias lost": _change(LAYER + "mlp.gate.e_score_correction_bias", torch.zeros_like),
    "key heads permuted": _change(LAYER + "self_attn.k_proj.weight", lambda w: w.roll(6, dims=0)),
    "query heads permuted": _change(LAYER + "self_attn.q_proj.weight", lambda w: w.roll(6, dims=0)),
}


def _mutated(folder, tmp_path, mutate):
    copy = shutil.copytree(folder, tmp_path / "mutated")
    (copy / "manifest.json").unlink()
    edit_tensors(copy, mutate)
    return copy


@pytest.fixture
def rerun(theirs, monkeypatch):
    """Verify without running Megatron again."""
    monkeypatch.setattr(megatron_model, "run_megatron", lambda *args, **options: theirs[1])


@pytest.mark.fast
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_noticed(converted, theirs, rerun, tmp_path, mutation):
    assert theirs[0].agrees
    checkpoint, folder = converted
    changed = verify(checkpoint, _mutated(folder, tmp_path, MUTATIONS[mutation]))
    assert not changed.agrees
    assert 1 <= len(changed.tensors.different) <= 6
    assert changed.logits.max_difference > 3 * LOGIT_TOLERANCE
    assert changed.logits.kl > theirs[0].logits.kl
    place = changed.tensors.different[0].split(".")
    layer = int(place[2]) if place[1] == "layers" else None
    assert changed.logits.first_layer == layer


def test_folded_and_upcycled_models_agree(tmp_path):
    linear = KHAModelConfig(**SIZES, kha_query="linear", kha_value="linear")
    make(linear).save_pretrained(tmp_path / "kha")
    to_hf.plan_export(tmp_path / "kha", fold=True).write(tmp_path / "qwen3")
    assert verify(tmp_path / "kha", tmp_path / "qwen3").agrees
    to_hf.plan_export(tmp_path / "qwen3", upcycle=HeadsConfig(Knock(value="mlp"))).write(
        tmp_path / "upcycled"
    )
    found = verify(tmp_path / "qwen3", tmp_path / "upcycled")
    assert found.agrees
    assert (found.tensors.remark, found.logits.max_difference) == ("the first upcycled", 0.0)
    found = verify(tmp_path / "kha", tmp_path / "upcycled")  # a linear layer is no MLP
    assert not found.agrees
    assert found.tensors.missing
    assert found.tensors.unexpected


@pytest.mark.parametrize("name", ["qwen3", "kha, gta", "qwen3_5_text"])
def test_decoding_is_compared_with_one_pass(run, tmp_path, monkeypatch, name):
    folder = tmp_path / "model"
    make(CONFIGS[name]).save_pretrained(folder)
    code, stdout, _ = run("verify", folder, folder, "--json")
    decoding = json.loads(stdout)["decoding"]
    assert code == 0
    assert [entry["path"] for entry in decoding] == [str(folder)] * 2
    assert all(0 < entry["max_difference"] < LOGIT_TOLERANCE for entry in decoding)
    update = DynamicLayer.update

    def forget(layer, keys, values, *args, **settings):
        """Keep only the values of new tokens, as if the others had been lost."""
        found_keys, found_values = update(layer, keys, values, *args, **settings)
        found_values = found_values.clone()
        found_values[..., : -values.shape[-2], :] = 0
        return found_keys, found_values

    monkeypatch.setattr(DynamicLayer, "update", forget)
    code, stdout, stderr = run("verify", folder, folder, "--json")
    report = json.loads(stdout)
    assert (code, report["agrees"], report["logits"]["max_difference"]) == (1, False, 0.0)
    assert report["decoding"][0]["max_difference"] > 0.01
    assert "different decoding with a cache" in " ".join(stderr.split())


def test_compare():
    theirs = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]]))
    ours = torch.log(torch.tensor([[[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]]]))
    agreement = compare_outputs(Outputs(theirs, []), Outputs(ours, []))
    assert agreement.max_difference == pytest.approx(math.log(2))
    assert agreement.mean_difference == pytest.approx(2 * math.log(2) / 6)
    assert agreement.kl == pytest.approx(0.25 * math.log(2) / 2)  # of two positions, one differs
    assert (agreement.argmax, agreement.tokens) == (0.5, 2)
    ours[0, 0, 0] = math.nan
    assert not compare_outputs(Outputs(theirs, []), Outputs(ours, [])).agrees


MOH = {"kha_moh": {"shared": 1, "active": 2, "balance": 0.01}}


@pytest.mark.parametrize(
    ("name", "changes", "settings"),
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}, ["rotary_base"]),
        ("rms_norm_eps", 1e-6, ["layernorm_epsilon"]),
        ("num_experts_per_tok", 3, ["moe_router_topk"]),
        ("routed_scaling_factor", 1.0, ["moe_router_topk_scaling_factor"]),
        ("kha_moh", {"shared": 1, "active": 3}, ["kha moh.active"]),
        ("kha_moh", {"shared": 1, "active": 2, "balance": 0.5, "anneal": 9}, []),
        ("max_position_embeddings", 48, []),
        ("initializer_range", 0.5, []),
    ],
)
def test_settings_are_compared_without_logits(run, tmp_path, name, changes, settings):
    make(KHAModelConfig(**KHA_MOE, **MOH)).save_pretrained(tmp_path / "one")
    copy = shutil.copytree(tmp_path / "one", tmp_path / "other")
    edit_config(copy, **{name: changes})
    code, stdout, stderr = run("verify", tmp_path / "one", copy, "--no-logits", "--json")
    told = json.loads(stdout)
    assert [line.rpartition(" against ")[0].rpartition(" ")[0] for line in told["settings"]] == (
        settings
    )
    assert (code, told["agrees"]) == ((1, False) if settings else (0, True))
    assert told["tensors"]["different"] == []
    assert all(f"different settings: {setting}" in " ".join(stderr.split()) for setting in settings)
