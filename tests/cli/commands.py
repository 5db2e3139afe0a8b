"""Helpers that walk the commands of the typer app."""

from typer.main import get_command

from kha_megatron.cli import app


def leaves(command, words=()):
    """Yield every command that is not a group, as its name (``"convert fold"``) and the command."""
    children = getattr(command, "commands", {})
    if not children:
        yield " ".join(words), command
    for name, child in children.items():
        yield from leaves(child, (*words, name))


def parse(words):
    """Parse a ``kha-megatron`` command line without running it and return its parameters.

    Raises:
        typer.exceptions.TyperException: no such command, option or value.
    """
    command = get_command(app)
    rest = list(words[1:])
    context = command.make_context(words[0], [], resilient_parsing=True)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
        context = type(context)(command, parent=context, info_name=command.name)
    command.parse_args(context, rest)
    return context.params
