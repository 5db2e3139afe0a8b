"""The models that layers and steps are measured on, as arguments of Megatron's.

Does not import Megatron.
"""

import importlib.util
from collections.abc import Sequence

from kha_megatron.mcore import compat, cpu
from kha_megatron.model.words import Arguments, parse
from kha_megatron.recipes import get_recipe

SHAPES = {
    "moe": ("moe-a0.8b-6.6b", []),
    "dense": ("dense-3.9b", []),
    "tiny": ("quickstart", ["--kv-channels", "64"]),  # a head dim that the kernels have
}
"""Names on the command line: a recipe whose sizes they are, and what to change in it."""

PRECISIONS = {
    "bf16": [],
    "delayed": ["--fp8-format", "hybrid", "--fp8-recipe", "delayed"],
    "tensorwise": ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "blockwise": ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"],
    "mxfp8": ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"],
}
"""bfloat16, and the FP8 recipes of Megatron with bfloat16 around them."""

_ONE_RANK: Arguments = {
    "--tensor-model-parallel-size": ("1",),
    "--expert-model-parallel-size": ("1",),
    "--micro-batch-size": ("1",),
    "--bf16": (),
}
_DROPPED = {"--sequence-parallel", "--device", "--kha-preset"}
_FUSED_EXPERTS: Arguments = {"--moe-grouped-gemm": (), "--moe-permute-fusion": ()}


def has(package: str) -> bool:
    """Whether a package is installed; of Transformer Engine, whether all of it is."""
    if package == "transformer_engine" and compat.lacks_te_extension():
        return False
    return importlib.util.find_spec(package) is not None


def arguments_of(
    shape: str,
    precision: str,
    *,
    layers: int,
    sequence: int,
    on_cpu: bool,
    words: Sequence[str] = (),
) -> Arguments:
    """Of the recipe on one rank, with Transformer Engine's fusions where there is that.

    Args:
        shape: a key of :data:`SHAPES`.
        precision: a key of :data:`PRECISIONS`.
        layers: how many.
        sequence: tokens of one.
        on_cpu: whether it runs there, without Transformer Engine.
        words: more arguments, which win.

    Raises:
        ConfigError: one of ``words`` belongs to no flag.
    """
    recipe, changes = SHAPES[shape]
    arguments = get_recipe(recipe).run_for(changes).flags
    arguments = {flag: value for flag, value in arguments.items() if flag not in _DROPPED}
    arguments |= _ONE_RANK | {
        "--num-layers": (str(layers),),
        "--seq-length": (str(sequence),),
        "--max-position-embeddings": (str(sequence),),
    }
    if on_cpu or not has("transformer_engine"):
        arguments |= {
            flag: () if word is None else (word,)
            for flag, word in cpu.MEGATRON_FLAGS.items()
            if on_cpu or flag != "--distributed-backend"
        }
    elif "--num-experts" in arguments:
        arguments |= _FUSED_EXPERTS
    return arguments | parse(PRECISIONS[precision]) | parse(words)
