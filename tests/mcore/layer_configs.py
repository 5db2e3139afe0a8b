"""Give each layer of a HybridModel its own config, as upstream pull request 6313 does."""

from contextlib import ExitStack, contextmanager
from copy import deepcopy
from unittest import mock

from megatron.core.models.hybrid import hybrid_block, hybrid_layer_allocation, hybrid_model
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

CLASSES = "LAYER_SYMBOL_TO_CONFIG_CLASS"


def _copy(config, symbol, classes):
    copied = deepcopy(config)
    copied.__class__ = classes[symbol]
    return copied


@contextmanager
def own_layer_configs():
    """Build hybrid models by the contract of 6313. Megatron versions with 6313 are not changed.

    ``HybridModel`` passes ``layer_config_list`` in place of ``layer_type_list``, and
    ``HybridStack`` passes a config of this list to each layer.
    """
    if hasattr(hybrid_layer_allocation, CLASSES):
        yield
        return
    classes = {}
    for symbol in hybrid_layer_allocation.Symbols.VALID_LAYERS:
        base = MLATransformerConfig if symbol in "+D" else TransformerConfig
        classes[symbol] = type("LayerConfig", (base,), {})
    build_module = hybrid_model.build_module
    build_stack = hybrid_block.HybridStack.__init__

    def build_with_configs(spec, config, *args, layer_type_list, **kwargs):
        configs = [_copy(config, symbol, classes) for symbol in layer_type_list]
        return build_module(
            spec,
            config,
            *args,
            layer_config_list=configs,
            **kwargs,
        )

    def build_from_configs(self, config, submodules, *, layer_config_list, **kwargs):
        configs = iter(layer_config_list)
        symbols = [
            next(symbol for symbol in classes if type(layer_config) is classes[symbol])
            for layer_config in layer_config_list
        ]

        def build_layer(spec, config, **options):
            return build_module(spec, config=next(configs), **options)

        with mock.patch.object(hybrid_block, "build_module", build_layer):
            build_stack(
                self,
                config,
                submodules,
                layer_type_list=symbols,
                **kwargs,
            )

    with ExitStack() as stack:
        for owner, name, replacement in (
            (hybrid_model, "build_module", build_with_configs),
            (hybrid_block.HybridStack, "__init__", build_from_configs),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        stack.enter_context(
            mock.patch.object(hybrid_layer_allocation, CLASSES, classes, create=True)
        )
        yield
