"""Errors of `register_bridge()` without a supported Megatron-Bridge."""

from importlib import metadata

import pytest

from kha_megatron import bridge
from kha_megatron.errors import MissingDependencyError, VersionError


def no_package(name):
    raise metadata.PackageNotFoundError(name)


def test_without_megatron_bridge(monkeypatch):
    monkeypatch.setattr(metadata, "version", no_package)
    for arguments in ((), ({"some": "settings"},)):
        with pytest.raises(MissingDependencyError, match=r"pip install '\.\[bridge\]'"):
            bridge.register_bridge(*arguments)


@pytest.mark.parametrize("version", ["0.5.1", "0.60.0"])
def test_another_version(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(VersionError, match=f"megatron-bridge {version} is not supported"):
        bridge.register_bridge()
