"""Is the checkpoint that training would continue from of the same KHA configuration?"""

from argparse import Namespace
from pathlib import Path

from kha_megatron.config import KHAConfig
from kha_megatron.errors import CheckpointError
from kha_megatron.mcore.checkpoint import TRACKER, MegatronCheckpoint


def check_same_kha(args: Namespace, kha: KHAConfig) -> None:
    """Refuse to load a checkpoint that was trained with another configuration.

    Looks at ``--load`` (with ``--ckpt-step``) and ``--pretrained-checkpoint`` in the torch_dist
    format; Megatron itself refuses missing and unknown keys in its other formats. A ``--load``
    folder without a tracker file starts from scratch, as in Megatron, unless ``--ckpt-step`` names
    an iteration in it.

    Raises:
        CheckpointError: it was trained with another configuration or without KHA, or it is damaged
            or incomplete.
    """
    if args.ckpt_format != "torch_dist":
        return
    for folder in filter(None, (args.load, args.pretrained_checkpoint)):
        step = f"iter_{args.ckpt_step:07d}" if args.ckpt_step else None  # as in Megatron, 0 is none
        if not step and not (Path(folder) / TRACKER).is_file():
            continue
        checkpoint = MegatronCheckpoint.open(Path(folder) / step if step else folder)
        saved = checkpoint.kha or KHAConfig()
        if saved.variants != kha.variants:
            raise CheckpointError(
                f"{checkpoint.path} was trained with KHA on {saved}, and the command line asks for "
                f"{kha}: resume with the same --kha-* arguments, or start without --load"
            )
