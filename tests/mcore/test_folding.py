"""Folded and direct application are one training: same outputs, same gradients, same checkpoints.

The grid of ``tests/distributed/test_parallelism.py`` has the layouts, each against an unsharded run
with direct application; here is one layer in float64, what chooses, and what may not be folded.
"""

import contextlib
import io
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.ops.fold_heads import fold_heads
from tests.distributed.launcher import RankError
from tests.distributed.parallelism import Case, Layout, train
from tests.distributed.pieces import errors, quantities

LINEAR = KHAConfig(query="linear", key="linear", value="linear")
SUBSETS = [
    KHAConfig(**dict(zip(PROJECTIONS, chosen, strict=True)))
    for chosen in product(("linear", None), repeat=3)
    if any(chosen)
]
BESIDE_OTHERS = [
    KHAConfig(query="linear", key="linear", value="mlp"),
    KHAConfig(query="gate", key="linear", value="mlp"),
]
HEADS, GROUPS, HEAD_DIM, HIDDEN, TOKENS, BATCH = 6, 3, 10, 28, 7, 2
EXACT, SINGLE = 1e-12, 1e-5


def test_gradients_of_the_fold_are_those_of_finite_differences():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    owners = (0, 0, 1, 2, None, 0, 2)  # the last matrix has no head on this rank
    matrices = [draw(5, 5) for _ in range(4)]
    for rows in (draw(7 * 5, 3), draw(7 * 5)):
        torch.autograd.gradcheck(lambda rows, *m: fold_heads(rows, m, owners), (rows, *matrices))
        folded = fold_heads(rows, matrices, owners)
        for head, owner in enumerate(owners):
            mine = slice(5 * head, 5 * head + 5)
            matrix = torch.eye(5).double() if owner is None else matrices[owner]
            torch.testing.assert_close(folded[mine], matrix.T @ rows[mine])


def test_a_matrix_without_a_head_gets_a_gradient_of_zero():
    matrices = [torch.eye(2, requires_grad=True) for _ in range(2)]
    fold_heads(torch.ones(4, 3), matrices, (1, 1)).sum().backward()
    assert matrices[0].grad.tolist() == [[0, 0], [0, 0]]
    assert matrices[1].grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_identity_folds_bit_for_bit(dtype):
    rows = torch.randn(6 * 8, 5).to(dtype)
    identity = torch.eye(8, dtype=dtype)
    assert torch.equal(fold_heads(rows, [identity], (0, 0, None, 0, None, 0)), rows)


def layer(models, kha, **overrides):
    """One attention of its layer spec, with weights that do not depend on ``kha.fold``."""
    from megatron.core.transformer.spec_utils import build_module

    from kha_megatron.mcore.specs import kha_layer_spec

    settings = {
        "num_attention_heads": HEADS,
        "num_query_groups": GROUPS,
        "kv_channels": HEAD_DIM,
        "hidden_size": HIDDEN,
    }
    config = models.transformer_config(**settings | overrides)
    spec = kha_layer_spec(config, kha).layer_specs[0].submodules.self_attention
    torch.manual_seed(3)
    built = build_module(spec, config=config, layer_number=1)
    models.perturb(built)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith("bias") or "layernorm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return built


def project(built, tokens=TOKENS, seed=5):
    """What the attention computes of some tokens, and its gradients accumulate."""
    dtype = built.linear_proj.weight.dtype
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens, BATCH, built.config.hidden_size)
    hidden = torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
    mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)[None, None]
    output, _ = built(hidden, mask)
    if torch.is_grad_enabled():
        upstream = torch.randn(output.shape, generator=generator, dtype=dtype)
        output.backward(upstream)
    return output.detach(), hidden.grad


def two_ways(khas, dtype, overrides):
    """For each configuration the relative errors of the folded layer against the direct one."""
    from tests.distributed import models

    models.initialize()
    found = []
    for kha in khas:
        seen = []
        for fold in ("never", "always"):
            built = layer(models, replace(kha, fold=fold), params_dtype=dtype, **overrides)
            built = built.to(dtype)
            with counted_folds() as folds:
                results = [project(built, seed=seed) for seed in (5, 6, 7)]  # microbatches
            expected = 3 * (1 + (built.linear_qkv.bias is not None)) * 2  # and for the backward
            expected -= 3 * (built.linear_qkv.bias is not None)  # in which no bias takes part
            assert len(folds) == (expected if fold == "always" else 0), folds
            tensors = {n: p.grad for n, p in built.named_parameters()}
            for i, (output, gradient) in enumerate(results):
                tensors |= {f"output {i}": output, f"input gradient {i}": gradient}
            seen.append(tensors)
        direct, folded = seen
        assert direct.keys() == folded.keys()
        found.append({n: ((folded[n] - x).norm() / x.norm()).item() for n, x in direct.items()})
    return found


@contextmanager
def counted_folds():
    from kha_megatron.mcore import folding

    folds, fold = [], folding.fold_heads

    def counting(rows, *args):
        folds.append(tuple(rows.shape))
        return fold(rows, *args)

    folding.fold_heads = counting
    try:
        yield folds
    finally:
        folding.fold_heads = fold


KINDS = [
    {},
    {"qk_layernorm": False},
    {"num_query_groups": 1, "add_qkv_bias": True},
    {"num_query_groups": HEADS, "attention_output_gate": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=["norm", "plain", "mqa-bias", "mha-output-gate"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, EXACT), (torch.float32, SINGLE)], ids=str
)
def test_folded_equals_direct(ranks, kind, dtype, bound):
    khas = [*SUBSETS, *BESIDE_OTHERS]
    for kha, found in zip(khas, ranks(two_ways, 1, khas, dtype, kind)[0], strict=True):
        parameters = 2 + len(kha.variants) + 2 * kind.get("qk_layernorm", True)
        assert len(found) == 6 + parameters + ("add_qkv_bias" in kind)
        wrong = {name: error for name, error in found.items() if not error < bound}
        assert not wrong, kha


def chosen(kha, training, tokens, overrides, sizes):
    """Which of these sequence lengths are folded, and what is said of it."""
    from kha_megatron import announcements
    from tests.distributed import models

    models.initialize(**sizes)
    built = layer(models, kha, **overrides).train(training)
    announcements.forget()
    ways = []
    with contextlib.redirect_stderr(io.StringIO()) as said, torch.set_grad_enabled(training):
        for n in tokens:
            with counted_folds() as folds:
                project(built, tokens=n)
            ways.append(bool(folds))
    return ways, [line for line in said.getvalue().splitlines() if "KHA-Linear" in line]


V = KHAConfig(value="linear")
RULE = [
    # 28 hidden; all 12 heads are linear: 4/3 * 28 = 37.3 tokens, of two sequences
    (LINEAR, True, (18, 19), {}),
    # 3 of 12 heads: four times that
    (V, True, (74, 75), {}),
    # without a backward pass, 28
    (LINEAR, False, (14, 15), {}),
]


@pytest.mark.parametrize(("kha", "training", "tokens", "overrides"), RULE)
def test_auto_folds_where_it_moves_fewer_bytes(ranks, kha, training, tokens, overrides):
    ways, said = ranks(chosen, 1, kha, training, tokens, overrides, {})[0]
    assert ways == [False, True]
    assert len(said) == 2 * training
    if training:
        assert (
            f"({'microbatches of 36 tokens' if kha is LINEAR else 'microbatches of 148 t'}"
            in (said[0])
        )
        assert "applied to activations" in said[0]
        assert "folded into the QKV weight" in said[1]


def test_each_way_is_announced_once_and_a_choice_of_the_user_never(ranks):
    ways, said = ranks(chosen, 1, LINEAR, True, (3, 19, 4, 20, 21), {}, {})[0]
    assert ways == [False, True, False, True, True]
    assert len(said) == 2
    ways, said = ranks(chosen, 1, replace(LINEAR, fold="never"), True, (3, 60), {}, {})[0]
    assert (ways, said) == ([False, False], [])
    ways, said = ranks(chosen, 1, KHAConfig(value="mlp"), True, (3, 60), {}, {})[0]
    assert (ways, said) == ([False, False], [])


def test_tokens_of_all_ranks_of_a_sequence_count(ranks):
    """With sequence parallelism the GEMM sees the tokens that the ranks hold in parts."""
    sizes = {"tensor_model_parallel_size": 2}
    overrides = {**sizes, "sequence_parallel": True, "num_query_groups": 2}  # 10 heads, all linear
    for ways in ranks(ways_of_a_rank, 2, (9, 10), overrides, sizes):
        assert ways == [False, True]


def test_the_end_of_fused_gradient_accumulation_counts(ranks):
    """5/3 of 28 hidden: 46.7 tokens, of two sequences."""
    (ways,) = ranks(ways_of_a_rank, 1, (23, 24), {}, {}, fused=True)
    assert ways == [False, True]


def ways_of_a_rank(tokens, overrides, sizes, fused=False):
    from tests.distributed import models

    models.initialize(**sizes)
    built = layer(models, LINEAR, **overrides)
    built.config.gradient_accumulation_fusion = fused
    return [built.folding.folds(torch.empty(n, BATCH, HIDDEN)) for n in tokens]


def kept(lets_go):
    from kha_megatron.mcore.folding import _Weight
    from tests.distributed import models

    models.initialize()
    built = layer(models, replace(LINEAR, fold="always"))
    saved = _Weight.saved if lets_go else lambda self, linear: nullcontext()
    with mock.patch.object(_Weight, "saved", saved):
        return bytes_of_folded(built, torch.randn(TOKENS, BATCH, HIDDEN))


def bytes_of_folded(attention, hidden):
    """Bytes that the folded weight has: in use, after the projection, after the backward pass."""
    from torch.multiprocessing.reductions import StorageWeakRef

    made, found = [], []

    def alive():
        storage = torch.UntypedStorage._new_with_weak_ptr(made[0].cdata)
        return storage.nbytes() if storage is not None else 0

    def look(linear, inputs, output):
        made.append(StorageWeakRef(linear.weight.untyped_storage()))
        found.append(alive())

    hook = attention.linear_qkv.register_forward_hook(look)
    outputs = attention.get_query_key_value_tensors(hidden)
    hook.remove()
    found.append(alive())
    sum(x.float().sum() for x in outputs).backward()
    del outputs
    return [*found, alive()]


def test_nothing_of_the_folded_weight_is_kept_for_the_backward_pass(ranks):
    size = (HEADS + 2 * GROUPS) * HEAD_DIM * HIDDEN * 4
    assert ranks(kept, 1, True)[0] == [size, 0, 0]
    assert ranks(kept, 1, False)[0][:2] == [size, size], "the test cannot see what is kept"


def case(kha=LINEAR, **fields):
    names = Layout.__dataclass_fields__
    layout = Layout(**{name: value for name, value in fields.items() if name in names})
    rest = {name: value for name, value in fields.items() if name not in names}
    return Case(layout=layout, khas=(kha,), **{"fold": "always", **rest})


def trained(ranks, case, mutation=None):
    """The quantities in which the run on ranks differs from the unsharded direct one."""
    (want,) = (quantities([result]) for result in ranks(train, 1, case.twin())[0])
    results = ranks(train, case.layout.world, case, mutation)
    found = errors(quantities([result for (result,) in results]), want)
    return {name: error for name, error in found.items() if not error <= SINGLE}


@contextmanager
def with_fused_weight_gradients():
    """Stand in for the CUDA extension that adds weight gradients to ``main_grad`` in the GEMM."""
    from megatron.core.tensor_parallel import layers

    def accumulate(total_input, gradient, main_grad):
        added.append(tuple(main_grad.shape))
        main_grad.add_(gradient.t() @ total_input)

    added = []
    known = vars(layers).get("fused_weight_gradient_mlp_cuda"), layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    try:
        yield
        assert added, "no weight gradient was fused"
    finally:
        layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = known


@contextmanager
def with_fused_gradients_left_on():
    from kha_megatron.mcore.folding import Folding

    build = Folding.__init__

    def left_on(self, attention, *args):
        build(self, attention, *args)
        attention.linear_qkv.gradient_accumulation_fusion = True

    Folding.__init__ = left_on
    try:
        with with_fused_weight_gradients():
            yield
    finally:
        Folding.__init__ = build


@contextmanager
def with_every_other_microbatch_folded():
    from kha_megatron.mcore.folding import Folding

    decide, count = Folding.folds, {}

    def alternating(self, hidden_states):
        count[self] = count.get(self, 0) + 1
        return count[self] % 2 == 0

    Folding.folds = alternating
    try:
        with with_fused_weight_gradients():
            yield
    finally:
        Folding.folds = decide


FUSED = {"gradient_accumulation_fusion": True}


@pytest.mark.parametrize(
    "mutation", [with_fused_weight_gradients, with_every_other_microbatch_folded]
)
def test_fused_gradient_accumulation_stays_on_elsewhere(ranks, mutation):
    for options in ({}, {"overlap_grad_reduce": True, "use_distributed_optimizer": True}):
        run = case(dp=2, savings=FUSED, ddp=options)
        assert not trained(ranks, run, mutation)


def test_with_fused_gradient_accumulation_left_on_training_fails(ranks):
    with pytest.raises(RankError, match="main_grad"):
        trained(ranks, case(savings=FUSED), with_fused_gradients_left_on)


@contextmanager
def with_the_gradient_of_the_fold_on_one_rank_only():
    """A fold that takes the matrices past the rule for their gradient."""
    from kha_megatron.mcore.knocking import KnockingHeads

    forward = KnockingHeads.forward
    KnockingHeads.forward = lambda self, x=None: self.weight if x is None else forward(self, x)
    try:
        yield
    finally:
        KnockingHeads.forward = forward


def test_without_the_sum_over_ranks_replicas_drift(ranks):
    with pytest.raises(AssertionError, match=r"replicas of .*\.knock_\w+\.weight differ"):
        trained(ranks, case(tp=2), with_the_gradient_of_the_fold_on_one_rank_only)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute writes the gradient"),
        ({"cuda_graph_impl": "local"}, "folding was never captured in a CUDA graph"),
        ({"fp8_param": True}, "--fp8-param-gather keeps the weight in FP8"),
        ({"cpu_offloading": True}, "CPU offloading and folding both decide"),
        ({"fine_grained_activation_offloading": True}, "fine-grained activation offloading and"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_options_that_forbid_folding_are_named(ranks, options, words):
    said, refusal = ranks(hindered, 1, {}, options)[0]
    assert said.startswith(f"KHA-Linear is applied to activations: {words}")
    assert refusal.startswith(f"fold=always, and {words}")
    assert refusal.endswith(": use --kha-fold auto, or remove the obstacle")


def test_pieces_of_heads_are_not_folded(ranks):
    sizes = {"num_attention_heads": 8, "num_query_groups": 1, "tensor_model_parallel_size": 4}
    for said, refusal in ranks(hindered, 4, sizes, {}):
        assert "the 10 heads of queries, keys and values cannot be divided over 4" in said
        assert "the 10 heads of queries, keys and values cannot be divided over 4" in refusal


def hindered(sizes, options):
    """What ``auto`` says of a large microbatch, and with which message ``always`` refuses."""
    from tests.distributed import models

    models.initialize(tensor_model_parallel_size=sizes.get("tensor_model_parallel_size", 1))
    built = layer(models, LINEAR, **sizes)
    parts = built.split.layout, built.knockings
    for name, value in options.items():  # some of them Megatron accepts with a GPU only
        setattr(built.config, name, value)
    with heard() as said:
        folding = type(built.folding)(built, LINEAR, *parts)
        assert not folding.folds(torch.empty(1000, BATCH, HIDDEN))
    with pytest.raises(ConfigError) as caught:
        type(built.folding)(built, replace(LINEAR, fold="always"), *parts)
    return said[0], str(caught.value)


@contextmanager
def heard():
    """All that is announced, on every rank and each time."""
    from kha_megatron.mcore import folding

    said = []
    announce, folding.announce = folding.announce, lambda text, once: said.append(text)
    try:
        yield said
    finally:
        folding.announce = announce


class Adapter(torch.nn.Module):
    """A low-rank adapter as libraries put it around a linear layer."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.low = torch.nn.Linear(HIDDEN, linear.weight.shape[0], bias=False)

    def forward(self, x):
        output, bias = self.linear(x)
        return output + self.low(x), bias


def changed(kind):
    """What is said where something was done to the linear layer after it was built."""
    from tests.distributed import models

    models.initialize()
    outputs = []
    with heard() as said:
        for fold in ("never", "auto", "always"):
            built = layer(models, replace(LINEAR, fold=fold))
            torch.manual_seed(1)
            if kind == "adapter":
                built.linear_qkv = Adapter(built.linear_qkv)
            else:
                built.linear_qkv.weight.__fsdp_param__ = True
            try:
                outputs.append(project(built, tokens=40)[0])
            except ConfigError as error:
                said.append(str(error))
    assert torch.equal(*outputs)
    return said


@pytest.mark.parametrize(
    ("kind", "words"),
    [("adapter", "is a Adapter, whose weight is not all of it"), ("fsdp", "never run with FSDP")],
)
def test_a_changed_layer_is_applied_directly(ranks, kind, words):
    direct, refusal = ranks(changed, 1, kind)[0]
    assert words in direct
    assert words in refusal


def crossed(folder):
    """Save a model that was run folded, load it into a direct one, and the other way round."""
    import queue

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from tests.distributed import models

    filesystem_async._results_queue = queue.Queue()  # a daemonic rank may start no manager
    models.initialize(tensor_model_parallel_size=2)
    config = models.transformer_config(tensor_model_parallel_size=2)
    rank = torch.distributed.get_rank()
    built = {}
    for seed, fold in enumerate(("always", "never")):
        torch.manual_seed(seed)
        built[fold] = models.gpt_model(config, replace(LINEAR, fold=fold))
    tokens, positions, mask = models.batch()
    shapes = []
    for source, target in (("always", "never"), ("never", "always")):
        with torch.no_grad():
            for parameter in built[source].parameters():
                parameter += 0.01  # so that each way has something to bring
        built[source](tokens, positions, mask, labels=tokens).sum().backward()
        path = folder / source
        if rank == 0:
            path.mkdir()
        torch.distributed.barrier()
        dist_checkpointing.save(built[source].sharded_state_dict(), str(path))
        loaded = dist_checkpointing.load(built[target].sharded_state_dict(), str(path))
        built[target].load_state_dict(loaded)
        shapes.append({n: tuple(p.shape) for n, p in built[source].named_parameters()})
        pairs = zip(*(built[fold].named_parameters() for fold in (source, target)), strict=True)
        for (name, saved), (other, read) in pairs:
            assert name == other
            assert torch.equal(saved, read), name
        with torch.no_grad():
            losses = [built[f](tokens, positions, mask, labels=tokens) for f in (source, target)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    assert shapes[0] == shapes[1]
    return shapes[0]


def test_a_checkpoint_moves_between_both_ways(ranks, tmp_path):
    shapes = ranks(crossed, 2, tmp_path)[0]
    at = "decoder.layers.0.self_attention."
    assert shapes[f"{at}linear_qkv.weight"] == ((8 + 2 * 4) * 6 // 2, 40)
    assert shapes[f"{at}knock_query.weight"] == (1, 6, 6)
