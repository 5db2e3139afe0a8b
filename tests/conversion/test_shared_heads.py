"""Convert talking and collaborative heads."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.config import KHAConfig
from kha_megatron.conversion import to_hf, to_megatron
from kha_megatron.conversion.verify import Pair
from kha_megatron.heads import CollaborativeHeads, Gate, TalkingHeads
from kha_megatron.model.recorded import kha_of
from tests.conversion.checkpoints import check_back, save_and_run, tokens

KHAS = {
    "talking": KHAConfig(value="mlp", talking=TalkingHeads(post=False)),
    "collaborative": KHAConfig(
        collaborative=CollaborativeHeads(dim=10), gate=Gate(output="head", value="element")
    ),
}


@pytest.mark.parametrize("case", KHAS)
def test_round_trip(ranks, tmp_path, case):
    folder, kha, layout = tmp_path / "save", KHAS[case], {"tensor_model_parallel_size": 2}
    parts = ranks(save_and_run, 2, str(folder), kha, layout, {"num_layers": 2}, {})
    expected = torch.from_numpy(parts[-1][1])
    assert to_hf.plan(folder).write(tmp_path / "hf").architecture == "kha"
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    with torch.no_grad():
        found = model.eval()(tokens()).logits
    assert expected.std(dim=(0, 1)).mean() > 0.1
    torch.testing.assert_close(found, expected[..., : found.shape[-1]], rtol=0, atol=1e-5)
    assert Pair.open(folder, tmp_path / "hf").verify(logits=False).agrees

    to_megatron.plan(tmp_path / "hf", divisible_by=8).write(tmp_path / "back")
    assert kha_of(MegatronCheckpoint.open(tmp_path / "back")) == kha
    check_back(folder, tmp_path / "back")
