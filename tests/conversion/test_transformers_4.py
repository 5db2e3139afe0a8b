"""Exports of stock architectures in transformers 4.

``transformers_4.json`` has the arguments and defaults of the config classes in 4.57.6. That version
ignores keys that it does not know, and uses the default of an argument that ``config.json`` lacks.
"""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from kha_megatron.conversion import to_hf
from kha_megatron.conversion.hf_configs import from_hf_config
from tests.conversion.fixtures import write_tokenizer
from tests.conversion.models import CONFIGS, make

DEFAULTS = json.loads((Path(__file__).parent / "transformers_4.json").read_text())["defaults"]
STOCK = [name for name, config in CONFIGS.items() if config.model_type in DEFAULTS]
NO_EFFECT = {
    "initializer_range",
    "max_window_layers",
    "use_sliding_window",
    "output_router_logits",
    "router_aux_loss_coef",
    "pretraining_tp",
    *("bos_token_id", "eos_token_id", "pad_token_id"),  # generation_config.json has precedence
}


@pytest.fixture(params=STOCK)
def export(request, tmp_path):
    source = CONFIGS[request.param]
    make(source).save_pretrained(tmp_path / "source")
    write_tokenizer(tmp_path / "tokenizer", 51)
    for file in (tmp_path / "tokenizer").iterdir():
        file.rename(tmp_path / "source" / file.name)
    to_hf.plan_export(tmp_path / "source", architecture=source.model_type).write(tmp_path / "out")
    return source, tmp_path / "out"


def test_every_argument_of_4_has_its_value(export):
    source, folder = export
    written = json.loads((folder / "config.json").read_text())
    rope = source.rope_parameters
    moved = ("rope_theta", "partial_rotary_factor")
    scaling = {key: value for key, value in rope.items() if key not in moved}
    expected = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "partial_rotary_factor": rope.get("partial_rotary_factor") or 1.0,
    }
    for name, default in DEFAULTS[source.model_type].items():
        if name in NO_EFFECT:
            continue
        value = expected[name] if name in expected else getattr(source, name)
        assert written.get(name, default) == value, name
    assert written["torch_dtype"] == "float32"


def test_version_5_reads_the_same_config_with_and_without_these_keys(export):
    source, folder = export
    config = AutoConfig.from_pretrained(folder)
    assert config.rope_parameters["rope_theta"] == source.rope_parameters["rope_theta"]
    written = json.loads((folder / "config.json").read_text())
    without = {key: value for key, value in written.items() if key in config.to_dict()}
    assert "rope_theta" not in without
    assert from_hf_config(written) == from_hf_config(without)


def test_tokenizer_class_exists_in_both_versions(export):
    _, folder = export
    source = AutoTokenizer.from_pretrained(folder.parent / "source")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not isinstance(settings.get("extra_special_tokens"), list)  # 4.57 expects a dictionary
    assert AutoTokenizer.from_pretrained(folder)("w3 <end>") == source("w3 <end>")
