"""``verify`` sees every change of a written model, and trusts nothing of the conversion."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kha_megatron.conversion import to_hf, verify
from kha_megatron.conversion.verify import TOLERANCE, compare
from kha_megatron.errors import CheckpointError
from kha_megatron.mcore.checkpoint import MegatronCheckpoint
from tests.versions import needs_training_package

LAYER = "model.layers.1."
EXPERT = LAYER + "mlp.experts.{}.{}_proj.weight"


@pytest.fixture(scope="module")
def converted(sparse, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "hf"
    to_hf.convert(to_hf.plan(sparse[0]), folder)
    return MegatronCheckpoint.open(sparse[0]), folder


@pytest.fixture(scope="module")
def theirs(converted):
    """Megatron's logits for the tokens that ``verify`` chooses, from one run of it."""
    needs_training_package()
    kept = []
    original = verify.megatron_logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            verify, "megatron_logits", lambda *args: kept.append(original(*args)) or kept[0]
        )
        return verify.verify(*converted, None), kept[0]


def test_a_good_conversion_agrees(theirs):
    agreement, logits = theirs
    assert agreement.max_difference < 1e-5 < TOLERANCE
    assert 0 <= agreement.mean_difference <= agreement.max_difference
    assert abs(agreement.kl) < 1e-9
    assert agreement.argmax == 1.0
    assert agreement.tokens == logits[..., 0].numel() == 2 * 12  # max_position_embeddings is 12
    assert logits.std(dim=(0, 1)).mean() > 0.3


def _swap(tensors, one, other):
    tensors[one], tensors[other] = tensors[other], tensors[one]


def _swap_experts(tensors):
    for matrix in ("gate", "up", "down"):
        _swap(tensors, EXPERT.format(0, matrix), EXPERT.format(3, matrix))


def _transpose(name):
    return lambda tensors: tensors.update({name: tensors[name].T.contiguous()})


def _scale(name, factor):
    return lambda tensors: tensors.update({name: tensors[name] * factor})


def _swap_gate_and_up(tensors):
    _swap(
        tensors,
        LAYER + "mlp.shared_experts.gate_proj.weight",
        LAYER + "mlp.shared_experts.up_proj.weight",
    )


def _roll_heads(name):
    """Give each head the weights of its neighbour."""
    return lambda tensors: tensors.update({name: tensors[name].roll(6, dims=0)})


MUTATIONS = {
    "two experts swapped": _swap_experts,
    "gate and up swapped": _swap_gate_and_up,
    "linear transposed": _transpose(LAYER + "self_attn.q_knock.proj.weight"),
    "gate transposed": _transpose(LAYER + "self_attn.k_knock.gate_proj.weight"),
    "mlp up transposed": _transpose(LAYER + "self_attn.v_knock.up_proj.weight"),
    "mlp gate transposed": _transpose(LAYER + "self_attn.v_knock.gate_proj.weight"),
    "mlp down transposed": _transpose(LAYER + "self_attn.v_knock.down_proj.weight"),
    "norm 1 % smaller": _scale("model.norm.weight", 0.99),
    "input norm 1 % smaller": _scale("model.layers.0.input_layernorm.weight", 0.99),
    "key norm 1 % smaller": _scale(LAYER + "self_attn.k_norm.weight", 0.99),
    "expert bias lost": _scale(LAYER + "mlp.gate.e_score_correction_bias", 0.0),
    "key heads permuted": _roll_heads(LAYER + "self_attn.k_proj.weight"),
    "query heads permuted": _roll_heads(LAYER + "self_attn.q_proj.weight"),
}


def _mutated(folder, tmp_path, mutate):
    copy = shutil.copytree(folder, tmp_path / "mutated")
    tensors = load_file(copy / "model.safetensors")
    mutate(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_changed_model_is_noticed(converted, theirs, tmp_path, monkeypatch, mutation):
    monkeypatch.setattr(verify, "megatron_logits", lambda *args: theirs[1])
    checkpoint, folder = converted
    changed = verify.verify(checkpoint, _mutated(folder, tmp_path, MUTATIONS[mutation]), None)
    assert changed.max_difference > 3 * TOLERANCE
    assert changed.kl > theirs[0].kl
    assert changed.mean_difference > theirs[0].mean_difference


def test_writing_the_same_again_changes_nothing(converted, theirs, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "megatron_logits", lambda *args: theirs[1])
    checkpoint, folder = converted
    again = verify.verify(checkpoint, _mutated(folder, tmp_path, lambda tensors: None), None)
    assert again == theirs[0]


@pytest.mark.parametrize(
    ("mutate", "message"),
    [
        (lambda tensors: tensors.pop(LAYER + "self_attn.v_knock.up_proj.weight"), "missing_keys"),
        (lambda tensors: tensors.pop(EXPERT.format(4, "down")), "mismatched_keys.*experts"),
        (lambda tensors: tensors.pop("lm_head.weight"), "missing_keys.*lm_head"),
        (lambda tensors: tensors.update(other=torch.ones(3)), "unexpected_keys.*other"),
    ],
)
def test_a_folder_with_other_tensors_is_refused(converted, tmp_path, monkeypatch, mutate, message):
    monkeypatch.setattr(verify, "megatron_logits", None)  # never reached
    checkpoint, folder = converted
    with pytest.raises(CheckpointError, match=rf"mutated does not load completely.*({message})"):
        verify.verify(checkpoint, _mutated(folder, tmp_path, mutate), None)


def test_fewer_layers_in_the_configuration_are_refused(converted, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "megatron_logits", None)
    copy = shutil.copytree(converted[1], tmp_path / "hf")
    config = json.loads((copy / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"unexpected_keys.*model.layers.2"):
        verify.verify(converted[0], copy, None)


def test_compare_is_what_it_says():
    theirs = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]]))
    ours = torch.log(torch.tensor([[[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]]]))
    agreement = compare(ours, theirs)
    assert agreement.max_difference == pytest.approx(math.log(2))
    assert agreement.mean_difference == pytest.approx(2 * math.log(2) / 6)
    assert agreement.kl == pytest.approx(0.25 * math.log(2) / 2)  # of two positions, one differs
    assert (agreement.argmax, agreement.tokens) == (0.5, 2)
    ours[0, 0, 0] = math.nan
    assert not compare(ours, theirs).max_difference < TOLERANCE


def test_memory_is_asked_for_both_models_in_float32(converted, monkeypatch):
    checkpoint, folder = converted
    parameters = sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert verify.needed_bytes(checkpoint) >= 2 * 4 * parameters
    memory = type("Memory", (), {"available": verify.needed_bytes(checkpoint)})
    monkeypatch.setattr(verify.psutil, "virtual_memory", lambda: memory)
    assert not verify.fits_in_memory(checkpoint)
    memory.available += 1
    assert verify.fits_in_memory(checkpoint)
