"""``kha-megatron patch``: put the diffs of ``patches/`` into a Megatron tree, and take them out."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from kha_megatron.cli import console
from kha_megatron.cli.installation import find_module
from kha_megatron.cli.options import AsJSON
from kha_megatron.cli.running import Commands
from kha_megatron.mcore import patching
from kha_megatron.mcore.patching import PatchState, Tree

app = Commands(
    name="patch",
    help="Patch Megatron's own tree where a plug-in cannot reach.",
    no_args_is_help=True,
)

_Path = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="Megatron-LM source tree, site-packages folder, virtual environment, or the megatron "
        "folder itself.",
    ),
]
_Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME", help="Take this patch only; repeat for more."),
]

_STYLES = {"applied": "green", "absent": "", "partial": "yellow", "mismatch": "red"}
_MEANINGS = {
    "partial": "an interrupted run left it half done: apply or revert completes it",
    "mismatch": "it neither fits nor is it there",
}


@app.command()
def check(
    path: _Path,
    only: _Only = None,
    as_json: AsJSON = False,
) -> None:
    """Say how each patch stands in a Megatron tree. Changes nothing.

    Exit codes: 0 each is applied or can be, 1 one is half done or does not fit, 2 bad input.

    Examples:
      kha-megatron patch check ~/Megatron-LM
    """
    tree = _find(path)
    findings = patching.examine(tree, patching.load_patches(tree.version, only or ()))
    if as_json:
        _print_json(tree, [asdict(finding) for finding in findings])
    else:
        _print(findings)
    if any(finding.state in _MEANINGS for finding in findings):
        raise typer.Exit(1)


@app.command()
def apply(path: _Path, only: _Only = None, as_json: AsJSON = False) -> None:
    """Apply the patches of the tree's version: all of them, or none if one does not fit.

    Applying twice does nothing. A reinstallation of Megatron takes the patches away.

    Examples:
      kha-megatron patch apply ~/Megatron-LM
      kha-megatron patch apply .venv --only spec-import-error
    """
    _change(path, only, revert=False, as_json=as_json)


@app.command()
def revert(path: _Path, only: _Only = None, as_json: AsJSON = False) -> None:
    """Take the patches out again, byte for byte.

    Examples:
      kha-megatron patch revert ~/Megatron-LM
    """
    _change(path, only, revert=True, as_json=as_json)


def _find(path: Path) -> Tree:
    tree = patching.find_tree(path)
    console.log.print(f"Megatron-Core {tree.version} in {escape(str(tree.megatron))}")
    return tree


def _print_json(tree: Tree, patches: list[dict[str, Any]]) -> None:
    report = {"megatron": str(tree.megatron), "version": tree.version, "patches": patches}
    console.print_json(report)


def _change(path: Path, only: list[str] | None, *, revert: bool, as_json: bool) -> None:
    tree = _find(path)
    chosen = patching.load_patches(tree.version, only or ())
    before = patching.change(tree, chosen, revert=revert)
    did = "reverted" if revert else "applied"
    words = {
        "absent": "not applied" if revert else did,
        "applied": did if revert else "already applied",
        "partial": f"{did}, completing an interrupted run",
    }
    if as_json:
        after = patching.examine(tree, chosen)
        both = zip(before, after, strict=True)
        _print_json(tree, [asdict(now) | {"was": old.state} for old, now in both])
    else:
        for finding in before:
            console.out.print(f"{finding.name}: {words[finding.state]}")
    used = find_module("megatron")
    folders = (used and used.submodule_search_locations) or []
    if tree.megatron in [Path(folder).resolve() for folder in folders]:
        console.log.print(
            "[yellow]note:[/] this is the Megatron of the running Python: whatever starts in this "
            "environment from now on uses it as it is now"
        )


def _print(findings: list[PatchState]) -> None:
    table = console.numbers("patch", "state", names=2)
    table.add_column("what it does")
    for finding in findings:
        style = _STYLES[finding.state]
        state = f"[{style}]{finding.state}[/]" if style else finding.state
        table.add_row(finding.name, state, escape(finding.title))
    console.out.print(table)
    for finding in findings:
        notes = [*filter(None, [_MEANINGS.get(finding.state)]), *finding.notes]
        for note in notes:
            console.out.print(f"{finding.name}: {note}", markup=False)
