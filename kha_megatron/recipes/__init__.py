"""Training recipes, and how to run them with NeMo-Run.

Example::

    job = prepare_job(get_recipe("quickstart"), data=..., output=...)
    result = launch_job(job)  # trains a small model on this machine
"""

import difflib
import fnmatch
from collections.abc import Mapping
from types import MappingProxyType

from kha_megatron.errors import ConfigError
from kha_megatron.recipes.laptop import LAPTOP, QUICKSTART
from kha_megatron.recipes.launching import Command, LaunchResult, dry_run, launch_job
from kha_megatron.recipes.log_lines import Step, read_steps
from kha_megatron.recipes.logs import Failure
from kha_megatron.recipes.other_heads import GATED, INTERACTIVE, LONG_CONTEXT, MOH
from kha_megatron.recipes.own import is_own_recipe, load_own_recipe
from kha_megatron.recipes.paper import EQUATION_12, PAPER
from kha_megatron.recipes.prepare import Job, Slurm, prepare_job
from kha_megatron.recipes.recipe import Recipe
from kha_megatron.recipes.slurm import Submission, SubmitResult, dry_submission, submit
from kha_megatron.recipes.tables import ABLATION, TABLES

__all__ = [
    "RECIPES",
    "Command",
    "Failure",
    "Job",
    "LaunchResult",
    "Recipe",
    "Slurm",
    "Step",
    "Submission",
    "SubmitResult",
    "dry_run",
    "dry_submission",
    "find_recipes",
    "get_recipe",
    "is_own_recipe",
    "launch_job",
    "prepare_job",
    "read_steps",
    "submit",
]

_ALL_RECIPES = (
    QUICKSTART,
    EQUATION_12,
    *LAPTOP,
    *PAPER,
    *TABLES,
    *ABLATION,
    *INTERACTIVE,
    *MOH,
    *GATED,
    *LONG_CONTEXT,
)
RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _ALL_RECIPES})


def get_recipe(name: str) -> Recipe:
    """Look up a recipe by name, or import the user's own, e.g. ``my_recipes.py:DEEP``.

    Raises:
        ConfigError: If there is no such recipe. The message suggests similar names.
    """
    if is_own_recipe(name):
        return load_own_recipe(name)
    if name not in RECIPES:
        similar = difflib.get_close_matches(name, RECIPES, n=3) or ["quickstart"]
        raise ConfigError(
            f"Unknown recipe {name!r}. Did you mean {' or '.join(similar)}? Run `kha-megatron "
            "recipes list` to see all recipes."
        )
    return RECIPES[name]


def find_recipes(pattern: str) -> list[Recipe]:
    """Return all recipes whose name matches a pattern, e.g. ``table2/*`` or ``table2``.

    Raises:
        ConfigError: If no recipe matches.
    """
    matches = []
    for name, recipe in RECIPES.items():
        is_in_folder = fnmatch.fnmatch(name, f"{pattern}/*")  # "table2" lists all of Table 2
        if is_in_folder or fnmatch.fnmatch(name, pattern):
            matches.append(recipe)
    if not matches:
        raise ConfigError(f"No recipe matches {pattern!r}. Run `kha-megatron recipes list`.")
    return matches
