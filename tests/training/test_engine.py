"""Test checkpoints of Transformer Engine's layers on the CPU."""

import json
import shlex

import pytest
import torch
from safetensors.torch import load_file

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from tests import transformer_engine
from tests.entry import Entry
from tests.training.conftest import TRAINING, losses, start

pytestmark = pytest.mark.te

MODEL = shlex.split("""
--device cpu --bf16 --num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
--group-query-attention --num-query-groups 2 --kv-channels 16 --qk-layernorm
--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
--attention-dropout 0 --hidden-dropout 0 --seq-length 32 --max-position-embeddings 32
--kha-query linear --kha-value mlp
""")
ENGINE = ["--transformer-impl", "transformer_engine"]
FP8 = [*ENGINE, "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
EXPERTS = shlex.split("""
--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-load-balancing-type none --moe-router-dtype fp32
--moe-token-dispatcher-type alltoall --moe-grouped-gemm
""")
VOCAB = 300
"""Entries of the corpus's tokenizer; other rows of the embedding are padding."""
STILL = shlex.split("""
--finetune --no-load-optim --no-load-rng --lr 0 --weight-decay 0 --moe-router-bias-update-rate 0
""")
TENSOR_PARALLEL = ["--tensor-model-parallel-size", "2"]
EXPERT_PARALLEL = ["--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]


@pytest.fixture(scope="module")
def start_engine(engine):
    """Return ``start`` with the test double of Transformer Engine."""
    return Entry(transformer_engine.install)


def weights(folder):
    """Return the last checkpoint's weights, with Transformer Engine's names of the norms."""
    checkpoint = MegatronCheckpoint.open(folder)
    names = [name for name in sorted(checkpoint.keys()) if not name.startswith("optimizer.")]
    has_experts = any(".experts." in name for name in names)
    tensors = {}
    for name in names:
        engine_name = name
        if has_experts:
            engine_name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        tensors[engine_name] = checkpoint.tensor(name)
    return tensors


@pytest.mark.whole
@pytest.mark.parametrize(
    ("more", "layout"),
    [([], TENSOR_PARALLEL), (EXPERTS, EXPERT_PARALLEL)],
    ids=["dense", "experts"],
)
def test_a_checkpoint_moves_between_both_kinds_of_layers_and_converts(
    start_engine,
    corpus,
    run,
    tmp_path,
    more,
    layout,
):
    """Runs with a learning rate of zero save the same bits that they load."""

    def trained(begin, name, words, origin=None):
        words = [*words, *MODEL, *TRAINING, *corpus, "--train-iters", "2"]
        words += ["--save", str(tmp_path / name)]
        if origin:
            words += ["--load", str(tmp_path / origin), *STILL]
        ended = begin(words, 2)
        assert ended.codes == [0, 0], ended.output[-4000:]
        return weights(tmp_path / name)

    def convert(way, origin, target):
        code, stdout, stderr = run("convert", way, tmp_path / origin, tmp_path / target, "--json")
        assert code == 0, stderr
        return json.loads(stdout)

    written = trained(start_engine, "fp8", [*FP8, *more, *layout])
    assert any("knock_value" in name for name in written)
    local = [word for word in more if word != "--moe-grouped-gemm"]
    moved = {"local": trained(start, "local", local, "fp8")}
    assert convert("to-hf", "fp8", "hf")["verification"]["agrees"]
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert any("v_knock" in name for name in exported)
    convert("to-megatron", "hf", "release")
    for origin in ("local", "release"):
        name = f"from {origin}"
        moved[name] = trained(start_engine, name, [*FP8, *more], origin)
    for training, tensors in moved.items():
        assert tensors.keys() == written.keys(), training
        for name, tensor in tensors.items():
            assert torch.equal(tensor[:VOCAB], written[name][:VOCAB]), (training, name)


SIX = ["--train-iters", "6", "--lr-decay-iters", "20"]
DISTRIBUTED = "--use-distributed-optimizer"
MOVES = "--dist-ckpt-optim-fully-reshardable"


def in_turns(words, folder, *turns):
    """Return the losses of runs of two steps each."""
    words = [*words, "--save", str(folder), "--load", str(folder), "--exit-interval", "2"]
    history = {}
    for begin, more in turns:
        history = at_once(words, folder, begin, more)
    return history


def at_once(words, folder, begin, more):
    """Return the losses of a run of six steps."""
    ended = begin([*words, *SIX, *more, "--tensorboard-dir", str(folder / "tb")])
    assert ended.codes == [0], ended.output[-4000:]
    return losses(folder / "tb")


@pytest.mark.whole
@pytest.mark.parametrize("optimizer", [[], [DISTRIBUTED, MOVES]], ids=["plain", "distributed"])
def test_a_run_resumes_with_other_layers(start_engine, corpus, tmp_path, optimizer):
    """PyTorch's Adam and Transformer Engine's store the number of steps in different places."""
    model = [word for word in MODEL if word != "--bf16"]
    words = [*model, *TRAINING, *corpus, *optimizer]
    engine = (start_engine, ENGINE)
    local = (start, [])
    want = at_once(words, tmp_path / "local", *local)
    got = in_turns(words, tmp_path / "both", engine, local, engine)
    assert want.keys() == got.keys() == set(range(1, 7))
    assert want[6] < want[1] - 0.3
    assert max(abs(want[step] - got[step]) for step in want) < 1e-5


@pytest.mark.whole
def test_delayed_scales_are_resumed(start_engine, corpus, tmp_path, monkeypatch):
    """Transformer Engine pickles the scales, and reads pickles only with a variable."""
    words = [*MODEL, *TRAINING, *corpus]
    delayed = (start_engine, [*FP8[:-1], "delayed"])
    want = at_once(words, tmp_path / "one", *delayed)
    in_turns(words, tmp_path / "two", delayed)
    again = [*words, *SIX, "--load", str(tmp_path / "two"), "--exit-interval", "3"]
    ended = start_engine([*again, *delayed[1]])
    switch = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
    assert ended.codes != [0]
    assert switch in ended.output
    other = start_engine([*again, *FP8])
    assert other.codes == [0], other.output[-4000:]

    monkeypatch.setenv(switch, "1")
    got = in_turns(words, tmp_path / "two", delayed, delayed)
    assert got == want


@pytest.mark.whole
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_weights_kept_in_fp8_train_the_same(start_engine, corpus, tmp_path, recipe):
    words = [*MODEL, *TRAINING, *corpus, DISTRIBUTED, *FP8[:-1], recipe]
    plain = at_once(words, tmp_path / "plain", start_engine, [])
    kept = at_once(words, tmp_path / "kept", start_engine, ["--fp8-param-gather"])
    # the last digit of float32: one casts the float32 weight, the other its bf16 copy
    assert kept == pytest.approx(plain, rel=1e-6)
