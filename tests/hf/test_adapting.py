"""Resizing the vocabulary, and LoRA on attention projections and shared matrices."""

import pytest
import torch

from tests.hf.conftest import MIXED, SIZES, load, make_model, tokens


@pytest.mark.parametrize(("tied", "rows"), [(False, 130), (True, 90)], ids=["untied", "tied"])
def test_resizing_the_vocabulary_keeps_the_logits(tied, rows, tmp_path):
    model = make_model(MIXED, tie_word_embeddings=tied)
    ids = torch.randint(0, 90, (2, 7))
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(rows, mean_resizing=False)
        after = model(ids).logits
    assert after.shape == (2, 7, rows)
    common = min(rows, SIZES["vocab_size"])
    # A matrix product of another width may round differently.
    torch.testing.assert_close(
        after[..., :common],
        before[..., :common],
        rtol=1e-5,
        atol=1e-5,
    )
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load(tmp_path)(ids).logits, after)


@pytest.mark.versions
def test_lora_trains_and_merges_on_projections_and_shared_matrices(tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft: make setup installs it")
    model = make_model(MIXED)
    model.save_pretrained(tmp_path / "base")
    ids = tokens()
    with torch.no_grad():
        before = model(ids).logits
    targets = r".*self_attn\.(.*_knock\.)?\w*proj"
    settings = peft.LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, settings)
    # Three layers with 4 projections and 1 + 1 + 3 shared matrices.
    assert len(adapted.targeted_module_names) == 3 * (4 + 5)
    with torch.no_grad():
        assert torch.equal(adapted(ids).logits, before), "an adapter must start as a no-op"

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.3)
    adapted.train()
    for _ in range(3):
        optimizer.zero_grad()
        adapted(ids, labels=ids).loss.backward()
        optimizer.step()
    grads = []
    for name, parameter in adapted.named_parameters():
        if "_knock" in name and "lora_B" in name:
            grads.append(parameter.grad)
    assert len(grads) == 3 * 5
    assert all(grad.abs().max() > 0 for grad in grads)
    with torch.no_grad():
        trained = adapted.eval()(ids).logits
    assert (trained - before).abs().max() > 0.1

    adapted.save_pretrained(tmp_path / "adapter")
    base = load(tmp_path / "base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trained)
        merged = loaded.merge_and_unload()
        # One matrix rounds differently from a product of two.
        torch.testing.assert_close(
            merged(ids).logits,
            trained,
            rtol=1e-4,
            atol=1e-4,
        )


def test_hooks_of_all_matrices_run_without_gradients():
    model = make_model(MIXED)
    called = set()

    def record(name):
        return lambda module, inputs, output: called.add(name)

    matrices = [name for name, _ in model.named_modules() if "_knock." in name]
    assert len(matrices) == 3 * 5
    for name in matrices:
        model.get_submodule(name).register_forward_hook(record(name))
    with torch.no_grad():
        model(tokens())
    assert called == set(matrices)
