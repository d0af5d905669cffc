"""Questions in YAML: each file is a list of mappings, a question's name, type and arguments."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from swarm.compare.errors import WrongValue
from swarm.errors import UserError
from swarm.files import read_yaml

if TYPE_CHECKING:
    from swarm.compare.questions import Question

FORM = "a list of mappings, each with name, type and the type's arguments"


class Item(NamedTuple):
    """One question of a file: where it is, for errors, and its arguments."""

    file: Path
    number: int
    said: Mapping[str, Any]

    @property
    def place(self) -> str:
        """The file and the item in it."""
        name = self.said.get("name")
        return f"{self.file}: item {self.number}" + (f" ({name})" if name else "")


def files(place: str | Path | None = None) -> list[Path]:
    """The files of a folder, sorted by name, or the file itself.

    Args:
        place: `None` is `Config.yaml_dir`.

    Raises:
        WrongValue: There is nothing there.
    """
    from swarm.compare.config import Config

    path = Path(Config.yaml_dir if place is None else place).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        told = "; set Config.yaml_dir to the folder of your questions" if place is None else ""
        raise WrongValue(f"{path}: there is no such file or folder of questions in YAML{told}")
    return sorted(one for one in path.iterdir() if one.suffix in (".yaml", ".yml"))


def items(file: Path) -> Iterator[Item | WrongValue]:
    """What a file holds; an error in the place of what is none.

    Raises:
        WrongValue: The file is no list, or cannot be read.
    """
    try:
        whole = read_yaml(file, "the questions")
    except UserError as error:
        raise WrongValue(str(error)) from None
    if whole is None:
        return
    if not isinstance(whole, list):
        raise WrongValue(f"{file}: must be {FORM}; it is a {type(whole).__name__}")
    for number, said in enumerate(whole, 1):
        if not isinstance(said, dict):
            yield WrongValue(f"{file}: item {number} is no mapping; the file must be {FORM}")
        elif not isinstance(said.get("name"), str):
            yield WrongValue(f"{file}: item {number} has no name; the file must be {FORM}")
        else:
            yield Item(file, number, said)


def everything(place: str | Path | None) -> tuple[list[Item], list[WrongValue]]:
    """All items of the files, and what is wrong with files and items."""
    found: list[Item] = []
    wrong: list[WrongValue] = []
    for file in files(place):
        try:
            for one in items(file):
                found.append(one) if isinstance(one, Item) else wrong.append(one)
        except WrongValue as error:
            wrong.append(error)
    return found, wrong


def find(name: str, place: str | Path | None = None) -> Item:
    """The item of this name; what is wrong with others does not matter.

    Args:
        name: Of the question.
        place: A file or folder; `None` is `Config.yaml_dir`.

    Raises:
        WrongValue: There is none of this name, or several.
    """
    from swarm.compare.config import Config

    found, wrong = everything(place)
    named = [item for item in found if item.said["name"] == name]
    if len(named) == 1:
        return named[0]
    if named:
        places = " and ".join(item.place for item in named)
        raise WrongValue(f"question {name!r} is there {len(named)} times: {places}; rename one")
    where = Config.yaml_dir if place is None else place
    names = [item.said["name"] for item in found]
    near = get_close_matches(str(name), names, 1)
    meant = f"did you mean {near[0]}? There" if near else "there"
    broken = "".join(f"; also, {error}" for error in wrong)
    raise WrongValue(f"no question {name!r} in {where}; {meant} are: {listed(names)}{broken}")


def listed(names: Sequence[str]) -> str:
    """Names in an error."""
    return ", ".join(names) or "none"


def made(item: Item) -> Any:
    """The question of an item.

    Raises:
        WrongValue: It is broken; the error names the file and the item.
    """
    from swarm.compare.questions import Question

    try:
        return Question.create(**with_judges(item))
    except UserError as error:
        raise WrongValue(f"{item.place}: {error}") from None
    except TypeError:
        raise WrongValue(f"{item.place}: its keys must be texts") from None


def with_judges(item: Item) -> dict[str, Any]:
    """An item's arguments; judges that it names are those of its own file, if it has them."""
    said = dict(item.said)
    judges = said.get("judges")
    if isinstance(judges, dict) and any(isinstance(one, str) for one in judges.values()):
        own = {one.said["name"]: one.said for one in items(item.file) if isinstance(one, Item)}
        said["judges"] = {
            column: own.get(one, one) if isinstance(one, str) else one
            for column, one in judges.items()
        }
    return said


def questions(place: str | Path) -> "list[Question]":
    """All questions of a file or of a folder's files, in order; without those that only judge.

    Raises:
        WrongValue: One of them is broken, two have one name, or there is none.
    """
    found, wrong = everything(place)
    if wrong:
        raise wrong[0]
    first: dict[str, Item] = {}
    for item in found:
        if (other := first.setdefault(item.said["name"], item)) is not item:
            raise WrongValue(f"{other.place} and {item.place} have one name; rename one")
    asking = [item for item in found if not str(item.said.get("type")).endswith("_judge")]
    if not asking:
        raise WrongValue(f"{place}: there are no questions in it; it must be {FORM}")
    return [made(item) for item in asking]
