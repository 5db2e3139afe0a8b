"""A checkpoint loads under another layout with the same state, outputs and next step.

Loaded state is compared bit for bit, by saving it again. Outputs are compared within ``TOLERANCE``:
another layout reorders sums of a few dozen terms in float32. Adam amplifies the rounding of tiny
gradients: ``STEP_TOLERANCE`` of the length of the step.
"""

import functools
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from kha_megatron.checkpoint.integrity import FileChecks
from kha_megatron.checkpoint.torch_dist import TorchDistFolder
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import MATRICES, PROJECTIONS
from tests.distributed import cases
from tests.distributed.cases import GATES, GLA, GTA, MLA, case
from tests.distributed.launcher import RankError
from tests.distributed.parallelism import _Run, initialize
from tests.distributed.pieces import assemble, pieces

FIRST_IMPORT = 400
"""Seconds for a case: the first one imports all of megatron.training on each rank."""

MICROBATCHES = 4
"""Microbatches of a step, divided over the data-parallel ranks."""

TOLERANCE = 1e-5
STEP_TOLERANCE = 1e-3

KHA = HeadsConfig(Knock(query="gate", key="linear", value="mlp"))
DENSE = {"khas": (KHA,), "layers": 4}
EXPERTS = {"khas": (KHA,), "layers": 3, "model": "moe"}
ZERO = {"ddp": cases.ZERO}
LATENT = {"config": cases.LATENT} | ZERO
TIED = {"khas": (GTA,), "config": cases.TIED} | ZERO
GATED = {"khas": (GATES,), "groups": 2} | ZERO


class Training(_Run):
    """A run that is saved and loaded as in ``megatron.training.checkpointing``."""

    def __init__(self, case, *, filled=True):
        from kha_megatron.mcore import patches

        patches.let_distributed_optimizer_resume()
        initialize(case.layout)
        super().__init__(case, case.khas[0], filled=filled)
        self.args = Namespace(
            ckpt_format="torch_dist",
            no_save_optim=False,
            no_save_rng=True,
            use_distributed_optimizer=case.ddp.get("use_distributed_optimizer", False),
            dist_ckpt_optim_fully_reshardable=True,
            distrib_optim_fully_reshardable_mem_efficient=False,
        )

    def step(self):
        """Return the losses of this rank's microbatches and the gradient norm."""
        self.kept.clear()
        self._accumulate(MICROBATCHES)
        losses = {microbatch: loss.detach() for (_, microbatch), loss in self.kept.items()}
        return losses, self._step()

    def finish(self, folder):
        """Save, make a step, save again, and return the result of the step and the weights."""
        self.save(f"{folder}/state")
        losses, norm = self.step()
        self.save(f"{folder}/stepped")
        weights = list(pieces(self.chunks))
        vars(self.ddp[0]).clear()
        return losses, norm, weights

    def _state(self, **loading):
        from megatron.training import checkpointing

        metadata = checkpointing._build_sharded_state_dict_metadata(self.args)
        return checkpointing.generate_state_dict(
            self.args,
            self.chunks,
            self.optimizer,
            opt_param_scheduler=None,
            rng_state=None,
            iteration=0,
            optim_sd_kwargs={"metadata": metadata, **loading},
            model_sd_kwargs={"metadata": metadata},
        )

    def save(self, folder):
        import queue

        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.core.dist_checkpointing.strategies.fully_parallel import (
            FullyParallelSaveStrategyWrapper,
        )

        filesystem_async._results_queue = queue.Queue()  # a daemonic rank may start no manager
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        dist_checkpointing.save(self._state(), folder, strategy)

    def load(self, folder, *, optimizer=True):
        from megatron.core import dist_checkpointing

        self.args.no_save_optim = not optimizer  # as on the command line, for both directions
        state = self._state(is_loading=True)
        strict = "raise_all" if optimizer else "raise_unexpected"
        state = dist_checkpointing.load(state, folder, strict=strict)
        self.chunks[0].load_state_dict(state["model"])
        if optimizer:
            self.optimizer.load_state_dict(state["optimizer"])


def train_and_save(folder, case):
    training = Training(case)
    for _ in range(3):
        training.step()
    return training.finish(folder)


def load_and_save(source, folder, case, optimizer=True, upcycle=False):
    from kha_megatron.mcore.knocking import MechanismWeight

    training = Training(case, filled=not upcycle)
    if upcycle:
        for module in training.chunks[0].modules():
            if isinstance(module, MechanismWeight):
                module.keep_at_next_load()
    training.load(f"{source}/state", optimizer=optimizer)
    return training.finish(folder)


def losses_and_norm(results):
    """Return the losses of the whole batch and the gradient norm, which must be equal on all ranks.

    Replicas of a weight must be equal too.
    """
    losses = {}
    for losses_of_rank, _, _ in results:
        losses |= losses_of_rank
    (norm,) = {norm for _, norm, _ in results}
    assemble([weights for _, _, weights in results])
    return torch.cat([losses[microbatch] for microbatch in sorted(losses)]), norm


def assert_same_losses(results, expected):
    losses, _ = losses_and_norm(results)
    want, _ = losses_and_norm(expected)
    assert (losses - want).norm() < TOLERANCE * want.norm()


def open_folder(folder):
    return TorchDistFolder(folder, FileChecks(folder, {}))


def read_tensors(folder):
    """Return all tensors of a checkpoint by name."""
    opened = open_folder(folder)
    return {key: opened.read(key) for key in opened.tensors}


def read_optimizer(folder):
    """Return the state of the optimizer that all ranks have in common."""
    return open_folder(folder).read_object("common_state/shard_0_1")[0]["optimizer"]


@pytest.fixture(scope="module")
def run(ranks):
    return functools.partial(ranks, timeout=FIRST_IMPORT)


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    """Save a case after three steps, once for each case."""
    known = {}

    def train(case):
        name = repr(case)
        if name not in known:
            folder = tmp_path_factory.mktemp("trained")
            results = run(train_and_save, case.layout.world, str(folder), case)
            known[name] = folder, results
        return known[name]

    return train


WHOLE = pytest.mark.whole


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        pytest.param(DENSE, {"tp": 2}, {"tp": 4}, id="TP2 to TP4", marks=WHOLE),
        pytest.param(DENSE, {"pp": 2}, {}, id="PP2 to PP1", marks=WHOLE),
        pytest.param(DENSE | ZERO, {"dp": 2}, {}, id="DP2 to DP1, ZeRO", marks=WHOLE),
        pytest.param(DENSE | ZERO, {"tp": 2, "dp": 2}, {"pp": 2}, id="TP2 x DP2 to PP2, ZeRO"),
        pytest.param(
            EXPERTS | ZERO,
            {"dp": 4, "ep": 4},
            {"dp": 4, "ep": 2},
            id="EP4 to EP2 x DP2, ZeRO",
            marks=WHOLE,
        ),
        pytest.param(LATENT | {"khas": (MLA,)}, {"tp": 2}, {"tp": 4}, id="mla", marks=WHOLE),
        pytest.param(LATENT | {"khas": (GLA,)}, {"tp": 2}, {}, id="gla", marks=WHOLE),
        pytest.param(TIED, {"tp": 2}, {"tp": 4}, id="gta", marks=WHOLE),
        pytest.param(GATED, {"tp": 2}, {"tp": 4}, id="gates, more ranks than key/value heads"),
    ],
)
def test_training_continues_alike_under_another_layout(
    run,
    trained,
    tmp_path,
    model,
    before,
    after,
):
    source, expected = trained(case(**model, **before))
    loaded = case(**model, **after)
    results = run(load_and_save, loaded.layout.world, str(source), str(tmp_path), loaded)
    saved = read_tensors(source / "state")
    saved_again = read_tensors(tmp_path / "state")
    assert saved.keys() == saved_again.keys()
    moments = [key for key in saved if ".exp_avg_sq." in key and ".knock_" in key]
    assert len(moments) >= len(loaded.khas[0].variants)
    for key, tensor in saved.items():
        assert torch.equal(tensor, saved_again[key]), key
    assert set(_steps(read_optimizer(source / "state"))) == {3}
    assert set(_steps(read_optimizer(tmp_path / "state"))) == {3}

    assert_same_losses(results, expected)
    _, norm = losses_and_norm(results)
    _, expected_norm = losses_and_norm(expected)
    assert norm == pytest.approx(expected_norm, rel=TOLERANCE)
    stepped = read_tensors(source / "stepped")
    stepped_again = read_tensors(tmp_path / "stepped")
    for key, tensor in saved.items():
        if tensor.is_floating_point():
            moved = (stepped[key] - tensor).norm()
            wrong = (stepped_again[key] - stepped[key]).norm()
            assert moved > 0, key
            assert wrong < STEP_TOLERANCE * moved, key


def _steps(state):
    """Yield the step of every parameter group of every optimizer, wherever Megatron keeps it."""
    if isinstance(state, dict):
        for name in ("step", "common_step"):
            if name in state:
                yield int(state[name])
        state = list(state.values())
    if isinstance(state, list):
        for value in state:
            yield from _steps(value)


@pytest.mark.fast
def test_shared_matrices_are_stored_once(trained):
    """Two and two of the four ranks hold the same matrix, which is one chunk of the file."""
    source, _ = trained(case(tp=2, dp=2, **DENSE, **ZERO))
    tensors = open_folder(source / "state").tensors
    for projection, variant in KHA.variants.items():
        for layer in range(0, 2 * DENSE["layers"], 2):  # the others have no attention
            key = f"decoder.layers.{layer}.self_attention.knock_{projection}.weight"
            for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."):
                stored = tensors[prefix + key]
                assert stored.shape == (len(MATRICES[variant]), 6, 6)
                assert [chunk.offsets for chunk in stored.chunks] == [(0, 0, 0)]


def test_expert_weights_load_on_one_rank(run, trained, tmp_path):
    """Megatron has a separate optimizer for experts with expert parallelism, and none without.

    Its state cannot be loaded into the other kind, which is refused. The weights can.
    """
    source, expected = trained(case(dp=2, ep=2, **EXPERTS))
    load = functools.partial(run, load_and_save, 1, str(source), str(tmp_path), case(**EXPERTS))
    with pytest.raises(RankError, match="Could not find parameter group"):
        load()
    assert_same_losses(load(optimizer=False), expected)


def test_upcycled_matrices_start_as_the_identity_under_another_layout(run, trained, tmp_path):
    source, expected = trained(case(tp=2, **DENSE | {"khas": (HeadsConfig(),)}))
    words = (load_and_save, 2, str(source), str(tmp_path), case(pp=2, **DENSE))
    with pytest.raises(RankError, match=r"Unexpected keys .*self_attention\.knock_value\.weight"):
        run(*words, optimizer=False)
    assert_same_losses(run(*words, optimizer=False, upcycle=True), expected)
    before = read_tensors(source / "state")
    after = read_tensors(tmp_path / "state")
    weights = {key for key in before if not key.startswith("optimizer.")}
    added = set()
    for n in range(0, 2 * DENSE["layers"], 2):
        layer = f"decoder.layers.{n}.self_attention"
        added.update(f"{layer}.knock_{projection}.weight" for projection in PROJECTIONS)
        assert torch.equal(after[f"{layer}.knock_key.weight"], torch.eye(6)[None])
    assert after.keys() - weights == added
    assert all(torch.equal(after[key], before[key]) for key in weights)
