"""Experiments as their users run them: a command, and the page that it opens."""

import subprocess
import sys
from pathlib import Path

import searches

PROGRAM = """
def echo(turns):
    return f"user: {turns[-1].content}"
"""


def test_a_run_and_its_page(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM)
    question = "- {name: q, type: free_form, paraphrases: [one, two], samples_per_paraphrase: 2}"
    (tmp_path / "q.yaml").write_text(question)
    env = {**searches.environment(), "PYTHONPATH": str(tmp_path)}

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "swarm.compare", *words]
        return subprocess.run(
            line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )

    done = command("run", "q.yaml", "--models", "function/mine:echo", "--cache-dir", "cache")
    assert done.returncode == 0, done.stderr
    assert "4 rows, 0 with an error: compare/q/report.html" in done.stdout
    page = command("view", "compare/q/q/data.jsonl", "--no-browser", "--out", "page.html")
    assert page.returncode == 0, page.stderr
    assert "user: two" in (tmp_path / "page.html").read_text()
