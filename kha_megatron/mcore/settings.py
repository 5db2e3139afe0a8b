"""KHA settings for stock Megatron scripts (``--spec``).

The spec name is a preset or ``kha``. For other settings of
:class:`~kha_megatron.heads.config.HeadsConfig`, use the environment variable ``KHA_CONFIG``, which
can be JSON or the path to a JSON file::

    KHA_CONFIG='{"value": "mlp", "init_seed": 5}' ... --spec kha_megatron.mcore.specs kha
    KHA_CONFIG=/shared/kha.json ...                   --spec kha_megatron.mcore.specs kha_mlp
"""

import functools
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_pg_rank

from kha_megatron.announcements import announce
from kha_megatron.errors import ConfigError
from kha_megatron.heads.config import CONFIG_VARIABLE, HeadsConfig
from kha_megatron.heads.knock import PROJECTIONS
from kha_megatron.heads.registry import mechanism_types

FROM_ENVIRONMENT = "kha"  # spec that reads all settings from KHA_CONFIG


def named_config(name: str) -> HeadsConfig:
    """Build the KHA config for a spec name, including the fields set in ``KHA_CONFIG``.

    Raises:
        ConfigError: If ``KHA_CONFIG`` is invalid, conflicts with the preset or has no mechanism.
    """
    variable = os.environ.get(CONFIG_VARIABLE, "")
    settings = _read(variable) if variable else {}
    mechanisms = (*PROJECTIONS, *mechanism_types())
    if name == FROM_ENVIRONMENT:
        if settings.keys().isdisjoint(mechanisms):
            raise ConfigError(
                f"--spec {name} requires {CONFIG_VARIABLE} to set at least one of "
                f"{', '.join(mechanisms)}, got {variable!r}. For example, export "
                f'{CONFIG_VARIABLE}=\'{{"value": "mlp"}}\'.'
            )
    else:
        preset = HeadsConfig.from_preset(name).to_dict()
        _check_same_mechanisms(name, preset, settings, mechanisms)
        settings = preset | settings
    try:
        return HeadsConfig.from_dict(settings)
    except ConfigError as error:
        raise ConfigError(f"{CONFIG_VARIABLE}: {error}") from error


def _check_same_mechanisms(
    spec_name: str,
    preset: Mapping[str, Any],
    settings: Mapping[str, Any],
    mechanisms: Iterable[str],
) -> None:
    """Check that ``KHA_CONFIG`` does not change the mechanisms that the spec is named after."""
    for mechanism in mechanisms:
        expected = preset.get(mechanism)
        value = settings.get(mechanism, expected)
        if value != expected:
            raise ConfigError(
                f"{mechanism}={value or 'none'} in {CONFIG_VARIABLE} conflicts with --spec "
                f"{spec_name}, which has {mechanism}={expected or 'none'}. Remove {mechanism}, or "
                f"use --spec kha_megatron.mcore.specs {FROM_ENVIRONMENT}."
            )


@functools.cache  # called for every layer
def _read(variable: str) -> dict[str, Any]:
    """Parse ``KHA_CONFIG``, or the file whose path it is."""
    is_json = variable.lstrip().startswith("{")
    try:
        settings = json.loads(variable if is_json else Path(variable).read_bytes())
        if not isinstance(settings, dict):
            raise ValueError(f"got {settings!r}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{CONFIG_VARIABLE}={variable} must be a JSON object or the path to a JSON file: "
            f"{error}"
        ) from error
    for name, value in settings.items():
        if value == "none":
            settings[name] = None
    return settings


def publish(
    name: str,
    kha: HeadsConfig,
    groups: ProcessGroupCollection,
    *,
    multi_latent: bool,
    logs: bool,
) -> None:
    """Add the KHA config to Megatron's args, so that it is saved in checkpoints.

    With ``logs=True``, the first rank of the pipeline stage also logs it.

    Raises:
        ConfigError: If another rank uses a different config.
    """
    _check_same_everywhere(name, kha)
    entries = kha.to_entries(multi_latent=multi_latent)
    vars(training_arguments()).update(entries)
    tp_rank = get_pg_rank(getattr(groups, "tp", None))
    dp_cp_rank = get_pg_rank(getattr(groups, "dp_cp", None))
    if logs and tp_rank == 0 and dp_cp_rank == 0:
        # without this line, Megatron failed to import the spec and trains plain attention
        announce(f"using layer spec {name} ({kha})")


def training_arguments() -> Any:
    """Get Megatron's args. Outside of its training loop, the result is an empty namespace."""
    training = sys.modules.get("megatron.training.global_vars")
    try:
        return training.get_args() if training else SimpleNamespace()
    except AssertionError:  # not parsed yet
        return SimpleNamespace()


def _check_same_everywhere(name: str, kha: HeadsConfig) -> None:
    if not torch.distributed.is_initialized():
        return
    # not a collective, because pipeline stages without layers may not get here
    store = torch.distributed.distributed_c10d._get_default_store()
    local_config = json.dumps(kha.to_dict(), sort_keys=True)
    first_config = store.compare_set(f"kha_megatron/{name}", "", local_config).decode()
    if first_config != local_config:
        raise ConfigError(
            f"Ranks use different KHA configs for --spec {name}: {local_config} on rank "
            f"{torch.distributed.get_rank()}, but {first_config} on another rank. Export the same "
            f"{CONFIG_VARIABLE} on all nodes."
        )
