"""Click commands: options made from the fields of settings, and one-line errors."""

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import click
from pydantic import AliasChoices, BaseModel, Field, TypeAdapter, ValidationError

from swarm._util.settings import Settings, Text, describe_type, field_types
from swarm._util.terminal import escape_control_chars
from swarm.errors import UserError

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    # --max_tokens is --max-tokens
    "token_normalize_func": lambda word: word.replace("_", "-"),
}
"""Settings of every command."""


class SettingType(click.ParamType):
    """Parameter type of a setting: text that is read and checked as its annotation says."""

    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation
        self.name = "number" if describe_type(annotation).startswith(("an", "a num")) else "text"
        self._adapter: TypeAdapter[Any] = TypeAdapter(annotation)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Convert text, which is not strict: "3" is an integer."""
        try:
            return self._adapter.validate_python(value)
        except ValidationError:
            self.fail(f"{value}: must be {describe_type(self.annotation)}", param, ctx)


def settings_options(
    settings: type[BaseModel], leave_out: Collection[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds an option per field of settings; `None` if it is not given.

    Names and further names are those of the field, a list is an option that may be repeated, and
    the help is the field's description.

    Args:
        leave_out: Fields without an option.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        types = field_types(settings)
        for name, field in reversed(settings.model_fields.items()):
            if name in leave_out:
                continue
            alias = field.validation_alias
            names = alias.choices if isinstance(alias, AliasChoices) else [name]
            flags = ["--" + str(one).replace("_", "-") for one in names]
            annotation, many = _item_type(types[name])
            text = (field.description or "")[:1].upper() + (field.description or "")[1:] + "."
            command = click.option(
                *flags, name, type=SettingType(annotation), multiple=many, help=text
            )(command)
        return command

    return decorate


class ModelLocations(Settings):
    """Where models are found; see `swarm.registry.registry.Roster`."""

    base: Text | None = Field(
        None, description="base model of local/ names: an option of conf/model or a folder"
    )
    pool: Text | None = Field(None, description="folder of the experts of local/ names")
    device: Text | None = Field(None, description="device of local models: cpu, cuda, cuda:1")
    providers: Path | None = Field(None, description="yaml file of custom endpoints")


location_options = settings_options(ModelLocations)
"""Adds `--base`, `--pool`, `--device` and `--providers` to a command."""


def _item_type(annotation: Any) -> tuple[Any, bool]:
    """Return the type of a value that is given, and whether several are: without null and list."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        inner, many = _item_type(arguments[0])
        return (inner, many) if many else (annotation, False)
    if type(None) in arguments:
        rest = [one for one in arguments if one is not type(None)]
        return _item_type(rest[0] if len(rest) == 1 else Union[tuple(rest)])  # noqa: UP007
    if get_origin(annotation) in (tuple, list):
        return arguments[0], True
    return annotation, False


def run_click(command: click.Command, words: Sequence[str] | None, name: str) -> int:
    """Run a command and return its exit code; a mistake is one line on standard error.

    Args:
        words: Arguments; `None` are those of the process.
        name: How the command is started, for its help.
    """
    try:
        found = command.main(
            args=None if words is None else list(words), prog_name=name, standalone_mode=False
        )
    except click.exceptions.NoArgsIsHelpError as without_arguments:
        print(without_arguments.format_message())
        return 0
    except click.ClickException as error:
        return _print_error(error.format_message(), error.exit_code)
    except UserError as error:
        return _print_error(str(error), error.code)
    except (click.Abort, KeyboardInterrupt):
        print("stopped", file=sys.stderr)
        return 130
    return found if isinstance(found, int) else 0


def _print_error(message: str, code: int) -> int:
    print(f"error: {escape_control_chars(' '.join(message.split()))}", file=sys.stderr)
    return code
