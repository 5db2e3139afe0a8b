"""Every case of the parallelism grid saves, resumes bit for bit, and loads under another layout.

The same cases are trained in memory by ``tests/distributed/test_parallelism.py``. Here, they run
through the training entry point:

- A run saves its second and fourth iteration.
- Another run resumes from the second iteration. Its fourth one must have the same bits.
- A run under another layout loads the fourth iteration and saves it again without training. All
  tensors must have the same bits, and the validation loss must be the same within ``TOLERANCE``,
  because another layout reorders sums.
"""

import re
import shlex
from dataclasses import replace

import pytest
import torch

from kha_megatron.heads import MixtureOfHeads
from kha_megatron.model.run import HEAD_FIELDS, Run
from tests.distributed.cases import (
    LINEAR,
    MLA,
    MOH,
    ONE_PER_CLAIM,
    OVERLAP_ALL,
    STOCK_GATE,
    ZERO,
)
from tests.distributed.cases import case as new_case
from tests.distributed.models import LATENT
from tests.distributed.parallelism import MOE, Layout
from tests.distributed.test_checkpoint_layouts import read_tensors
from tests.entry import run as start
from tests.training.test_resume import assert_same_bytes

TOLERANCE = {False: 1e-5, True: 0.02}
"""Relative error of a loss in float32, and in bfloat16."""

WORDS = shlex.split("""
--device cpu --hidden-size 40 --ffn-hidden-size 48 --num-attention-heads 8 --normalization RMSNorm
--swiglu --disable-bias-linear --position-embedding-type rope --attention-dropout 0
--hidden-dropout 0 --seq-length 12 --max-position-embeddings 12 --mock-data --vocab-size 56
--split 90,10,0 --num-workers 0 --micro-batch-size 2 --global-batch-size 4 --train-iters 4
--lr 1e-2 --lr-decay-style constant --clip-grad 0.1 --seed 7 --eval-interval 1000 --eval-iters 1
--log-interval 1 --ckpt-format torch_dist --make-vocab-size-divisible-by 14
""")

SPECIAL_FLAGS = {
    "num_moe_experts": "--num-experts",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
}
"""Flags of fields of the TransformerConfig that are not called like the field."""


def as_words(settings):
    """Return the arguments of fields of Megatron's configs."""
    words = []
    for name, value in settings.items():
        flag = SPECIAL_FLAGS.get(name, "--" + name.replace("_", "-"))
        if value is True:
            words.append(flag)
        elif value is not False and value is not None:
            words += [flag, str(value)]
    return words


def layout_words(layout):
    return as_words(
        {
            "tensor_model_parallel_size": layout.tp,
            "sequence_parallel": layout.sp,
            "pipeline_model_parallel_size": layout.pp,
            "context_parallel_size": layout.cp,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
        }
    )


def layer_words(case):
    if not case.gpt:
        return ["--hybrid-layer-pattern", case.pattern]
    words = ["--gpt-model", "--num-layers", str(case.layers)]
    if case.layout.vpp:
        words += ["--num-virtual-stages-per-pipeline-rank", str(case.layout.vpp)]
    if case.model == "moe":
        words += ["--moe-layer-freq", f"[0]+[1]*{case.layers - 1}"]
    return words


def head_words(case, kha):
    options = kha.to_options()
    values = {}
    for field in HEAD_FIELDS:
        value = options.get(field.argument.removeprefix("kha_"))
        if value is not None:
            values[field.argument] = value
    words = Run.from_values(**values).words()
    if kha.get(MixtureOfHeads):  # a resumed run must continue to reduce the number of heads
        words += ["--heads", "moh.anneal=3"]
    return words


def words_of(case, kha):
    """Return the arguments of a case for the training entry point."""
    settings = {
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": not case.tied,
        "bf16": case.bf16,
        "calculate_per_token_loss": case.per_token_loss,
        "kha_fold_linear": case.fold,
    }
    if case.config.get("multi_latent_attention"):
        settings |= LATENT
    else:
        settings["group_query_attention"] = True
        settings["num_query_groups"] = case.groups
        settings["kv_channels"] = 6
    if case.model == "moe":
        settings |= MOE
    if case.fsdp == "torch":
        settings["use_torch_fsdp2"] = True
    settings |= case.config | case.savings | case.ddp
    if settings.get("use_distributed_optimizer"):
        settings["dist_ckpt_optim_fully_reshardable"] = True
    if kha.attention == "gta":
        settings["rotary_percent"] = 0.5
    return [
        *WORDS,
        *layer_words(case),
        *layout_words(case.layout),
        *as_words(settings),
        *head_words(case, kha),
    ]


def under_another_layout(case):
    """Return the case on as few ranks as possible, with the same kinds of optimizers.

    Megatron has a separate optimizer for experts if they are sharded differently from other layers.
    """
    layout = Layout()
    shards_experts_differently = case.layout.ep > 1 or case.layout.etp != case.layout.tp
    if case.model == "moe" and shards_experts_differently:
        layout = Layout(dp=2, ep=2)
    return replace(case.twin(), layout=layout, ddp=case.ddp, fsdp=case.fsdp)


def train(case, kha, *arguments):
    """Train until iteration 4. Return the validation loss."""
    ranks = case.layout.world
    words = words_of(case, kha) + [str(argument) for argument in arguments]
    ended = start(words, ranks)
    assert ended.codes == [0] * ranks, ended.output[-4000:]
    (loss,) = re.findall(r"iteration 4 on validation set \| lm loss value: (\S+)", ended.output)
    return float(loss)


def parameters():
    for case in ONE_PER_CLAIM:
        for kha in case.khas:
            name = str(case)
            marks = []
            if len(case.khas) > 1:
                name = f"{case}, {kha}"
                if kha in (MLA, STOCK_GATE, MOH):  # others have the same tensors
                    marks = [pytest.mark.whole]
            yield pytest.param(case, kha, id=name, marks=marks)


@pytest.mark.parametrize(("case", "kha"), list(parameters()))
def test_a_case_resumes_and_loads_under_another_layout(tmp_path, case, kha):
    uninterrupted = tmp_path / "uninterrupted"
    loss = train(case, kha, "--save", uninterrupted, "--save-interval", 2)
    saved = uninterrupted / "iter_0000004"

    resumed = tmp_path / "resumed"
    load = ["--load", uninterrupted, "--ckpt-step", 2]
    resumed_loss = train(case, kha, *load, "--save", resumed, "--save-interval", 2)
    assert resumed_loss == loss
    assert_same_bytes(saved, resumed / "iter_0000004", batch=4)

    moved = tmp_path / "moved"
    load = ["--load", uninterrupted]
    other_case = under_another_layout(case)
    moved_loss = train(other_case, kha, *load, "--save", moved, "--save-interval", 1000)
    assert moved_loss == pytest.approx(loss, rel=TOLERANCE[case.bf16])
    tensors = read_tensors(saved)
    moved_tensors = read_tensors(moved / "iter_0000004")
    assert tensors.keys() == moved_tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, moved_tensors[name]), name


def test_a_run_that_folds_continues_without_folding(tmp_path):
    """The weights are those of a run that never folds, within the rounding of four steps."""
    folding = new_case(khas=(LINEAR,), fold=True, dp=2, ddp=OVERLAP_ALL)
    unfolded = replace(folding, fold=False)
    never = tmp_path / "never"
    train(unfolded, LINEAR, "--save", never, "--save-interval", 4)
    started = tmp_path / "started"
    train(folding, LINEAR, "--save", started, "--save-interval", 2)
    continued = tmp_path / "continued"
    load = ["--load", started, "--ckpt-step", 2]
    train(unfolded, LINEAR, *load, "--save", continued, "--save-interval", 4)

    expected_tensors = read_tensors(never / "iter_0000004")
    for run in (started, continued):
        tensors = read_tensors(run / "iter_0000004")
        assert tensors.keys() == expected_tensors.keys()
        for name, expected in expected_tensors.items():
            error = (tensors[name] - expected).norm()
            assert error <= TOLERANCE[False] * expected.norm(), name


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"bf16": True}, "With half precision and without --use-distributed-optimizer"),
        ({"ddp": ZERO}, "With --use-distributed-optimizer and torch's Adam"),
    ],
)
def test_experts_whose_optimizer_cannot_be_saved_are_refused(tmp_path, settings, cause):
    refused = new_case(tp=2, sp=True, pp=2, model="moe", **settings)
    (kha, *_) = refused.khas
    words = [*words_of(refused, kha), "--save", str(tmp_path), "--save-interval", "2"]
    ended = start(words, refused.layout.world)
    assert ended.codes == [2] * 4, ended.output[-4000:]
    assert "The first pipeline stage has no MoE layers" in ended.output
    assert cause in ended.output
    assert "Traceback" not in ended.output
