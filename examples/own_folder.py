"""The material of the second tutorial: two adapters, questions with answers, and a task.

python examples/own_folder.py          # creates the folder mine
python examples/own_folder.py FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

from swarm.api import Pool

TASK = """\
_target_: swarm.tasks.exact_match.ExactMatch
name: mine
file: {folder}/items.jsonl
max_new_tokens: 12
parser: whole
"""
SKILLS = ("sorting", "spelling")


def create_folder(folder: Path) -> None:
    """Write `adapters/`, `items.jsonl` and `task/mine.yaml` below a new folder.

    The adapters are two of those that ship, the items those of their two skills in
    `data/skills.json`, without a split.
    """
    if folder.exists():
        sys.exit(f"{folder} exists; name another folder or remove it")
    pool = Pool("initial_experts", SKILLS).open()
    for name in SKILLS:
        shutil.copytree(pool.folder / name, folder / "adapters" / name)
    skills = json.loads((pool.folder.parent / "data" / "skills.json").read_text("utf-8"))
    lines = [
        json.dumps({key: item[key] for key in ("question", "answer", "domain")})
        for split in ("dev", "test")
        for item in skills[split]
        if item["domain"] in SKILLS
    ]
    (folder / "items.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    (folder / "task").mkdir()
    (folder / "task" / "mine.yaml").write_text(TASK.format(folder=folder.as_posix()), "utf-8")
    print(f"{folder}: {len(SKILLS)} adapters, {len(lines)} items, task/mine.yaml")


if __name__ == "__main__":
    create_folder(Path(sys.argv[1] if len(sys.argv) > 1 else "mine"))
