"""Play a task with any model: python -m swarm.evaluate task=gsm8k candidate=run ..."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from omegaconf import DictConfig, OmegaConf

from swarm.cli import one_line_errors, run_entry
from swarm.errors import UserError
from swarm.places import conf_folder

if TYPE_CHECKING:
    from swarm.candidates import Candidate
    from swarm.tasks import Task

ENTRY_KEYS = ("pool", "model", "engine", "reward")
"""Keys that are no part of the evaluation: candidates and tasks refer to them."""

SPLITS = ("dev", "test")

RESULT = "result.json"


class Evaluation:
    """One candidate on one split of a task; cheap to make, `run` does the work.

    Args:
        task, candidate: What is put to whom.
        split: "dev" or "test".
        device: "cpu", "cuda" or e.g. "cuda:1"; `None` is the first GPU, or the CPU without one.
        out: The folder for result.json and answers.jsonl; `None` writes nothing.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        task: "Task",
        candidate: "Candidate",
        split: str = "test",
        device: str | None = None,
        out: str | None = None,
    ) -> None:
        if split not in SPLITS:
            raise UserError(f"split={split}: must be one of {', '.join(SPLITS)}")
        self.task, self.candidate = task, candidate
        self.split, self.device = split, device
        self.out = None if out is None else Path(out)

    def run(self, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Evaluate, or read again what the same evaluation has written before.

        Args:
            config: The configuration, by which the same evaluation is known.

        Returns:
            What result.json holds.

        Raises:
            UserError: Something is wrong with an input; nothing has been written then.
        """
        from swarm.candidates import scoring

        device = scoring.chosen_device(self.device)
        self.task.items(self.split)
        scoring.check(self.candidate, self.task)
        identity = self._identity(config or {})
        if known := self._known(identity):
            return known
        scoring.load(self.candidate, self.task, device)
        found = scoring.score(self.candidate, self.task, self.split)
        result = {
            "task": self.task.name,
            "split": self.split,
            "items": len(found.items),
            "voices": scoring.voices(self.task, found),
            "prompts": found.prompts,
            "tokens": found.tokens,
            "seconds": round(found.seconds, 3),
            "device": device,
            "identity": identity,
        }
        if isinstance(self.candidate, scoring.Accounted) and len(found.names) > 1:
            rival = {"rivals": self.candidate.rivals}
            result["against_best"] = scoring.against_best(self.task, found) | rival
        if self.out:
            self._write(found, result)
        return result

    def _identity(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What makes an evaluation the one it is."""
        from swarm.identity import items_digest

        return {
            "task": config.get("task"),
            "candidate": _without_run(config.get("candidate")),
            "split": self.split,
            "task items": items_digest(self.task, self.split),
            "weights": self.candidate.fingerprint(),
        }

    def _known(self, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """What the folder holds of this evaluation.

        Raises:
            UserError: It holds another one.
        """
        path = None if self.out is None else self.out / RESULT
        if path is None or not path.is_file():
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            before = found["identity"]
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(f"out={self.out}: {path} is no evaluation; choose another") from None
        now = json.loads(json.dumps(identity))
        if differ := [key for key in now if before.get(key) != now[key]]:
            raise UserError(
                f"out={self.out}: it holds another evaluation ({', '.join(differ)} differ); choose "
                "another folder"
            )
        return found

    def _write(self, found: Any, result: Mapping[str, Any]) -> None:
        """The answers first: a result that is there has them."""
        from swarm.evaluation import as_rows
        from swarm.files import as_json, write_json, write_whole

        assert self.out is not None
        several = len(found.names) > 1
        rows = [
            {**({"voice": name} if several else {}), **row}
            for name, scores in zip(found.names, found.scores, strict=True)
            for row in as_rows(found.items, scores)
        ]
        write_whole(self.out / "answers.jsonl", b"".join(as_json(row) + b"\n" for row in rows))
        write_json(self.out / RESULT, result)


def _without_run(settings: Any) -> Any:
    """A candidate's settings; what was read from its run is in its fingerprint, wherever it lay."""
    if isinstance(settings, list):
        return [_without_run(one) for one in settings]
    if not isinstance(settings, Mapping) or "_target_" not in settings:
        return settings
    return {key: _without_run(value) for key, value in settings.items() if key != "run"}


def told(result: Mapping[str, Any]) -> str:
    """A result in lines."""
    from swarm.words import told as compared

    lines = [f"{result['task']}, {result['split']}, {result['items']} items"]
    for voice in result["voices"]:
        low, high = voice["interval"]
        lines.append(
            f"{voice['name']}: {voice['utility']:.3f}, 95 % interval {low:.3f} to {high:.3f}, "
            f"unparsed {100 * voice['unparsed_rate']:.1f} %"
        )
        lines += [f"  {part}: {value:.3f}" for part, value in voice.get("parts", {}).items()]
        if "calls" in voice:
            cost = f", cost {voice['cost']:.4g}" if voice["cost"] else ""
            lines.append(f"  {voice['calls']:,} calls, {voice['tokens']:,} tokens{cost}")
    if best := result.get("against_best"):
        first = result["voices"][0]["name"]
        words = compared(
            best["gain"], best["interval"], best["p_value"], best["items"], "items", False
        )
        lines.append(f"best {best['rivals']}: {best['best']}; {first} against it: {words}")
    lines.append(
        f"{result['prompts']:,} prompts, {result['tokens']:,} tokens, {result['seconds']:.1f} s "
        f"on {result['device']}"
    )
    return "\n".join(lines)


def build(cfg: DictConfig) -> tuple[Evaluation, dict[str, Any]]:
    """The evaluation that a composed configuration describes, and the configuration as values.

    Raises:
        UserError: A value is not allowed; Hydra wraps it.
    """
    from hydra.utils import instantiate

    config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    tree = {key: value for key, value in config.items() if key not in ENTRY_KEYS}
    return instantiate(tree, _convert_="all"), config


@hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="evaluate")
def main(cfg: DictConfig) -> float:
    """Build what the configuration describes and run it; a sweeper gets the first utility."""
    with one_line_errors(None):
        evaluation, config = build(cfg)
        result = evaluation.run(config)
        print(told(result))
        if evaluation.out:
            print(f"answers: {evaluation.out / 'answers.jsonl'}")
        return float(result["voices"][0]["utility"])


if __name__ == "__main__":
    run_entry(main)
