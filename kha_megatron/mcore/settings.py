"""What a spec that was chosen by its name knocks, in a script that knows nothing of KHA.

A name carries the variants. What it cannot carry comes from the environment variable
``KHA_CONFIG``: a JSON object of :class:`~kha_megatron.config.KHAConfig` fields, or the path of a
file that holds one::

    KHA_CONFIG='{"value": "mlp", "init_seed": 5}' ... --spec kha_megatron.mcore.specs kha
    KHA_CONFIG=/shared/kha.json ...                   --spec kha_megatron.mcore.specs kha_mlp

The spec ``kha`` takes all of it. A preset's name takes the rest (``init``, ``init_seed``,
``attention``, ``latent_heads``, ``fold``), and refuses variants that contradict it.
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
"""Name of the spec that has no variants of its own."""


def named_config(name: str) -> KHAConfig:
    """What the spec of this name knocks, ``KHA_CONFIG`` included.

    Args:
        name: a preset, or ``kha``.

    Raises:
        ConfigError: ``KHA_CONFIG`` cannot be read, has an unknown key or value, contradicts the
            preset, or says nothing of the variants that ``kha`` needs.
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
    """The fields that the variable, or the file that it names, holds."""
    source = CONFIG_VARIABLE
    if not text.lstrip().startswith("{"):
        source = f"{CONFIG_VARIABLE}={text}"
        try:
            text = Path(text).read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{source} is neither a JSON object nor a file that can be read: {error}"
            ) from error
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{source} holds {given!r} instead of a JSON object of KHA settings")
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
    """Check a named spec's configuration against the other ranks', store it, and print it.

    It is stored among the arguments of Megatron's training loop, if that is what runs, so that
    they carry it into every checkpoint.

    Args:
        groups: of the model being built.
        multi_latent: whether its attention is.
        speak: whether this pipeline stage prints; its first rank does.

    Raises:
        ConfigError: another rank has another configuration.
    """
    _check_same_everywhere(name, kha)
    for argument, value in kha.recording(multi_latent=multi_latent).items():
        setattr(training_arguments(), argument, value)
    if speak and not any(get_pg_rank(getattr(groups, g, None)) for g in ("tp", "dp_cp")):
        # Megatron answers a --spec that it cannot import with plain attention, so this one speaks
        announce(f"spec {name} knocks {kha}")


def training_arguments() -> Any:
    """The arguments of Megatron's training loop; a stand-in where it does not run."""
    training = sys.modules.get("megatron.training.global_vars")
    try:
        return training.get_args() if training else SimpleNamespace()
    except AssertionError:  # Megatron's answer before it has any
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
