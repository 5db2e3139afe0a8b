"""Test a stock Megatron script with ``--spec``, and resume its checkpoint in our entry point.

The script does what ``pretrain_gpt.py`` and ``pretrain_hybrid.py`` do, which are not in the wheel.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.conversion import to_hf
from kha_megatron.conversion.verify import Pair
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.recorded import read_kha_config, read_knock_weights
from tests.training.conftest import LAYERS, MODEL, TRAINING, losses, start

STOCK = """
import os, sys, time
from kha_megatron.mcore import cpu
os.environ.update(cpu.ENVIRONMENT)
cpu.install(despite_cuda=True)
sys.argv += [word for item in cpu.MEGATRON_FLAGS.items() for word in item if word]
from kha_megatron.mcore import patches
patches.use_shipped_dataset_helpers()
patches.use_forked_writers()
from megatron.core.enums import ModelType
from megatron.training import pretrain, set_startup_timestamps
from megatron.training import argument_utils
from megatron.training.arguments import parse_and_validate_args
from kha_megatron.training.pretrain import _build_datasets, _forward_step
set_startup_timestamps(program_start=time.time(), main_entry=time.time())
args = parse_and_validate_args()
kind = "hybrid" if args.hybrid_layer_pattern else "gpt"
config = getattr(argument_utils, f"{kind}_config_from_args")(args)
pretrain(
    argument_utils.pretrain_cfg_container_from_args(args, config),
    _build_datasets,
    ModelType.encoder_or_decoder,
    _forward_step,
)
"""
EXAMPLE = Path(__file__).parents[2] / "examples/pretrain_stock.sh"
SMALL = shlex.split("""
--hybrid-layer-pattern *- --hidden-size 64 --ffn-hidden-size 48 --num-query-groups 2 --kv-channels 8
--seq-length 14 --max-position-embeddings 14 --global-batch-size 1 --train-iters 1
--eval-iters 0 --log-interval 1 --num-workers 0
""")
SPEC = ["--spec", "kha_megatron.mcore.specs"]
PARALLEL = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
KHA = HeadsConfig(Knock(value="mlp"), init_seed=5)
OURS = ["--device", "cpu", *MODEL, *TRAINING, "--kha-preset", "kha_mlp"]
DISTRIBUTED = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]


@pytest.fixture(scope="module")
def stock(corpus, tmp_path_factory):
    """Run eight iterations of the stock script on two ranks, saved after four and eight."""
    folder = tmp_path_factory.mktemp("stock")
    words = [*MODEL, *TRAINING, *corpus, *PARALLEL, *SPEC, "kha", "--save-interval", "4"]
    words += ["--save", str(folder / "save"), "--tensorboard-dir", str(folder / "tensorboard")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KHA_CONFIG", '{"value": "mlp", "init_seed": 5}')
        run = start(words, 2, program=STOCK)
    assert run.codes == [0, 0], run.output[-4000:]
    return run, folder


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("kha_mlpp", "Unknown KHA preset 'kha_mlpp'. Did you mean kha_mlp? Available"),
        pytest.param(
            "kha_mlp+gate_outpt_hybrid",
            "Unknown KHA preset 'gate_outpt'. Did you mean gate_output?",
            marks=pytest.mark.whole,
        ),
        pytest.param(
            "kha_mlp+kha_linear",
            "Presets kha_mlp, kha_linear cannot be combined, because",
            marks=pytest.mark.whole,
        ),
    ],
)
def test_an_invalid_spec_name_ends_a_script_with_one_line(name, problem):
    script = "import sys, kha_megatron.mcore, megatron.core.transformer.spec_utils as specs\n"
    script += "specs.import_module(sys.argv[2:4])"
    command = [sys.executable, "-W", "ignore", "-c", script, *SPEC, name, "--bf16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    error = f"error: Invalid layer spec {name!r} in {SPEC[1]}. {problem}"
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1][: len(error)] == error
    assert "Traceback" not in done.stderr


@pytest.mark.whole
def test_the_example_trains(tmp_path):
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/bash\nprintf "%s\\0" "$CUDA_DEVICE_MAX_CONNECTIONS" "$@"\n')
    torchrun.chmod(0o755)
    done = subprocess.run(
        ["bash", EXAMPLE, *SMALL],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MEGATRON": "/megatron"},
        capture_output=True,
        text=True,
        check=True,
    )
    connections, *words = done.stdout.split("\0")[:-1]
    assert connections == "1", "Megatron demands it with tensor parallelism before Blackwell"
    words = words[words.index("/megatron/pretrain_hybrid.py") + 1 :]
    run = start(words, 2, program=STOCK)
    assert run.codes == [0, 0], run.output[-4000:]
    assert "kha_megatron: using layer spec kha_mlp (value=mlp)\n" in run.output
    assert re.search(r"iteration +1/ +1 ", run.output)
    assert "GPTModel IS DEPRECATED" not in run.output


def test_a_stock_script_continues_our_checkpoint(tmp_path):
    """Megatron itself verifies the hashes that we have written."""
    words = [*MODEL, *TRAINING, "--mock-data", "--tokenizer-type", "NullTokenizer"]
    words += ["--vocab-size", "64", "--train-iters", "4"]
    save = ["--save", str(tmp_path / "save"), "--save-interval", "2"]
    ours = ["--device", "cpu", "--gpt-model", "--kha-preset", "kha_mlp"]
    run = start([*ours, *words, *save, "--tensorboard-dir", str(tmp_path / "ours")])
    assert run.codes == [0], run.output[-4000:]
    load = ["--load", str(tmp_path / "save"), "--ckpt-step", "2", "--verify-integrity"]
    stock = [*SPEC, "kha_mlp", "--tensorboard-dir", str(tmp_path / "stock")]
    run = start([*words, *load, *stock], program=STOCK)
    assert run.codes == [0], run.output[-4000:]
    expected = losses(tmp_path / "ours")
    found = losses(tmp_path / "stock")
    assert sorted(found) == [3, 4]
    # our attention is torch's own on a CPU, which adds up in another order
    assert found == pytest.approx({i: expected[i] for i in found}, rel=1e-5)


@pytest.fixture(scope="module")
def gpt_model(corpus, tmp_path_factory):
    """Run eight iterations of a GPTModel in our entry point, with the distributed optimizer."""
    folder = tmp_path_factory.mktemp("gpt")
    words = [*OURS, *corpus, *DISTRIBUTED, "--gpt-model", "--kha-init-seed", "5"]
    words += ["--save", str(folder / "save"), "--tensorboard-dir", str(folder / "tensorboard")]
    run = start([*words, "--save-interval", "4"], 2)
    assert run.codes == [0, 0], run.output[-4000:]
    return run, folder


@pytest.mark.whole
@pytest.mark.parametrize(
    ("source", "layout"),
    [("stock", PARALLEL), ("gpt_model", DISTRIBUTED)],
    ids=["stock", "ours"],
)
def test_our_entry_point_resumes_a_gpt_model_as_a_hybrid_model(
    source,
    layout,
    corpus,
    tmp_path,
    request,
):
    _, folder = request.getfixturevalue(source)
    words = [*OURS, *corpus, *layout, "--load", str(folder / "save"), "--ckpt-step", "4"]
    words += ["--save", str(tmp_path / "save"), "--tensorboard-dir", str(tmp_path / "tensorboard")]
    run = start(words, 2)
    assert run.codes == [0, 0], run.output[-4000:]
    assert run.knocks == "knocks value=mlp in 4 of 4 layers: 432 parameters added"
    assert "4 GPT layers feed 4 attention and 4 MLP positions" in run.output

    expected, found = (losses(f / "tensorboard") for f in (folder, tmp_path))
    assert sorted(found) == [5, 6, 7, 8]
    # float32: the gradient norm is summed over the layers in another order
    assert found == pytest.approx({i: expected[i] for i in found}, rel=1e-6)
    checkpoint = MegatronCheckpoint.open(tmp_path / "save")
    assert read_kha_config(checkpoint) == HeadsConfig(Knock(value="mlp"))
    assert list(read_knock_weights(checkpoint)) == [(layer, "value") for layer in range(LAYERS)]
    # a hybrid model of a GPT model's layers goes to Hugging Face as that
    written = to_hf.plan_export(tmp_path / "save").write(tmp_path / "hf")
    assert Pair.open(tmp_path / "save", written.path).compare().agrees
