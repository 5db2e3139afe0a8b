"""Read the configuration of a spec that a stock Megatron script chooses by name.

The name selects the variants. Everything else comes from the environment variable ``KHA_CONFIG``: a
JSON object of :class:`~kha_megatron.config.KHAConfig` fields, or the path of a file with one::

    KHA_CONFIG='{"value": "mlp", "init_seed": 5}' ... --spec kha_megatron.mcore.specs kha
    KHA_CONFIG=/shared/kha.json ...                   --spec kha_megatron.mcore.specs kha_mlp

The spec ``kha`` reads all fields. With a preset's name, the variable may not contradict the preset.
"""

import functools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_pg_rank

from kha_megatron.announcements import announce
from kha_megatron.config import CONFIG_VARIABLE, KHAConfig, mechanism_types
from kha_megatron.errors import ConfigError
from kha_megatron.heads.knock import PROJECTIONS

FROM_ENVIRONMENT = "kha"
"""Name of the spec without variants of its own."""


def named_config(name: str) -> KHAConfig:
    """Return the configuration of the spec ``name`` (a preset, or ``kha``) and ``KHA_CONFIG``.

    Raises:
        ConfigError: ``KHA_CONFIG`` is invalid, contradicts the preset, or names no variant.
    """
    text = os.environ.get(CONFIG_VARIABLE, "")
    given = _read(text) if text else {}
    named = (*PROJECTIONS, *mechanism_types())
    if name != FROM_ENVIRONMENT:
        preset = KHAConfig.from_preset(name).to_dict()
        for field in named:
            if given.get(field, preset.get(field)) != preset.get(field):
                raise ConfigError(
                    f"--spec {name} has {field}={preset.get(field) or 'none'}, but "
                    f"{CONFIG_VARIABLE} has {field}={given[field] or 'none'}. Use --spec "
                    f"kha_megatron.mcore.specs {FROM_ENVIRONMENT}, or remove {field}."
                )
        given = preset | given
    elif not given.keys() & set(named):
        raise ConfigError(
            f"--spec {name} reads its mechanisms from {CONFIG_VARIABLE}, which "
            + (f"has none of {', '.join(named)}." if text else "is not set.")
            + f' Export {CONFIG_VARIABLE}=\'{{"value": "mlp"}}\', or use the name of a preset.'
        )
    try:
        return KHAConfig.from_dict(given)
    except ConfigError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {error}") from error


@functools.cache  # called for every layer
def _read(text: str) -> dict[str, Any]:
    """Parse the value of ``KHA_CONFIG``: a JSON object, or the path of a file with one."""
    try:
        given = json.loads(text if text.lstrip().startswith("{") else Path(text).read_bytes())
        if not isinstance(given, dict):
            raise ValueError(f"found {given!r}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Expected a JSON object or the path of a file with one in {CONFIG_VARIABLE}={text}: "
            f"{error}"
        ) from error
    return {key: None if value == "none" else value for key, value in given.items()}


def publish(
    name: str,
    kha: KHAConfig,
    groups: ProcessGroupCollection,
    *,
    multi_latent: bool = False,
    logs: bool,
) -> None:
    """Compare a named spec's configuration with the other ranks, store it, and log it.

    It is stored in the arguments of Megatron's training loop, which writes them to checkpoints.

    ``logs``: whether the first rank of this pipeline stage logs.

    Raises:
        ConfigError: another rank has a different configuration.
    """
    _check_same_everywhere(name, kha)
    for argument, value in kha.to_entries(multi_latent=multi_latent).items():
        setattr(training_arguments(), argument, value)
    if logs and not any(get_pg_rank(getattr(groups, g, None)) for g in ("tp", "dp_cp")):
        # Megatron trains plain attention if it cannot import a --spec, so log the success
        announce(f"using layer spec {name} ({kha})")


def training_arguments() -> Any:
    """Return the arguments of Megatron's training loop, or a namespace if it does not run."""
    training = sys.modules.get("megatron.training.global_vars")
    try:
        return training.get_args() if training else SimpleNamespace()
    except AssertionError:  # not parsed yet
        return SimpleNamespace()


def _check_same_everywhere(name: str, kha: KHAConfig) -> None:
    if not torch.distributed.is_initialized():
        return
    # not a collective: pipeline stages build their layers at different times, and some have none
    store = torch.distributed.distributed_c10d._get_default_store()
    mine = json.dumps(kha.to_dict() | {"fold": kha.fold}, sort_keys=True)
    first = store.compare_set(f"kha_megatron/{name}", "", mine).decode()
    if first != mine:
        raise ConfigError(
            f"--spec {name} is {mine} on rank {torch.distributed.get_rank()}, but {first} on "
            f"another rank. Export the same {CONFIG_VARIABLE} on all nodes."
        )
