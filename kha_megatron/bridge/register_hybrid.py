"""Like :mod:`kha_megatron.bridge.register`, but ``AutoBridge`` builds hybrid models."""

from kha_megatron.bridge import register_bridge

register_bridge(hybrid=True)
