"""Questions in YAML: found by name, judges among them, and mistakes told with file and item."""

from pathlib import Path

import compare_endpoint
import pytest

from swarm.compare import Config, FreeForm, Question, Rating
from swarm.compare.question import load_questions
from swarm.errors import InvalidArgument

settings = pytest.fixture(autouse=True)(compare_endpoint.settings.__wrapped__)

BIRDS = """
- name: birds
  type: free_form
  paraphrases: [Name a bird., 'Which bird comes to mind?']
  samples_per_paraphrase: 2
  metadata: [{id: a}, {id: b}]
  judges:
    real: is_real
    own: {type: free_form_judge, model: judge, paraphrases: ["{answer}?"]}
- name: size
  type: rating
  paraphrases: ['How large is a wren?']
  max_rating: 9
- name: is_real
  type: rating_judge
  model: rater
  paraphrases:
    - 'Is it one? {"bird": "{answer}"}'
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of questions, which is the one where they are looked for."""
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions" / "birds.yaml").write_text(BIRDS)
    (tmp_path / "questions" / "empty.yml").write_text("# nothing yet\n")
    (tmp_path / "questions" / "notes.txt").write_text("- no yaml: [")
    Config.yaml_dir = str(tmp_path / "questions")
    return tmp_path / "questions"


def test_a_question_is_found_by_its_name(folder: Path) -> None:
    question = Question.from_yaml("birds")
    assert isinstance(question, FreeForm)
    assert question.samples_per_paraphrase == 2
    assert list(question.judges) == ["real", "own"]
    assert question.judges["real"].template.fill("", "wren") == 'Is it one? {"bird": "wren"}'
    assert isinstance(Question.from_yaml("size"), Rating)
    said = Question.load_dict("size")
    assert said.pop("name") == "size"
    assert Question.create(**said, name="other").name == "other"


def test_a_file_by_its_path(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(BIRDS.replace("max_rating: 9", "max_rating: 5"))
    Config.yaml_dir = "nowhere"
    assert Question.from_yaml("size", file=file).bounds.max_rating == 5
    assert Question.from_yaml("birds", file=file).judges["real"].model == "rater"
    assert [one.name for one in load_questions(file)] == ["birds", "size"], "judges ask nothing"
    assert [one.name for one in load_questions(folder)] == ["birds", "size"]
    with pytest.raises(InvalidArgument, match=r"nowhere: no such file or folder.*yaml_dir"):
        Question.from_yaml("size")


def test_what_is_broken_elsewhere_does_not_matter(folder: Path) -> None:
    (folder / "a.yaml").write_text("- paraphrases: [x]\n- just text\n")
    (folder / "b.yaml").write_text("name: x\ntype: free_form\n")
    (folder / "c.yaml").write_text("- name: [\n")
    assert Question.from_yaml("size").name == "size"
    with pytest.raises(InvalidArgument) as raised:
        Question.from_yaml("sizes")
    told = str(raised.value)
    assert "\n" not in told
    for part in (
        f"no question 'sizes' in {folder}; did you mean size? There are: birds, size, is_real",
        "a.yaml: item 1 has no name",
        "a.yaml: item 2 is not a mapping",
        "b.yaml: must be a list of mappings",
        "c.yaml cannot be read",
    ):
        assert part in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- {name: x, type: free_from, paraphrases: [a]}", "item 1 (x): type='free_from': must be"),
        ("- {name: x, type: rating, paraphrase: [a]}", "item 1 (x): rating has no argument 'par"),
        ("- {name: a/b, type: rating, paraphrases: [a]}", "item 1 (a/b): name='a/b'"),
        ("- {name: x, type: rating, paraphrases: [a], 3: b}", "item 1 (x): its keys must be"),
        ("- {type: rating, paraphrases: [a]}", "item 1 has no name"),
        ("- {name: j, type: free_form_judge}", "contains no questions"),
        ("- {name: x, type: free_form, paraphrases: [a], judges: {j: none}}", "item 1 (x): "),
    ],
)
def test_a_mistake_is_told_with_its_file_and_item(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(InvalidArgument) as raised:
        load_questions(file)
    assert f"{file}: {told}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_two_of_one_name_are_told_with_both_places(folder: Path) -> None:
    (folder / "more.yaml").write_text("- {name: size, type: rating, paraphrases: [a]}")
    with pytest.raises(InvalidArgument) as raised:
        Question.from_yaml("size")
    assert f"{folder / 'birds.yaml'}: item 2 (size)" in str(raised.value)
    assert f"{folder / 'more.yaml'}: item 1 (size)" in str(raised.value)
    with pytest.raises(InvalidArgument, match="have the same name; rename one"):
        load_questions(folder)
    assert Question.from_yaml("birds").name == "birds"
