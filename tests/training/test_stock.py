"""Test Megatron's own scripts on a patched tree: arguments, reports, the expert bias."""

import argparse
import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kha_megatron.errors import ConfigError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.training import stock
from tests.entry import Entry
from tests.mcore.test_patches import PATCHES, run_patch
from tests.training.conftest import EXPERTS, HEAD_DIM, LAYERS, MODEL, TRAINING, scalars
from tests.training.test_stock_script import STOCK

# sizes of MODEL and TRAINING
HEADS = 8
GROUPS = 2
SEQUENCE = 28
MICROBATCH = 3
BATCH = 6

RECORDED = """
import sys
import megatron.core.distributed
finalize = sys.modules["megatron.core.distributed.finalize_model_grads"]  # hidden by a function
from kha_megatron.mcore import patches
patches.count_tokens_in_integers = lambda: None  # the patch must suffice
updates, update = [], finalize.get_updated_expert_bias
def recorded(loads, bias, *rest, **named):
    local = loads.tolist()
    after = update(loads, bias, *rest, **named)
    updates.append({"local": local, "loads": loads.tolist(), "dtype": str(loads.dtype),
                    "bias": bias.tolist(), "rate": rest[0], "after": after.tolist()})
    return after
finalize.get_updated_expert_bias = recorded
"""
REPORTED = """
import argparse, copy, json
from pathlib import Path
from megatron.core.transformer.spec_utils import import_module
from megatron.training import theoretical_memory_usage as memory
from megatron.training.arguments import add_megatron_arguments
from megatron.training.training import num_floating_point_operations

def reports(args):
    return {"flops": num_floating_point_operations(args, args.global_batch_size),
            "weights": memory.compute_weight_and_optimizer_memory(args),
            "activations": memory.compute_activation_memory_without_sp(args, 2),
            "activations_sp": memory.compute_activation_memory(args, 2)}
def refusal(call, *words):
    try:
        return f"accepted: {call(*words)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

plain = copy.copy(args)
for name in ("kha_query", "kha_key", "kha_value", "spec"):
    setattr(plain, name, None)
found = {"updates": updates, "kha": reports(args), "plain": reports(plain), "spec": args.spec,
         "refused": refusal(import_module, ["no.such.module", "kha_mlp"])}
wrong = copy.copy(args)
wrong.spec = ["kha_megatron.mcore.spex", "kha_mlp"]
found["refused_by_builder"] = refusal(argument_utils.gpt_config_from_args, wrong)
for name in [name for name in sys.modules if name.startswith("kha_megatron")]:
    del sys.modules[name]
found["without"] = reports(args)
sys.modules["kha_megatron"] = None  # as if it were not installed
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
found["unknown_without"] = parser.parse_known_args(["--kha-preset", "kha_mlp"])[1]
(Path(os.environ["FOUND"]) / f"rank{args.rank}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """Return a directory with a copy of the installed Megatron and every patch applied."""
    installed = Path(find_spec("megatron").submodule_search_locations[0])
    copy = tmp_path_factory.mktemp("patched") / "megatron"
    # Python's caches as well, so that importing is faster, but none that is being written now
    shutil.copytree(installed, copy, ignore=shutil.ignore_patterns("*.pyc.*"))
    for patch in PATCHES:
        run_patch(copy.parent, "-i", patch)
    return copy.parent


@pytest.fixture(scope="module")
def trained(patched, tmp_path_factory):
    """Return a run of two ranks, what each rank found, and the directory."""
    folder = tmp_path_factory.mktemp("stock")
    words = ["--kha-preset", "kha_mlp", "--kha-query", "linear", *MODEL, *TRAINING]
    words += ["--train-iters", "2", "--mock-data", "--vocab-size", "200", "--bf16"]
    words += ["--tensor-model-parallel-size", "2", "--sequence-parallel", *EXPERTS]
    words += ["--expert-model-parallel-size", "1", "--moe-token-dispatcher-type", "alltoall"]
    words += ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]
    words += ["--moe-router-bias-update-rms", "--moe-router-bias-update-rate", "0.01"]
    words += ["--log-throughput", "--log-timers-to-tensorboard"]
    words += ["--tensorboard-dir", str(folder / "tensorboard")]
    words += ["--tokenizer-type", "NullTokenizer"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(patched), *sys.path])  # which the new process inherits
        patch.setenv("FOUND", str(folder))
        run = Entry()(words, 2, program=RECORDED + STOCK + REPORTED)
    assert run.codes == [0, 0], run.output[-4000:]
    return run, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)], folder


# of query=linear value=mlp, in all layers of the model, written out
PARAMETERS = LAYERS * (1 + 3) * HEAD_DIM**2
FLOPS = 3 * BATCH * SEQUENCE * LAYERS * (HEADS + 3 * GROUPS) * 2 * HEAD_DIM**2
ACTIVATIONS = LAYERS * 2 * MICROBATCH * SEQUENCE * (HEADS + 4 * GROUPS) // 2 * HEAD_DIM  # TP 2


def test_the_arguments_choose_the_layer_spec(trained):
    run, found, _ = trained
    line = "kha_megatron: using the layer spec of the --kha-* arguments (query=linear value=mlp)"
    assert run.output.count(line) == 1
    assert [rank["spec"] for rank in found] == [stock.SPEC] * 2


def test_the_throughput_report_counts_knocking(trained):
    _, (found, _), folder = trained
    assert found["kha"]["flops"] - found["plain"]["flops"] == FLOPS
    # Megatron's own scalars, in float32: TFLOP/s of each of two ranks, and seconds
    written = scalars(folder / "tensorboard")
    rate, seconds = (written[name][2] for name in ("throughput", "iteration-time"))
    assert rate * 1e12 * 2 * seconds == pytest.approx(found["kha"]["flops"], rel=1e-6)
    assert found["plain"]["flops"] < 0.999 * found["kha"]["flops"]


def test_the_memory_report_counts_knocking(trained):
    run, (found, _), _ = trained
    kha = found["kha"]
    plain = found["plain"]
    # 18 bytes of weight, gradient and Adam for each parameter, whole on each tensor-parallel rank
    assert kha["weights"] - plain["weights"] == pytest.approx(18 * PARAMETERS)
    assert kha["activations_sp"] - plain["activations_sp"] == pytest.approx(ACTIVATIONS)
    overhead = 1.05  # Megatron's, on all activations without sequence parallelism
    assert kha["activations"] - plain["activations"] == pytest.approx(overhead * ACTIVATIONS)
    weights, activations = (kha[name] / 2**20 for name in ("weights", "activations"))
    line = f"weight and optimizer={weights:.2f} MB, activation={activations:.2f} MB"
    assert line in run.output
    assert f"optimizer={plain['weights'] / 2**20:.2f} MB" not in run.output


def test_the_rms_update_of_the_expert_bias(trained):
    """``bias + rate * (mean - load) / RMS(mean - load)`` of the loads of all ranks together."""
    _, found, _ = trained
    assert [len(rank["updates"]) for rank in found] == [2, 2]
    bias = torch.zeros(LAYERS, 4, dtype=torch.float64)
    for first, second in zip(*(rank["updates"] for rank in found), strict=True):
        loads = torch.tensor(first["local"]) + torch.tensor(second["local"])
        assert first["dtype"] == second["dtype"] == "torch.int64"  # bf16 would round above 256
        assert first["local"] != second["local"]  # each routed its part of the sequence
        assert first["loads"] == second["loads"] == loads.tolist()
        assert set(loads.sum(-1).tolist()) == {BATCH * SEQUENCE * 2}  # top 2
        offset = loads.double().mean(-1, keepdim=True) - loads.double()
        bias += first["rate"] * offset / offset.square().mean(-1, keepdim=True).sqrt()
        # float32 of a few steps of 0.01
        torch.testing.assert_close(
            torch.tensor(first["after"]).double(),
            bias,
            rtol=0,
            atol=1e-7,
            msg=str,
        )
        assert first["after"] == second["after"]
    assert bias.abs().unique().numel() > LAYERS  # the sign form would move all by whole steps


def test_a_spec_that_cannot_be_imported_stops_the_run(trained):
    _, (found, _), _ = trained
    assert found["refused"].startswith("ImportError: ")
    assert all(name in found["refused"] for name in ("no.such.module", "kha_mlp"))
    assert "No module named 'kha_megatron.mcore.spex'" in found["refused_by_builder"]


def test_without_the_package_the_patched_tree_is_megatrons_own(trained):
    _, (found, _), _ = trained
    assert found["without"] == found["plain"]
    assert found["unknown_without"] == ["--kha-preset", "kha_mlp"]


def arguments(*words, **others):
    parser = stock.add_arguments(argparse.ArgumentParser())
    megatrons = {
        "spec": None,
        "hybrid_layer_pattern": None,
        "multi_latent_attention": False,
    }
    parser.set_defaults(**megatrons | others)
    return parser.parse_args(words)


def test_without_arguments_nothing_is_stored():
    args = arguments()
    stock.use_arguments(args)
    assert args.spec is None
    assert HeadsConfig.from_entries(vars(args)) is None
    args.spec = stock.SPEC  # as --use-checkpoint-args may set it
    with pytest.raises(ConfigError, match="requires --kha-preset"):
        stock.recorded_kha(args)


@pytest.mark.parametrize(
    ("words", "others", "message"),
    [
        (["--kha-value", "mlp"], {"spec": ["local"]}, "both --spec local and --kha-*"),
        (["--kha-value", "mlp"], {"hybrid_layer_pattern": "M*"}, "HybridModel"),
        (["--kha-init", "random"], {}, "Pass --kha-preset"),
    ],
)
def test_arguments_that_cannot_be_honoured(words, others, message):
    args = arguments(*words)
    vars(args).update(others)
    with pytest.raises(ConfigError) as caught:
        stock.use_arguments(args)
    assert message in str(caught.value)
