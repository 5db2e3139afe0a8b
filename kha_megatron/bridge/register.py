"""Registers KHA models with Megatron-Bridge and transformers when it is imported.

Use this module in frameworks that import a module by name, such as verl::

    actor_rollout_ref.model.external_lib=kha_megatron.bridge.register

In your own code, call :func:`kha_megatron.bridge.register_bridge` instead.
"""

from kha_megatron.bridge import register_bridge

register_bridge()
