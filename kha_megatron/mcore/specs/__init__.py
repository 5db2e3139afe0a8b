"""Layer specs with KHA for GPT and hybrid models.

With stock Megatron scripts, you can select a spec by name::

    --spec kha_megatron.mcore.specs kha_mlp+gate_output

In Python, build one with :func:`kha_hybrid_stack_spec` or :func:`kha_layer_spec`, or use
:func:`with_kha` to convert an existing spec.

Only this module has side effects when it is imported, because ``--spec`` does nothing but import
it: the named specs, a patch of Megatron, and an error message for invalid names.
"""

import sys

from kha_megatron.errors import ConfigError
from kha_megatron.heads.config import CONFIG_VARIABLE, PRESETS, HeadsConfig, is_preset_name
from kha_megatron.mcore.compat import megatron_imports

with megatron_imports():
    from megatron.core.transformer.spec_utils import ModuleSpec

    from kha_megatron.mcore.gpt import KHATransformerLayer, Spec, kha_layer_spec, with_kha
    from kha_megatron.mcore.hybrid import kha_hybrid_stack_spec
    from kha_megatron.mcore.patches import support_sequence_parallel_final_norm
    from kha_megatron.mcore.settings import FROM_ENVIRONMENT

__all__ = ["Spec", "kha_hybrid_stack_spec", "kha_layer_spec", "with_kha"]


# --spec PACKAGE NAME looks up attributes of the package
def _add_named_spec(name: str) -> None:
    globals()[name] = ModuleSpec(module=KHATransformerLayer, params={"spec_name": name})
    globals()[f"{name}_hybrid"] = kha_hybrid_stack_spec(name)


for _name in (FROM_ENVIRONMENT, *PRESETS):
    _add_named_spec(_name)


def __getattr__(name: str) -> ModuleSpec:
    """Add the specs of several presets, e.g. ``kha_mlp+gate_output_hybrid``.

    Megatron calls ``__import__(package, fromlist=[name])``, for which Python looks up this
    attribute, and then reads ``vars(package)[name]``. Python only does this for packages.
    """
    presets = name.removesuffix("_hybrid")
    if not is_preset_name(presets):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _add_named_spec(presets)
    return globals()[name]


def _check_spec_name(words: list[str]) -> None:
    """Exit with an error message for ``--spec`` with an invalid name (Megatron: KeyError)."""
    if __name__ not in words:
        return
    name_index = words.index(__name__) + 1
    if name_index == len(words):
        return
    name = words[name_index]
    if name in globals():
        return
    try:
        HeadsConfig.from_preset(name.removesuffix("_hybrid"))
    except ConfigError as error:
        sys.exit(
            f"error: Invalid layer spec {name!r} in {__name__}. {error} The spec "
            f"{FROM_ENVIRONMENT} reads {CONFIG_VARIABLE}. For hybrid models, append _hybrid."
        )


support_sequence_parallel_final_norm()
_check_spec_name(sys.argv)
