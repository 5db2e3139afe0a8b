"""`kha` models in verl: built and trained by its Megatron engine, and exported for inference.

verl is not part of any environment of ours. After ``make test-bridge``, install it and repeat the
tests::

    uv pip install --python .venv-bridge/bin/python --no-deps verl==0.9.1
    uv pip install --python .venv-bridge/bin/python ray 'tensordict<=0.10' codetiming
    .venv-bridge/bin/python -m pytest tests/bridge/test_verl.py
"""

import sys
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from kha_megatron.hf import KHAForCausalLM
from tests.bridge import verl_actor
from tests.bridge.models import SIZES, save

pytestmark = pytest.mark.skipif(
    find_spec("verl") is None,
    reason="NOT TESTED: needs verl 0.9.1, see tests/bridge/test_verl.py.",
)

REGISTER = "kha_megatron.bridge.register"
REGISTER_HYBRID = "kha_megatron.bridge.register_hybrid"
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}


def train(folder, target, external_lib, layout):
    """Export a model, train it, export it again and save it."""
    from kha_megatron.bridge.model_bridge import KHABridge

    actor = verl_actor.build(folder, external_lib, **layout)
    rank = dist.get_rank()
    save_file(verl_actor.export(actor), f"{target}/before-{rank}.safetensors")
    batch = verl_actor.make_batch(SIZES["vocab_size"])
    batch["old_log_probs"] = verl_actor.compute_log_probs(actor, batch)
    verl_actor.train(actor, batch)
    save_file(verl_actor.export(actor), f"{target}/after-{rank}.safetensors")
    log_probs = verl_actor.compute_log_probs(actor, batch)
    actor.save_checkpoint(f"{target}/checkpoint", global_step=1)
    # Ranks run many cases, and this module applies to all of them.
    del sys.modules[external_lib]
    KHABridge.builds_hybrid = False
    return type(actor.provider).__name__, log_probs.numpy()


def hf_log_probs(folder):
    """Return the log probabilities of the responses that transformers computes."""
    model = KHAForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = verl_actor.make_batch(SIZES["vocab_size"])
    log_probs = torch.zeros(batch["responses"].shape)
    response_lengths = batch["response_mask"].sum(1).tolist()
    for row, tokens in enumerate(batch["input_ids"].unbind()):
        length = response_lengths[row]
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        log_probs[row, :length] = chosen[-length:]
    return log_probs


@pytest.mark.parametrize(
    ("name", "external_lib", "n", "layout"),
    [
        ("dense", REGISTER, 1, {}),
        ("dense", REGISTER_HYBRID, 1, {}),
        ("gated", REGISTER, 2, TP2),
        ("moh", REGISTER_HYBRID, 2, TP2),
        ("tied", REGISTER_HYBRID, 2, PP2),
        ("sigmoid", REGISTER, 2, EP2),
    ],
    ids=str,
)
def test_verl_trains_and_exports(bridge_ranks, tmp_path, name, external_lib, n, layout):
    source = tmp_path / "in"
    save(source, name, torch.bfloat16)  # verl trains in bfloat16 or float16
    results = bridge_ranks(train, n, str(source), str(tmp_path), external_lib, layout)
    is_hybrid = external_lib == REGISTER_HYBRID
    saved_folder = tmp_path / "checkpoint" / "model" / "huggingface"
    original = load_file(source / "model.safetensors")
    saved = load_file(saved_folder / "model.safetensors")
    for rank, (provider, _) in enumerate(results):
        assert provider == ("KHAHybridModelProvider" if is_hybrid else "KHAModelProvider")
        # Each rank exports all tensors.
        assert_equal(load_file(tmp_path / f"before-{rank}.safetensors"), original)
        assert_equal(load_file(tmp_path / f"after-{rank}.safetensors"), saved)
    unchanged = set()
    for key, tensor in original.items():
        if torch.equal(tensor, saved[key]):
            unchanged.add(key)
    # An expert that no token selects is not trained.
    assert all(".experts." in key for key in unchanged)
    expected = hf_log_probs(saved_folder)
    assert (hf_log_probs(source) - expected).abs().max() > 1
    for _, log_probs in results:
        # Megatron computes in bfloat16, transformers in float32.
        torch.testing.assert_close(torch.from_numpy(log_probs), expected, rtol=0, atol=0.1)


def assert_equal(exported, stored):
    assert exported.keys() == stored.keys()
    for key, tensor in stored.items():
        assert exported[key].dtype == tensor.dtype
        assert torch.equal(exported[key], tensor), key
