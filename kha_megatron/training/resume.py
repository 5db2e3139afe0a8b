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
    folder without a tracker file starts from scratch, as in Megatron.

    Raises:
        CheckpointError: it was trained with another configuration or without KHA, or it is damaged
            or incomplete.
    """
    if args.ckpt_format != "torch_dist":
        return
    for folder in filter(None, (args.load, args.pretrained_checkpoint)):
        if not (Path(folder) / TRACKER).is_file():
            continue
        step = None if args.ckpt_step is None else f"iter_{args.ckpt_step:07d}"
        checkpoint = MegatronCheckpoint.open(Path(folder) / step if step else folder)
        saved = checkpoint.kha or KHAConfig()
        if saved.variants != kha.variants:
            raise CheckpointError(
                f"{checkpoint.path} was trained with KHA on {saved}, and the command line asks for "
                f"{kha}: resume with the same --kha-* arguments, or start without --load"
            )
