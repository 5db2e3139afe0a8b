"""Classification heads against the base model and a linear layer."""

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from kha_megatron.hf import KHAModel
from tests.hf.conftest import MIXED, make_model, tokens

LABELS = 5
MODELS = {"plain": (MIXED, {}), "eager attention only": ({}, {"kha_talking": {}})}
HEADS = {
    "sequence": (AutoModelForSequenceClassification, "KHAForSequenceClassification"),
    "token": (AutoModelForTokenClassification, "KHAForTokenClassification"),
    "question": (AutoModelForQuestionAnswering, "KHAForQuestionAnswering"),
}


def hidden_states(model, ids):
    base = KHAModel.from_pretrained(model)
    with torch.no_grad():
        return base(ids).last_hidden_state


def expected_logits(model, hidden, ids):
    """Compute the logits that transformers documents for each head."""
    if hasattr(model, "qa_outputs"):
        return F.linear(hidden, model.qa_outputs.weight, model.qa_outputs.bias)
    scores = F.linear(hidden, model.score.weight, model.score.bias)
    if type(model).__name__ == "KHAForTokenClassification":
        return scores
    last = (ids != model.config.pad_token_id).int().cumsum(-1).argmax(-1)
    return scores[torch.arange(len(ids)), last]


def logits_of(output):
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)
    return output.logits


@pytest.mark.parametrize("settings", MODELS)
@pytest.mark.parametrize("head", HEADS)
def test_heads_equal_the_base_model_and_a_linear_layer(head, settings, tmp_path):
    kha, sizes = MODELS[settings]
    make_model(kha, pad_token_id=0, **sizes).save_pretrained(tmp_path / "base")
    auto_class, name = HEADS[head]
    model = auto_class.from_pretrained(tmp_path / "base", num_labels=LABELS).eval()
    assert type(model).__name__ == name
    ids = tokens().clamp(min=1)
    ids[0, 5:] = 0  # padding
    with torch.no_grad():
        logits = logits_of(model(ids))
    expected = expected_logits(model, hidden_states(tmp_path / "base", ids), ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "again")
    loaded, info = auto_class.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not any(info.values())
    with torch.no_grad():
        assert torch.equal(logits_of(loaded.eval()(ids)), logits)


def test_heads_train(tmp_path):
    make_model(MIXED, pad_token_id=0).save_pretrained(tmp_path)
    ids = tokens().clamp(min=1)
    labels = {
        "sequence": {"labels": torch.tensor([1, 3])},
        "token": {"labels": ids % LABELS},
        "question": {
            "start_positions": torch.tensor([1, 2]),
            "end_positions": torch.tensor([3, 4]),
        },
    }
    for head, (auto_class, _) in HEADS.items():
        model = auto_class.from_pretrained(tmp_path, num_labels=LABELS)
        model(ids, **labels[head]).loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())


LOAD = """
import sys
sys.modules["kha_megatron"] = None  # cannot be imported
import torch, transformers
ids = torch.load(sys.argv[1] + "/ids.pt")
for name in sys.argv[2:]:
    directory = f"{sys.argv[1]}/{name}"
    model = getattr(transformers, name).from_pretrained(directory, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules")
    with torch.no_grad():
        torch.save(model(ids).to_tuple()[0], directory + "/logits.pt")
"""


def test_exported_code_has_the_heads(tmp_path):
    make_model(MIXED, pad_token_id=0).save_pretrained(tmp_path / "base")
    ids = tokens().clamp(min=1)
    expected = {}
    torch.save(ids, tmp_path / "ids.pt")
    for auto_class, _ in HEADS.values():
        model = auto_class.from_pretrained(tmp_path / "base", num_labels=LABELS).eval()
        model.save_pretrained(tmp_path / auto_class.__name__)
        with torch.no_grad():
            expected[auto_class.__name__] = model(ids).to_tuple()[0]
    subprocess.run(
        [sys.executable, "-c", LOAD, tmp_path, *expected],
        check=True,
        cwd=tmp_path,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
    )
    for name, logits in expected.items():
        found = torch.load(tmp_path / name / "logits.pt")
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
