"""The notebooks run unchanged, on the included base; the script of the second tutorial."""

import csv
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import searches
from nbclient import NotebookClient

EXAMPLES = searches.ROOT / "examples"
MINUTES = 3
"""That a notebook may take on two free cores; a test waits three times as long."""


@pytest.mark.timeout(3 * 60 * MINUTES)
@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda file: file.stem)
def test_a_notebook_runs_and_is_stored_without_outputs(file: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(file, 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any(cell.outputs for cell in cells)


def test_own_folder(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "own_folder.py", tmp_path / "mine"]
    subprocess.run(command, env=searches.environment(), check=True)
    items = [*csv.DictReader((tmp_path / "mine" / "items.csv").open())]
    assert len(items) == 240 and {item["domain"] for item in items} == {"sorting", "spelling"}
    again = subprocess.run(command, env=searches.environment(), capture_output=True, text=True)
    assert again.returncode == 1 and "exists" in again.stderr
