"""Decode with a cache in every attention class, with this package and with the exported code."""

import os
import subprocess
import sys

import pytest
import torch
import transformers
from packaging.version import Version

from tests.hf.conftest import HIDE_PACKAGE, load, tokens
from tests.hf.test_cache import CLASSES
from tests.hf.test_uses import model_of

pytestmark = pytest.mark.versions
exported_code = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.10"),
    reason="exported code needs transformers 5.10",
)

# Decodes every model in a directory, in a process where kha_megatron cannot be imported.
DECODE = (
    HIDE_PACKAGE
    + """
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
for directory in sorted(Path(sys.argv[1]).iterdir()):
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True).eval()
    assert type(model).__module__.split(".")[0] == "transformers_modules"
    ids = torch.load(directory / "ids.pt")
    with torch.no_grad():
        start = model(ids[:, :4], use_cache=True)
        end = model(ids[:, 4:], past_key_values=start.past_key_values, use_cache=True)
    torch.save(torch.cat([start.logits, end.logits], 1), directory / "decoded.pt")
"""
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Save a model of each class. Return the directory, and each model's whole logits."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models") / "saved"
    whole = {}
    for name in CLASSES:
        model = model_of(name)
        ids = tokens()
        model.save_pretrained(root / name)
        torch.save(ids, root / name / "ids.pt")
        with torch.no_grad():
            whole[name] = model(ids, use_cache=False).logits
    return root, whole


def check(decoded, whole):
    assert whole.std(dim=1).mean() > 0.3, "similar logits prove nothing"
    torch.testing.assert_close(decoded, whole, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", CLASSES)
def test_decoding_with_this_package(models, name):
    root, whole = models
    model = load(root / name)
    ids = torch.load(root / name / "ids.pt")
    with torch.no_grad():
        start = model(ids[:, :4], use_cache=True)
        end = model(
            ids[:, 4:],
            past_key_values=start.past_key_values,
            use_cache=True,
        )
    check(torch.cat([start.logits, end.logits], 1), whole[name])


def decode_with_exported_code(root, cache):
    """Write the logits of all models in a directory to ``decoded.pt``. See ``DECODE``."""
    subprocess.run(
        [sys.executable, "-c", DECODE, root],
        check=True,
        cwd=root,
        env={**os.environ, "HF_MODULES_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
    )


@exported_code
def test_decoding_with_exported_code(models, tmp_path):
    root, whole = models
    decode_with_exported_code(root, tmp_path / "cache")
    for name in CLASSES:
        check(torch.load(root / name / "decoded.pt"), whole[name])
