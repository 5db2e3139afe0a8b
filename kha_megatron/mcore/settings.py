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
    named = dict.fromkeys((*PROJECTIONS, *mechanism_types()))
    if name != FROM_ENVIRONMENT:
        preset = KHAConfig.from_preset(name).to_dict()
        for field in named:
            if given.get(field, preset.get(field)) != preset.get(field):
                raise ConfigError(
                    f"--spec {name} knocks {field}={preset.get(field) or 'none'}, and "
                    f"{CONFIG_VARIABLE} says {given[field] or 'none'}: use --spec "
                    f"kha_megatron.mcore.specs {FROM_ENVIRONMENT}, or leave {field} out"
                )
        given = preset | given
    elif not named.keys() & given.keys():
        raise ConfigError(
            f"--spec {name} takes its variants from {CONFIG_VARIABLE}, which "
            + (f"names none of {', '.join(named)}" if text else "is not set")
            + f': export {CONFIG_VARIABLE}=\'{{"value": "mlp"}}\', or use a preset\'s name'
        )
    try:
        return KHAConfig.from_dict(given)
    except ConfigError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {error}") from error


@functools.cache  # every layer asks
def _read(text: str) -> dict[str, Any]:
    """Parse the value of ``KHA_CONFIG``: a JSON object, or the path of a file with one."""
    try:
        given = json.loads(text if text.lstrip().startswith("{") else Path(text).read_bytes())
        if not isinstance(given, dict):
            raise ValueError(f"found {given!r}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{CONFIG_VARIABLE}={text}: expected a JSON object, or the path of a file with one: "
            f"{error}"
        ) from error
    # null and "none" both leave a projection alone
    return {key: None if value == "none" else value for key, value in given.items()}


def publish(
    name: str,
    kha: KHAConfig,
    groups: ProcessGroupCollection,
    *,
    multi_latent: bool = False,
    speak: bool,
) -> None:
    """Compare a named spec's configuration with the other ranks, store it, and log it.

    It is stored in the arguments of Megatron's training loop, which writes them to checkpoints.

    Args:
        groups: process groups of the model.
        multi_latent: whether the model has multi-latent attention.
        speak: whether the first rank of this pipeline stage logs.

    Raises:
        ConfigError: another rank has a different configuration.
    """
    _check_same_everywhere(name, kha)
    for argument, value in kha.to_entries(multi_latent=multi_latent).items():
        setattr(training_arguments(), argument, value)
    if speak and not any(get_pg_rank(getattr(groups, g, None)) for g in ("tp", "dp_cp")):
        # Megatron trains plain attention if it cannot import a --spec, so a success is logged
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
    # the store, not a collective: pipeline stages build their layers at different times, or none
    store = torch.distributed.distributed_c10d._get_default_store()
    mine = json.dumps(kha.to_dict() | {"fold": kha.fold}, sort_keys=True)
    first = store.compare_set(f"kha_megatron/{name}", "", mine).decode()
    if first != mine:
        raise ConfigError(
            f"--spec {name} is {mine} on rank {torch.distributed.get_rank()} and {first} on the "
            f"rank that came first: export the same {CONFIG_VARIABLE} on all nodes"
        )
