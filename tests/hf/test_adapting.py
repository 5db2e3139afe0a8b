"""What people do to a finished model: another vocabulary, adapters, merging them."""

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.hf.conftest import MOE, SIZES, make_model, tokens

MIXED = {"query": "linear", "key": "gate", "value": "mlp"}
EVERY_LINEAR_OF_ATTENTION = r".*self_attn\.(.*_knock\.)?\w*proj"


@pytest.mark.parametrize("rows", [90, 130])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_vocabulary_can_be_resized(tied, rows, tmp_path):
    model = make_model(MIXED, tie_word_embeddings=tied)
    ids = torch.randint(0, 90, (2, 7))
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(rows, mean_resizing=False)
        after = model(ids).logits
    assert after.shape == (2, 7, rows)
    kept = min(rows, SIZES["vocab_size"])
    # a matrix product of another width may add in another order
    torch.testing.assert_close(after[..., :kept], before[..., :kept], rtol=1e-5, atol=1e-5)
    assert model.config.vocab_size == rows
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, trust_remote_code=False
    )
    assert not any(info.values())
    with torch.no_grad():
        assert torch.equal(deepcopy(loaded)(ids).logits, after)  # see test_saving


@pytest.fixture
def peft():
    return pytest.importorskip("peft", reason="needs peft: make setup installs it")


def train(model, ids, steps=4):
    """The losses of a few steps on one batch."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("moe", [{}, MOE], ids=["dense", "moe"])
def test_lora_on_projections_and_shared_matrices(moe, peft, tmp_path):
    model = make_model(MIXED, **moe)
    model.save_pretrained(tmp_path / "base")
    ids = tokens()
    with torch.no_grad():
        before = model(ids).logits
    settings = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=EVERY_LINEAR_OF_ATTENTION, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, settings)
    # 4 projections, and 1 + 1 + 3 shared matrices, in 3 layers
    assert len(adapted.targeted_module_names) == 3 * (4 + 5)
    with torch.no_grad():
        assert torch.equal(adapted(ids).logits, before), "an adapter starts as a no-op"

    losses = train(adapted.train(), ids)
    assert losses[-1] < 0.9 * losses[0]
    grads = {n: p.grad for n, p in adapted.named_parameters() if "_knock" in n and "lora_B" in n}
    assert len(grads) == 3 * 5
    assert all(grad.abs().max() > 0 for grad in grads.values())
    with torch.no_grad():
        trained = adapted.eval()(ids).logits
    assert (trained - before).abs().max() > 0.1

    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", trust_remote_code=False)
    loaded = peft.PeftModel.from_pretrained(deepcopy(base), tmp_path / "adapter").eval()
    merged = deepcopy(loaded).merge_and_unload()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trained)
        # one matrix instead of two in a row rounds differently
        torch.testing.assert_close(merged(ids).logits, trained, rtol=1e-4, atol=1e-4)

    merged.save_pretrained(tmp_path / "merged")
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", output_loading_info=True, trust_remote_code=False
    )
    assert not any(info.values())
    with torch.no_grad():
        assert torch.equal(deepcopy(again)(ids).logits, merged(ids).logits)
