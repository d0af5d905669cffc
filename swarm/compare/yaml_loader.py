"""Questions in YAML: each file is a list of mappings with name, type and arguments."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from swarm._util.files import read_yaml
from swarm.errors import InvalidArgument, UserError

EXPECTED_FORM = "a list of mappings, each with name, type and the type's arguments"


class QuestionEntry(NamedTuple):
    """One question of a file: its arguments, and its location for errors."""

    file: Path
    number: int
    fields: Mapping[str, Any]

    @property
    def location(self) -> str:
        """File and item, for errors."""
        name = self.fields.get("name")
        return f"{self.file}: item {self.number}" + (f" ({name})" if name else "")


def list_files(place: str | Path | None = None) -> list[Path]:
    """Return the files of a folder, sorted by name, or the file itself.

    Args:
        place: Folder or file; `None` is `Config.yaml_dir`.

    Raises:
        InvalidArgument: It does not exist.
    """
    from swarm.compare.config import Config

    path = Path(Config.yaml_dir if place is None else place).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        hint = "; set Config.yaml_dir to the folder of your questions" if place is None else ""
        raise InvalidArgument(f"{path}: no such file or folder of questions in YAML{hint}")
    return sorted(one for one in path.iterdir() if one.suffix in (".yaml", ".yml"))


def iter_entries(file: Path) -> Iterator[QuestionEntry | InvalidArgument]:
    """Yield the questions of a file, and an error for each malformed item.

    Raises:
        InvalidArgument: The file is not a list, or cannot be read.
    """
    try:
        content = read_yaml(file, "the questions")
    except UserError as error:
        raise InvalidArgument(str(error)) from None
    if content is None:
        return
    if not isinstance(content, list):
        raise InvalidArgument(f"{file}: must be {EXPECTED_FORM}; it is a {type(content).__name__}")
    for number, fields in enumerate(content, 1):
        if not isinstance(fields, dict):
            yield InvalidArgument(
                f"{file}: item {number} is not a mapping; the file must be {EXPECTED_FORM}"
            )
        elif not isinstance(fields.get("name"), str):
            yield InvalidArgument(
                f"{file}: item {number} has no name; the file must be {EXPECTED_FORM}"
            )
        else:
            yield QuestionEntry(file, number, fields)


def load_entries(place: str | Path | None) -> tuple[list[QuestionEntry], list[InvalidArgument]]:
    """Return all items of the files, and the errors of files and items."""
    found: list[QuestionEntry] = []
    wrong: list[InvalidArgument] = []
    for file in list_files(place):
        try:
            for one in iter_entries(file):
                found.append(one) if isinstance(one, QuestionEntry) else wrong.append(one)
        except InvalidArgument as error:
            wrong.append(error)
    return found, wrong


def find_entry(name: str, place: str | Path | None = None) -> QuestionEntry:
    """Return the item of this name; errors in other items are ignored.

    Args:
        name: Name of the question.
        place: File or folder; `None` is `Config.yaml_dir`.

    Raises:
        InvalidArgument: No item or several have this name.
    """
    from swarm.compare.config import Config

    found, wrong = load_entries(place)
    named = [item for item in found if item.fields["name"] == name]
    if len(named) == 1:
        return named[0]
    if named:
        locations = " and ".join(item.location for item in named)
        raise InvalidArgument(
            f"question {name!r} exists {len(named)} times: {locations}; rename one"
        )
    folder = Config.yaml_dir if place is None else place
    names = [item.fields["name"] for item in found]
    matches = get_close_matches(str(name), names, 1)
    suggestion = f"did you mean {matches[0]}? There" if matches else "there"
    broken = "".join(f"; also, {error}" for error in wrong)
    raise InvalidArgument(
        f"no question {name!r} in {folder}; {suggestion} are: {format_names(names)}{broken}"
    )


def format_names(names: Sequence[str]) -> str:
    """Join names for an error."""
    return ", ".join(names) or "none"


def resolve_local_judges(item: QuestionEntry) -> dict[str, Any]:
    """Return an item's arguments; judges given by name are first looked up in the same file."""
    fields = dict(item.fields)
    judges = fields.get("judges")
    if isinstance(judges, dict) and any(isinstance(one, str) for one in judges.values()):
        local_judges = {
            one.fields["name"]: one.fields
            for one in iter_entries(item.file)
            if isinstance(one, QuestionEntry)
        }
        fields["judges"] = {
            column: local_judges.get(one, one) if isinstance(one, str) else one
            for column, one in judges.items()
        }
    return fields
