"""``--kha-upcycle``: a new run whose weights come from a checkpoint that has no KHA.

The shared matrices start at the identity, so the first loss is that of the model without them, bit
for bit. As with ``--finetune``, the optimizer, the random states, the learning-rate schedule and
the iteration start anew.
"""

from argparse import Namespace
from pathlib import Path

from kha_megatron.checkpoint.megatron import MegatronCheckpoint
from kha_megatron.config import KHAConfig
from kha_megatron.errors import CheckpointError, ConfigError
from kha_megatron.model.recorded import kha_of
from kha_megatron.training.resume import checkpoint_to_load, starts_from_pretrained

_NOT_ON_RESTART = {
    "finetune": "--finetune",
    "ckpt_step": "--ckpt-step",
    "non_persistent_ckpt_type": "--non-persistent-ckpt-type",
    "moe_use_upcycling": "--moe-use-upcycling",
}
"""Megatron would reset the run's iteration, pick another one, not look for it, or start anew."""


def checkpoint_to_upcycle(args: Namespace, kha: KHAConfig) -> Path | None:
    """The checkpoint without KHA from which this run starts.

    Returns:
        None without ``--kha-upcycle``, and when the run goes on from its own checkpoint.

    Raises:
        ConfigError: a restart with the same command line would not go on with the run.
        CheckpointError: the checkpoint has KHA already, or is damaged or incomplete.
    """
    if not args.kha_upcycle:
        return None
    _check_restart(args)
    if not starts_from_pretrained(args):
        return None
    path = checkpoint_to_load(args)
    assert path is not None  # the pretrained one at least
    found = kha_of(MegatronCheckpoint.open(path)) or KHAConfig()
    if found.without_output_gate().mechanisms or found.has_output_gate != kha.has_output_gate:
        raise CheckpointError(
            f"{path} was trained with KHA on {found}, and the command line asks for {kha}: "
            "--kha-upcycle adds to a model that has none of it: remove --kha-upcycle"
        )
    return path


def _check_restart(args: Namespace) -> None:
    """A job that the scheduler starts again must find its own checkpoints first."""
    if args.pretrained_checkpoint is None:
        raise ConfigError(
            "--kha-upcycle starts from --pretrained-checkpoint FOLDER: name the checkpoint there, "
            "and the run's own folder in --load and --save"
        )
    if args.save and args.load != args.save:
        raise ConfigError(
            f"--kha-upcycle with --load {args.load} and --save {args.save}: a restart would start "
            f"again from --pretrained-checkpoint and overwrite the run: add --load {args.save}"
        )
    for folder in (args.load, args.pretrained_checkpoint):
        if "://" in str(folder):
            raise ConfigError(f"--kha-upcycle cannot look into {folder}: name a folder")
    for name, flag in _NOT_ON_RESTART.items():
        if getattr(args, name):
            raise ConfigError(
                f"--kha-upcycle with {flag}: it would keep the run from going on with its own "
                f"checkpoint after a restart: remove {flag}"
            )
