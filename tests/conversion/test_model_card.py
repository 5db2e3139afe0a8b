"""Write model cards and tokenizers."""

import json
import shutil

import pytest
import yaml
from transformers import AutoTokenizer, GenerationConfig

from kha_megatron.conversion import to_hf
from kha_megatron.conversion.tokenizer_files import TokenizerFiles
from kha_megatron.hf import KHAModelConfig
from tests.conversion.models import SIZES, make


@pytest.fixture
def knocked(tokenizer, tmp_path):
    config = KHAModelConfig(
        **SIZES | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
        kha_value="linear",
    )
    make(config).save_pretrained(tmp_path / "base")
    shutil.copytree(tokenizer, tmp_path / "base", dirs_exist_ok=True)
    return tmp_path / "base"


def test_the_card_of_a_fold(knocked, tmp_path):
    written = to_hf.plan_export(knocked, fold=True).write(tmp_path / "my model")
    card = (tmp_path / "my model" / "README.md").read_text()
    assert "\n# license:" in card  # left to the user
    assert "\nlicense:" not in card
    assert f"\n# qwen3 model with {written.parameters:,} parameters\n" in card
    assert str(tmp_path) not in card  # nobody else's business
    assert "after folding `value=linear` into the projections" in card
    assert "import kha_megatron" not in card
    assert "vllm serve ." in card
    assert "base_model" not in card


def test_the_header_of_a_hostile_directory(knocked, tmp_path):
    hostile = knocked.rename(tmp_path / "a`` [x](y)\n---\nlicense: mit\n<b>{0}`")
    config = json.loads((hostile / "config.json").read_text())
    for base, expected in (("Org/Model-1.5", "Org/Model-1.5"), ('a/b"\nlicense: mit', None)):
        (hostile / "config.json").write_text(json.dumps(config | {"_name_or_path": base}))
        target = tmp_path / f"{expected is None}"
        to_hf.plan_export(hostile).write(target)
        _, header, text = (target / "README.md").read_text().split("---\n", 2)
        parsed = yaml.safe_load(header)
        assert (parsed["library_name"], parsed.get("base_model")) == ("transformers", expected)
        assert "license" not in parsed
        assert "model ``` a`` [x](y)�---�license: mit�<b>{0}` ``` with kha_megatron" in text


def test_the_card_of_a_kha_model(knocked, tmp_path):
    to_hf.plan_export(knocked).write(tmp_path / "again")
    card = (tmp_path / "again" / "README.md").read_text()
    assert ", including 128 in `knock`\n" in card  # one 8x8 matrix in each of two layers
    assert "import kha_megatron.hf" in card
    assert "target_modules=['k_proj', 'o_proj', 'q_proj', 'v_proj'])" in card
    assert "pip install" not in card  # the package name is not registered on any index
    assert "vllm serve ." in card
    make(KHAModelConfig(**SIZES, kha_value="linear", kha_talking={})).save_pretrained(knocked)
    to_hf.plan_export(knocked).write(tmp_path / "talking")
    card = (tmp_path / "talking" / "README.md").read_text()
    assert "vLLM does not support kha_talking" in card
    assert "vllm serve" not in card


def test_a_padding_token_is_added(tokenizer, tmp_path):
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    loaded.pad_token = None
    files = TokenizerFiles({"eos_token_id": 49, "pad_token_id": None}, "run", loaded)
    files.write(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token == "<end>"
    assert GenerationConfig.from_pretrained(tmp_path).pad_token_id == loaded.eos_token_id
    assert files.token_ids["pad_token_id"] is None
