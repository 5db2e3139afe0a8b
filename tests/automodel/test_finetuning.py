"""Fine-tune exported models on two ranks with NeMo AutoModel, and repeat it with transformers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models
from torch import nn
from transformers import PreTrainedTokenizerFast

from tests.hf.conftest import load, make_config, make_model
from tests.ports import free_port

pytest.importorskip(
    "nemo_automodel",
    reason="NOT TESTED: needs NeMo AutoModel. Run `make test-automodel`.",
)
pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
STEPS = 5
LEARNING_RATE = 1e-2
TOLERANCE = 1e-5
"""For losses in float32 and gradients relative to the largest one. Sums have another order."""
FLOAT32 = {
    "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
    "param_dtype": "float32",
    "reduce_dtype": "float32",
    "output_dtype": "float32",
}
RECIPE = {
    "step_scheduler": {
        "global_batch_size": 8,
        "local_batch_size": 2,
        "max_steps": STEPS,
        "num_epochs": 5,
    },
    "dist_env": {"backend": "gloo", "timeout_minutes": 10},
    "model": {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "attn_implementation": "sdpa",
    },
    "checkpoint": {
        "enabled": True,
        "model_save_format": "safetensors",
        "save_consolidated": True,
    },
    "distributed": {"strategy": "fsdp2", "mp_policy": FLOAT32},
    "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
    "dataset": {
        "_target_": "nemo_automodel.components.datasets.llm.mock.build_unpacked_dataset",
        "num_sentences": 64,
        "vocab_size": 90,
        "max_sentence_len": 40,
    },
    "dataloader": {
        "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
        "collate_fn": "nemo_automodel.components.datasets.utils.default_collater",
        "shuffle": False,
    },
    "optimizer": {
        "_target_": "torch.optim.AdamW",
        "lr": LEARNING_RATE,
        "weight_decay": 0.0,
    },
}
KHA = {"query": "linear", "key": "gate", "value": "mlp"}


def save_base(directory: Path, **sizes) -> None:
    """Write a model and a tokenizer, which the recipe requires."""
    make_model(KHA, pad_token_id=0, eos_token_id=1, **sizes).save_pretrained(directory)
    vocabulary = {"<pad>": 0, "<eos>": 1}
    for token in range(2, 90):
        vocabulary[f"tok_{token}"] = token
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    tokenizer.save_pretrained(directory)


def fine_tune(
    base: Path,
    results: Path,
    tp_size: int = 1,
    registered: bool = True,
) -> list[dict]:
    """Run the recipe on two ranks. Return the record of each rank."""
    recipe = {
        **RECIPE,
        "model": RECIPE["model"] | {"pretrained_model_name_or_path": str(base)},
        "checkpoint": RECIPE["checkpoint"] | {"checkpoint_dir": str(results / "checkpoints")},
        "distributed": RECIPE["distributed"] | {"tp_size": tp_size},
    }
    if not registered:
        recipe["model"]["trust_remote_code"] = True
    config = results / "recipe.yaml"
    config.write_text(yaml.safe_dump(recipe))
    launcher = ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    program = ["-m", "tests.automodel.rank", str(results)]
    if registered:
        program.append("--registered")
    subprocess.run(
        [sys.executable, "-m", *launcher, *program, "-c", str(config)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
    )
    return [torch.load(results / f"rank{rank}.pt") for rank in range(2)]


def repeat_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[dict],
) -> tuple[float, dict]:
    """Take one step in this process. Return the loss and the clipped gradients."""
    label_count = sum((batch["labels"] != -100).sum() for batch in batches)
    step_loss = 0.0
    optimizer.zero_grad()
    for batch in batches:
        inputs = {name: batch[name] for name in batch if name != "labels"}
        logits = model(**inputs).logits
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1),
            batch["labels"].flatten(),
            reduction="sum",
        )
        loss = loss / label_count
        loss.backward()
        step_loss += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return step_loss, gradients


def assert_same_training(base: Path, ranks: list[dict], tp_size: int) -> None:
    """Check that one process with transformers takes the same steps."""
    model = load(base)
    initial_weights = dict(model.named_parameters())
    torch.testing.assert_close(
        ranks[0]["initial_weights"],
        {name: weight.detach().clone() for name, weight in initial_weights.items()},
        rtol=0,
        atol=0,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(STEPS):
        batches = ranks[0]["batches"][step]
        if tp_size == 1:
            batches = batches + ranks[1]["batches"][step]
        loss, gradients = repeat_step(model, optimizer, batches)
        assert ranks[0]["losses"][step] == pytest.approx(loss, rel=TOLERANCE)
        if step == 0:
            for name, gradient in gradients.items():
                difference = (ranks[0]["gradients"][0][name] - gradient).abs().max()
                assert difference <= TOLERANCE * gradient.abs().max(), name


@pytest.mark.parametrize(
    ("registered", "tp_size"),
    [(True, 1), (False, 1), (True, 2)],
    ids=["registered", "remote code", "tensor parallel"],
)
def test_training_equals_transformers(registered, tp_size, tmp_path):
    base = tmp_path / "base"
    sizes = {}
    if tp_size == 2:
        sizes = {"num_key_value_heads": 2, "intermediate_size": 36, "vocab_size": 98}
    save_base(base, **sizes)
    results = tmp_path / "results"
    results.mkdir()

    ranks = fine_tune(base, results, tp_size, registered)

    own_module = "kha_megatron.hf.modeling_kha"
    assert (ranks[0]["module"] == own_module) == registered
    assert_same_training(base, ranks, tp_size)
    losses = ranks[0]["losses"]
    assert losses[-1] < losses[0]
    trained = ranks[0]["weights"]
    torch.testing.assert_close(ranks[1]["weights"], trained, rtol=0, atol=0)
    matrices = [name for name in trained if "_knock." in name]
    assert len(matrices) == 5 * make_config().num_hidden_layers
    for name in matrices:
        assert not torch.equal(trained[name], ranks[0]["initial_weights"][name]), name
        for gradients in ranks[0]["gradients"]:
            assert gradients[name].any(), name

    (checkpoint,) = results.glob("checkpoints/epoch_*/model/consolidated")
    loaded = {name: weight.detach() for name, weight in load(checkpoint).named_parameters()}
    torch.testing.assert_close(loaded, trained, rtol=0, atol=0)
    shutil.rmtree(results)


def test_unregistered_architecture_is_an_error(tmp_path):
    save_base(tmp_path)
    program = (
        "import sys, torch; torch.cuda.current_device = lambda: 0;"
        "from nemo_automodel import NeMoAutoModelForCausalLM as Model;"
        "Model.from_pretrained(sys.argv[1])"
    )
    failed = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert failed.returncode == 1
    assert "Please pass the argument `trust_remote_code=True`" in failed.stderr
