"""Splits made from parquet files with the real sets' columns, and played by the real tasks."""

import importlib
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import searches
import task_items
from datasets import Dataset
from hydra import compose, initialize_config_dir

from swarm._util.files import conf_folder
from swarm.search import build_run

SCRIPT = searches.ROOT / "scripts" / "make_splits.py"
sys.path.insert(0, str(SCRIPT.parent))
make_splits = importlib.import_module("make_splits")
subsets = importlib.import_module("make_choice_subsets")
TEXTS = ("a stone", "nothing", "the sea", "a long road")


def texts(number: int) -> list[str]:
    return [f"{text} {number}" for text in TEXTS]


def row(name: str, n: int) -> dict[str, Any]:
    """A row with the columns that the set has on the hub, unread ones too."""
    options = dict(zip("ABCD", texts(n), strict=True))
    ending = {"ind": n // 2, "activity_label": "Walking", "source_id": "x", "split": "val"}
    ending |= {"ctx_a": f"A man walks {n} miles.", "ctx_b": "he"}
    unread = {"choice_type": "single", "exp": None, "topic_name": None}
    # Uneven: five in eight are of one domain.
    law = ("law", "law", "math", "law", "law", "physics", "law", "math")[n % 8]
    found: dict[str, dict[str, Any]] = {
        "mmlu": {"subject": f"subject_{n % 3}", "choices": texts(n), "answer": n % 4},
        "gsm8k": {
            "question": f"What is {n} and {n}?",
            "answer": f"<<{n}+{n}={2 * n}>>\n#### {2 * n:,}",
        },
        "hellaswag": {
            **ending,
            "ctx": f"A man walks {n} miles. he",
            "endings": texts(n),
            "split_type": ("indomain", "zeroshot")[n % 2],
            "label": str(n % 4),
        },
        "truthfulqa": {
            "mc1_targets": {"choices": texts(n), "labels": [1, 0, 0, 0]},
            "mc2_targets": {"choices": texts(n), "labels": [1, 1, 0, 0]},
        },
        "medqa": {
            "answer": texts(n)[n % 4],
            "options": options,
            "answer_idx": "ABCD"[n % 4],
            "meta_info": "step1",
            "metamap_phrases": ["patient"],
        },
        "medmcqa": {
            "id": f"uuid-{n}",
            "cop": n % 4,
            "subject_name": f"Subject {n % 2}",
            **unread,
            **{f"op{letter.lower()}": text for letter, text in options.items()},
        },
        "mmlu_pro": {
            "question_id": 100 + n,
            "options": texts(n) + texts(-n - 1),
            "category": law,
            "answer": "ABCDEFGH"[n % 8],
            "answer_index": n % 8,
            "cot_content": "",
            "src": "x",
        },
    }
    asked = {} if name == "hellaswag" else {"question": f"What is {n}?"}
    return asked | found[name]


SETS = ("mmlu", "gsm8k", "hellaswag", "truthfulqa", "medqa", "medmcqa", "mmlu_pro")


def rows(name: str, count: int = 40) -> list[dict[str, Any]]:
    return [row(name, number) for number in range(count)]


def parquet(path: Path, content: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(content).to_parquet(path)
    return path


def script(
    name: str, source: Path | None, target: Path, *more: object, **environment: str
) -> "subprocess.CompletedProcess[str]":
    words = [name, "--to", target, *(["--source", source] if source else []), *more]
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)],
        capture_output=True,
        text=True,
        env=searches.environment(**environment),
        timeout=120,
    )


def made(folder: Path, name: str, *arguments: object, of: Any = None) -> dict[str, Any]:
    """What the script writes of these rows."""
    source, target = folder / f"{name}.parquet", folder / f"{name}.json"
    parquet(source, of or rows(name))
    line = [name, "--source", source, "--to", target, "--force", "--dev", 8, "--test", 20]
    assert make_splits.main([str(word) for word in [*line, *arguments]]) == 0
    found: dict[str, Any] = json.loads(target.read_text())
    return found


@pytest.mark.parametrize("name", SETS)
def test_a_set_becomes_a_file_that_its_task_plays(name: str, tmp_path: Path) -> None:
    content = made(tmp_path, name)
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        overrides = ["name=test", f"task={name}", f"task.file={tmp_path}/{name}.json"]
        task = build_run(compose("search", overrides=overrides))[0].task
    dev, test = task.items("dev"), task.items("test")
    assert (len(dev), len(test)) == (8, 20) and content["dataset"] == name
    assert not {item["question"] for item in dev} & {item["question"] for item in test}
    for items in (dev, test):
        knowing = task_items.played(task, items, task_items.Knowing(items))
        assert [score.value for score in knowing] == [1.0] * len(items)
        silent = task_items.played(task, items, task_items.Silent())
        assert {(s.value, s.answer) for s in silent} == {(0.0, None)}


def test_answers_ids_and_domains_are_the_row_s(tmp_path: Path) -> None:
    """By the number in the question, whatever letter the answer stands under."""
    sets = {name: made(tmp_path, name) for name in SETS}
    for name in ("mmlu", "hellaswag", "medqa", "medmcqa"):
        for item in sets[name]["test"]:
            number = int("".join(filter(str.isdigit, item["question"])))
            assert item["choices"][item["answer"]] == texts(number)[number % 4]
    for item in sets["truthfulqa"]["test"]:
        assert item["choices"][item["answer"]].startswith("a stone")
    letters = Counter(item["answer"] for item in sets["truthfulqa"]["test"])
    assert len(letters) == 4 and max(letters.values()) < 15  # the right one is not always first
    for item in sets["gsm8k"]["test"]:
        assert item["answer"] == f"{2 * int(item['question'].split()[2]):,}"
    for item in sets["mmlu_pro"]["test"]:
        assert item["question"] == f"What is {item['id'] - 100}?"
    assert {item["id"] for item in sets["medmcqa"]["dev"]} <= {f"uuid-{n}" for n in range(40)}
    assert {i["domain"] for i in sets["hellaswag"]["test"]} == {"indomain", "zeroshot"}
    assert {i["domain"] for i in sets["mmlu"]["test"]} <= {f"subject_{n}" for n in range(3)}
    content = made(tmp_path, "mmlu_pro", "--dev", 9)
    assert Counter(i["domain"] for i in content["dev"]) == {"law": 3, "math": 3, "physics": 3}


def test_the_seed_decides_and_the_order_does_not(tmp_path: Path) -> None:
    shuffled = random.Random(0).sample(rows("mmlu"), 40)
    contents = (
        made(tmp_path, "mmlu"),
        made(tmp_path, "mmlu", of=shuffled),
        made(tmp_path, "mmlu", "--seed", 1),
    )
    first, second, other = (
        [[item["question"] for item in content[split]] for split in ("dev", "test")]
        for content in contents
    )
    assert first == second != other


def test_duplicates_and_what_is_unusable_are_left_out_and_counted(tmp_path: Path) -> None:
    content = rows("medmcqa", 10)
    content += [
        {**content[0], "id": "again"},
        {**content[1], "id": "other answer", "cop": (content[1]["cop"] + 1) % 4},
        {**content[2], "id": "hidden", "question": "Hidden?", "cop": -1},
        {**content[3], "id": "empty", "question": "Empty?", "opb": None},
    ]
    source, target = parquet(tmp_path / "x.parquet", content), tmp_path / "x.json"
    done = script("medmcqa", source, target, "--dev", 4, "--test", 6)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "skipped: 2 of 14 rows: a duplicate" in lines
    assert sum("skipped: 1 of 14" in line for line in lines) == 2
    written = json.loads(target.read_text())
    ids = [item["id"] for split in ("dev", "test") for item in written[split]]
    assert sorted(ids) == sorted(f"uuid-{n}" for n in range(10))
    more = script("medmcqa", source, tmp_path / "y.json", "--dev", 5, "--test", 6)
    assert more.returncode == 1 and "only 10 are distinct" in more.stderr
    # A file that is there is not replaced.
    target.write_text("my own")
    again = ("medmcqa", source, target, "--dev", 4, "--test", 4)
    done = script(*again)
    assert done.returncode == 1 and "--force" in done.stderr
    assert target.read_text() == "my own"
    assert script(*again, "--force").returncode == 0
    assert json.loads(target.read_text())["dataset"] == "medmcqa"


def test_of_a_folder_the_files_of_the_split_are_read(tmp_path: Path) -> None:
    """As `hf download` leaves them; jsonl is read too."""
    content = rows("gsm8k", 30)
    parquet(tmp_path / "main" / "test-00000-of-00002.parquet", content[:15])
    parquet(tmp_path / "main" / "test-00001-of-00002.parquet", content[15:])
    parquet(tmp_path / "main" / "train-00000-of-00001.parquet", rows("gsm8k", 60)[30:])
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, content)))
    found = []
    for number, source in enumerate((tmp_path / "main", tmp_path / "lines.jsonl")):
        target = tmp_path / f"{number}.json"
        done = script("gsm8k", source, target, "--dev", 10, "--test", 20)
        assert done.returncode == 0, done.stderr
        written = json.loads(target.read_text())
        found.append((written["dev"], written["test"]))
    assert found[0] == found[1]
    assert {item["id"] for split in found[0] for item in split} == set(range(30))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("column", ['no column "question"', "there are: prompt, choices"]),
        ("broken", ["broken.parquet", "cannot be loaded"]),
        ("empty", ["no file", ".parquet"]),
        ("nowhere", ["nowhere"]),
        ("hub", ["cais/mmlu", "connection", "--source"]),
        ("package", ["datasets is not installed: pip install -e", "[data]"]),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    what: str, words: list[str], tmp_path: Path
) -> None:
    sources = {
        "column": tmp_path / "renamed.parquet",
        "broken": tmp_path / "broken.parquet",
        "empty": tmp_path / "empty",
        "nowhere": tmp_path / "nowhere",
    }
    renamed = [{"prompt": one["question"], "choices": one["choices"]} for one in rows("mmlu")]
    parquet(sources["column"], renamed)
    sources["broken"].write_bytes(b"PAR1 and no more")
    sources["empty"].mkdir()
    environment = {"HF_HOME": str(tmp_path)}
    if what == "package":
        (tmp_path / "datasets.py").write_text("raise ImportError(name='datasets')")
        environment["PYTHONPATH"] = f"{tmp_path}:{searches.ROOT}"
    target = tmp_path / "out" / "mmlu.json"
    done = script("mmlu", sources.get(what), target, **environment)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not target.parent.exists()


@pytest.mark.parametrize("name", sorted(subsets.ORIGINS))
def test_subsets_that_ship_are_disjoint_and_name_their_source(name: str) -> None:
    content = (searches.ROOT / "data" / f"{name}_mini.json").read_text()
    data = json.loads(content)
    assert content == subsets.written(data)
    assert {key: data[key] for key in subsets.ORIGINS[name]} == subsets.ORIGINS[name]
    questions = [" ".join(i["question"].split()) for split in ("dev", "test") for i in data[split]]
    assert len(questions) == len(set(questions)) == 600 and len(data["dev"]) == 200
    places = (searches.ROOT / "data" / "eval", searches.ROOT.parent / "shared" / "data" / "eval")
    fetched = [file for folder in places if (file := folder / f"{name}.json").exists()]
    if not fetched:
        pytest.skip(f"{name}.json of the original is not on this machine")
    assert data == subsets.build(name, json.loads(fetched[0].read_text()))


def test_a_subset_keeps_items_and_splits() -> None:
    def item(number: int, domain: str) -> dict[str, Any]:
        question = ("[header] " if number % 3 else "") + f"How is {number % 500}?"
        choices = dict(zip("ABCD", texts(number), strict=True))
        return {"question": question, "choices": choices, "answer": "B", "domain": domain, "id": 7}

    given = {
        "dev": [item(n, "indomain") for n in range(210)],
        "test": [item(n, "zeroshot" if n % 2 else "indomain") for n in range(100, 999)],
    }
    found = subsets.build("hellaswag", given)
    for split in ("dev", "test"):
        for one in found[split]:
            source = given[split][one["id"]]
            assert all(one[key] == source[key] for key in ("question", "choices", "answer"))
            assert source["domain"] == "indomain"
            marked = one["question"].startswith("[header]")
            assert one["domain"] == ("wikihow" if marked else "activitynet")
    assert len(found["dev"]) == 200
    assert not {i["question"] for i in found["dev"]} & {i["question"] for i in found["test"]}
    assert found == subsets.build("hellaswag", given)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("mmlu.json", "{}", "the name must be one of hellaswag, truthfulqa"),
        ("hellaswag.json", None, "python -m swarm.fetch_data hellaswag"),
        ("hellaswag.json", "{}", "is not the file fetched by python -m swarm.fetch_data"),
    ],
)
def test_a_subset_of_another_file_is_refused(
    name: str, content: str | None, error: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    line = [sys.executable, str(SCRIPT.with_name("make_choice_subsets.py")), str(tmp_path / name)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and error in done.stderr
