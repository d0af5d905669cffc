"""Tasks of the lm-evaluation-harness over local data, as a user would write them."""

import json
from pathlib import Path
from typing import Any

import pytest

SPLITS = {"train": 8, "validation": 10, "test": 12}

CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {files}, cache_dir: {cache}}}
{splits}
output_type: multiple_choice
doc_to_text: "{{{{question}}}} "
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
num_fewshot: {shots}
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
  - {{metric: mcc, aggregation: matthews_corrcoef, higher_is_better: true}}
"""

GENERATE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {files}, cache_dir: {cache}}}
{splits}
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["e", "B"], max_gen_toks: 12}}
filter_list:
  - name: first
    filter: [{{function: regex, regex_pattern: "([a-z(])"}}, {{function: take_first}}]
  - {{name: whole, filter: [{{function: take_first}}]}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""

FORCED = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {files}, cache_dir: {cache}}}
{splits}
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{{{{question}}}}"
"""


def tasks_folder(
    folder: Path, template: str, name: str, splits: Any = SPLITS, first: int = 0, **more: Any
) -> str:
    """A folder with a task's yaml and its splits as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for number, (split, count) in enumerate(dict(splits).items()):
        rows = [document(first + 100 * number + n) for n in range(count)]
        files[split] = str(folder / f"{name}_{split}.jsonl")
        Path(files[split]).write_text("\n".join(map(json.dumps, rows)))
    kinds = {"train": "training", "validation": "validation", "test": "test"}
    lines = [f"{kinds[split]}_split: {split}" for split in splits]
    text = template.format(
        name=name,
        files=json.dumps(files),
        cache=folder / "cache",
        splits="\n".join(lines),
        **{"shots": 0, **more},
    )
    (folder / f"{name}.yaml").write_text(text)
    return str(folder)


def document(number: int) -> dict[str, Any]:
    choices = ["one", "the answer is 12", f"a graph of {number} nodes", "yes or no"]
    return {
        "question": f"{number}: which of the answers is right, {number * 7 % 31}?",
        "choices": choices,
        "label": number % 4,
        "answer": "apif"[number % 4],
    }


def question_items(count: int) -> list[dict[str, Any]]:
    return [{**document(n), "id": n} for n in range(count)]


def harness_files(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The keys of task=lm_eval for a file of dev and test documents."""
    pytest.importorskip("lm_eval")
    tasks_folder(folder, CHOICE, "letters", {"validation": 0, "test": 0})
    for split, name in (("dev", "validation"), ("test", "test")):
        rows = "\n".join(map(json.dumps, content[split]))
        (folder / f"letters_{name}.jsonl").write_text(rows)
    return {"tasks": ["letters"], "include_path": str(folder)}
