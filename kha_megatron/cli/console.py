"""Where the commands write: results on stdout, everything about progress and errors on stderr."""

from rich.console import Console
from rich.markup import escape

out = Console(highlight=False, soft_wrap=True)
log = Console(stderr=True, highlight=False, soft_wrap=True)


def error(message: str) -> None:
    """Print one error line on stderr."""
    log.print(f"[bold red]error:[/] {escape(message)}")
