"""Checkpoints of Megatron's local layers under Transformer Engine's, and back.

Both hold the same tensors, but some norms under other names, and Transformer Engine's modules also
ask for a state of FP8 each (``_extra_state``), without which Megatron refuses a checkpoint.
"""

import functools
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
)
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

from kha_megatron.checkpoint.megatron import other_names


def load_from_either(*, scales: bool) -> None:
    """Let Megatron load, into either kind of layers, what either kind has saved.

    A norm that a checkpoint has under its other name is asked for by that name, with its optimizer
    state. All else that a checkpoint lacks is refused as before.

    Args:
        scales: whether to ask for the modules' states. They are worth nothing but under delayed
            scaling, which keeps scales and the largest values of past steps in them.
    """
    load = dist_checkpointing.load

    @functools.wraps(load)
    def loading(wanted: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
        stored = load_sharded_metadata(str(folder))

        def ask(entry: Any) -> Any:
            if isinstance(entry, ShardedObject) and entry.key.endswith("_extra_state"):
                # None is what local layers save, and what sets nothing
                return entry if scales else LocalNonpersistentObject(None)
            if isinstance(entry, ShardedTensor) and entry.key not in stored:
                entry.key = next(filter(stored.__contains__, other_names(entry.key)), entry.key)
            return entry

        asked = dict_list_map_outplace(ask, wanted)
        return load(asked, folder, *args, **kwargs)

    dist_checkpointing.load = loading
