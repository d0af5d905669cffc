"""Command group of `llm consortium` and `python -m swarm.consortium`, without its commands.

They are imported on use: every start of llm loads this module.
"""

import sys
from difflib import get_close_matches
from typing import Any

import click

from swarm._util.terminal import escape_control_chars, is_tty
from swarm.errors import UserError

COMMANDS = ("run", "save", "list", "show", "remove", "runs", "run-info", "strategies")
"""In the order of the help; "info" is llm-consortium's name of "show"."""

TWO = (
    "model-swarms answers; another plugin has a command of this name, too (llm-consortium?): "
    "use LLM_LOAD_PLUGINS=llm-consortium llm consortium ... for that one"
)

HELP = """Query several models, and let an arbiter synthesize their answers.

The command run may be left out:

\b
  {path} "Why is the sky blue?" -m gpt-4o:2 -m qwen2:7b --arbiter gpt-4o
  {path} save council -m gpt-4o -m qwen2:7b --arbiter gpt-4o
  {path} "Why is the sky blue?" --consortium council
"""
LLM_PLUGIN_HELP = """
A saved consortium is also a model of llm: llm -m council "Why is the sky blue?"
"""


class ConsortiumGroup(click.Group):
    """Command group that defaults to `run` and imports commands on use.

    Attributes:
        hides_another: True if another plugin has a command of the same name.
    """

    hides_another = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the command names in display order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of a name."""
        from swarm.consortium.commands import BY_NAME, EXAMPLES

        name = "show" if cmd_name == "info" else cmd_name
        if found := BY_NAME.get(name):
            example = f"{ctx.command_path} {cmd_name} {EXAMPLES.get(name, '')}".rstrip()
            found.epilog = f"\b\nExample:\n  {example}"
        return found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `run` if the first word is not a command."""
        first = args[0] if args else ""
        if first in ctx.help_option_names or (not args and is_tty(sys.stdin)):
            return super().parse_args(ctx, args[:1])
        if first not in (*COMMANDS, "info"):
            if matches := get_close_matches(first, COMMANDS, 1, 0.75):
                raise click.UsageError(
                    f"{first}: did you mean the command {matches[0]}? To ask this as a question: "
                    f"{ctx.command_path} run {first}",
                    ctx,
                )
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the help, with examples for the name under which it was called."""
        self.help = HELP.format(path=ctx.command_path) + (LLM_PLUGIN_HELP if ctx.parent else "")
        super().format_help_text(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; print a user's error in one line, and exit with 130 on an interrupt."""
        if self.hides_another:
            click.echo(TWO, err=True)
        try:
            return super().invoke(ctx)
        except UserError as error:
            failure = click.ClickException(escape_control_chars(str(error)))
            failure.exit_code = error.code  # type: ignore[misc]
            raise failure from None
        except KeyboardInterrupt:
            click.echo("stopped", err=True)
            ctx.exit(130)


@click.command(cls=ConsortiumGroup, name="consortium", short_help=HELP.partition("\n")[0])
def consortium() -> None:
    """Command group; `ConsortiumGroup.format_help_text` writes its help."""
