"""Recipes in a Python file of the user, selected with ``FILE.py:NAME``.

The file is executed, like any other program of the user. It contains recipes as variables::

    from dataclasses import replace
    from kha_megatron.recipes import get_recipe

    DEEP = replace(get_recipe("dense-0.6b"), name="deep").updated(num_layers=48)

Only the command that launches a job reads the file. The ranks get the arguments of the recipe.
"""

import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

from kha_megatron.errors import ConfigError, in_one_line
from kha_megatron.recipes.recipe import Recipe

_NAME = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*", re.ASCII)
"""Names of recipes are used for directories and experiments."""


def is_own_recipe(name: str) -> bool:
    """Whether the name selects a recipe in a file, e.g. ``my_recipes.py:DEEP``."""
    return ".py:" in name or name.endswith(".py")


def load_own_recipe(name: str) -> Recipe:
    """Return a recipe from a file, given as ``FILE.py:NAME``.

    Raises:
        ConfigError: If there is no such file or variable, if the file cannot be executed, or if the
            variable is not a valid recipe.
    """
    file_name, _, variable = name.rpartition(":")
    if not file_name.endswith(".py"):
        raise ConfigError(
            f"Expected FILE.py:NAME, where NAME is a recipe in the file, got {name!r}."
        )
    module = _import_file(Path(file_name))
    recipes = {}
    for attribute, value in vars(module).items():
        if isinstance(value, Recipe):
            recipes[attribute] = value
    if not recipes:
        raise ConfigError(f"{file_name} does not contain any kha_megatron.recipes.Recipe.")
    if variable not in recipes:
        if hasattr(module, variable):
            problem = f"{variable} in {file_name} is not a Recipe"
        else:
            problem = f"{file_name} does not contain {variable}"
        raise ConfigError(f"{problem}. Recipes in this file: {', '.join(recipes)}.")
    recipe = recipes[variable]
    if not _NAME.fullmatch(recipe.name):
        raise ConfigError(
            f"The name of {variable} in {file_name} must consist of letters, digits, '.', '_', '+' "
            f"and '-', with '/' in between, got {recipe.name!r}."
        )
    return recipe


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"There is no file {path}. Pass the recipe as FILE.py:NAME.")
    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()
    # registered, because dataclasses look up the module of their class
    module_name = f"_kha_recipes_{digest[:16]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        reason = f"{type(error).__name__}: {in_one_line(error)}"
        raise ConfigError(f"Could not execute {path}: {reason}") from error
    return module
