"""``kha-megatron recipes``: list and show recipes."""

import shlex
from typing import Annotated, Any

import typer

from kha_megatron import recipes
from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON, HeadsFrom, RecipeName
from kha_megatron.cli.running import Commands
from kha_megatron.recipes import Recipe

recipes_app = Commands(
    name="recipes",
    help="List and show training recipes.",
    no_args_is_help=True,
)


@recipes_app.command("list")
def list_recipes(
    pattern: Annotated[str, typer.Argument(help="Which recipes to list, e.g. 'table2/*'.")] = "*",
    as_json: AsJSON = False,
) -> None:
    """List recipes, with the final loss from the paper if it was reported.

    Examples:
      kha-megatron recipes list 'table5/*'
    """
    chosen = recipes.find_recipes(pattern)
    if as_json:
        console.print_json([recipe_data(recipe) for recipe in chosen])
        return
    for recipe in chosen:
        loss = recipe.paper.get("loss", "")
        line = f"{recipe.name:32} {loss:>6}  {recipe.description}"
        console.out.print(line, markup=False)


@recipes_app.command("show")
def show_recipe(
    recipe: RecipeName,
    heads_from: HeadsFrom = None,
    as_json: AsJSON = False,
) -> None:
    """Show a recipe and its Megatron arguments.

    Examples:
      kha-megatron recipes show table2/mlp-v
    """
    chosen = recipes.get_recipe(recipe)
    if as_json:
        console.print_json(recipe_data(chosen))
        return
    lines = [f"{chosen.name}: {chosen.description}"]
    for name, value in chosen.paper.items():
        lines.append(f"  {name} in the paper: {value}")
    lines.append(f"  head mechanisms: {chosen.run.kha}")
    if chosen.note:
        lines.append(f"  note: {chosen.note}")
    lines.append("")
    for flag, values in chosen.run.flags.items():
        lines.append(shlex.join([flag, *values]))
    console.out.print("\n".join(lines), markup=False)


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
