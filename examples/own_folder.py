"""The material of the second tutorial: two adapters, and questions with answers.

python examples/own_folder.py          # creates the folder mine
python examples/own_folder.py FOLDER
"""

import csv
import json
import shutil
import sys
from pathlib import Path

from swarm.api import Pool

SKILLS = ("sorting", "spelling")


def create_folder(folder: Path) -> None:
    """Write `adapters/` and `items.csv` below a new folder.

    The adapters are two of those that ship, the items those of their two skills in
    `data/skills.json`, without a split.
    """
    if folder.exists():
        sys.exit(f"{folder} exists; name another folder or remove it")
    pool = Pool("initial_experts", SKILLS).open()
    for name in SKILLS:
        shutil.copytree(pool.folder / name, folder / "adapters" / name)
    skills = json.loads((pool.folder.parent / "data" / "skills.json").read_text("utf-8"))
    items = [item for split in ("dev", "test") for item in skills[split]]
    with (folder / "items.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, ["question", "answer", "domain"], extrasaction="ignore")
        rows.writeheader()
        rows.writerows(item for item in items if item["domain"] in SKILLS)
    print(f"{folder}: {len(SKILLS)} adapters, items.csv")


if __name__ == "__main__":
    create_folder(Path(sys.argv[1] if len(sys.argv) > 1 else "mine"))
