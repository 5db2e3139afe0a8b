"""Versions of installed packages, to be written down or held against ``pyproject.toml``.

Nothing decides by them what to do with Megatron: that is ``kha_megatron.mcore.compat``'s alone.
"""

from importlib import metadata


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None if there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
