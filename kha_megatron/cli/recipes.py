"""``kha-megatron recipes``: list recipes and show their arguments."""

import fnmatch
import shlex
from typing import Annotated, Any

import typer

from kha_megatron import recipes
from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON, RecipeName
from kha_megatron.cli.running import Commands
from kha_megatron.recipes import Recipe

recipes_app = Commands(name="recipes", help="List available recipes.", no_args_is_help=True)


@recipes_app.command("list")
def list_recipes(
    pattern: Annotated[str, typer.Argument(help="Pattern for names, e.g. 'table2/*'.")] = "*",
    as_json: AsJSON = False,
) -> None:
    """List all recipes with the final loss reported in the paper.

    Examples:
      kha-megatron recipes list 'table5/*'
    """
    chosen = [r for name, r in recipes.RECIPES.items() if fnmatch.fnmatch(name, pattern)]
    if as_json:
        console.print_json([recipe_data(recipe) for recipe in chosen])
        return
    for recipe in chosen:
        line = f"{recipe.name:32} {recipe.paper.get('loss', ''):>6}  {recipe.description}"
        console.out.print(line, markup=False, emoji=False)


@recipes_app.command("show")
def show_recipe(recipe: RecipeName, as_json: AsJSON = False) -> None:
    """Show the Megatron arguments of a recipe.

    Examples:
      kha-megatron recipes show table2/mlp-v
    """
    chosen = recipes.get_recipe(recipe)
    if as_json:
        console.print_json(recipe_data(chosen))
        return
    lines = [
        f"{chosen.name}: {chosen.description}",
        *(f"  {name} in the paper: {value}" for name, value in chosen.paper.items()),
        f"  head mechanisms: {chosen.run.kha}",
        *([f"  note: {chosen.note}"] if chosen.note else ()),
        "",
        *(shlex.join([flag, *words]) for flag, words in chosen.run.flags.items()),
    ]
    console.out.print("\n".join(lines), markup=False, emoji=False)


def recipe_data(recipe: Recipe) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "description": recipe.description,
        "knocks": str(recipe.run.kha),
        "paper": recipe.paper,
        "note": recipe.note,
        "ranks": recipe.ranks,
        "vocab_size": recipe.run.vocab_size,
        "environment": recipe.environment,
        "arguments": recipe.run.flags,
    }
