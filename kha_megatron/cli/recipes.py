"""``kha-megatron recipes``: list and show the papers' training runs."""

import fnmatch
import shlex
from typing import Annotated, Any

import typer

from kha_megatron import recipes
from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON, RecipeName
from kha_megatron.cli.running import Commands
from kha_megatron.recipes import Recipe

app = Commands(name="recipes", help="The papers' training runs.", no_args_is_help=True)


@app.command("list")
def show_all(
    pattern: Annotated[str, typer.Argument(help="Names to list, as in 'table2/*'.")] = "*",
    as_json: AsJSON = False,
) -> None:
    """List the recipes with their paper's final loss, where it prints one.

    Examples:
      kha-megatron recipes list 'table5/*'
    """
    chosen = [r for name, r in recipes.RECIPES.items() if fnmatch.fnmatch(name, pattern)]
    if as_json:
        console.print_json([as_data(recipe) for recipe in chosen])
        return
    for recipe in chosen:
        loss = recipe.paper.get("loss", "")
        line = f"{recipe.name:32} {loss:>6}  {recipe.description}"
        console.out.print(line, markup=False, emoji=False)


@app.command()
def show(recipe: RecipeName, as_json: AsJSON = False) -> None:
    """Show what a recipe trains, with every argument it gives to Megatron.

    Examples:
      kha-megatron recipes show table2/mlp-v
    """
    chosen = recipes.get_recipe(recipe)
    if as_json:
        console.print_json(as_data(chosen))
        return
    lines = [f"{chosen.name}: {chosen.description}"]
    lines += [f"  the paper's {name}: {value}" for name, value in chosen.paper.items()]
    lines += [f"  knocks {chosen.run.kha}"]
    lines += [f"  note: {chosen.note}"] if chosen.note else []
    lines.append("")
    for flag, words in chosen.run.flags.items():
        lines.append(shlex.join([flag, *words]))
    console.out.print("\n".join(lines), markup=False, emoji=False)


def as_data(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as JSON values."""
    return {
        "name": recipe.name,
        "description": recipe.description,
        "knocks": str(recipe.run.kha),
        "paper": dict(recipe.paper),
        "note": recipe.note,
        "ranks": recipe.ranks,
        "vocab_size": recipe.run.vocab_size,
        "environment": dict(recipe.environment),
        "arguments": {flag: list(words) for flag, words in recipe.run.flags.items()},
    }
