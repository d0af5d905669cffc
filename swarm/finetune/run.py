"""A fine-tuning run in its folder, and the comparison of its end with its start."""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from swarm._util.files import find_path, make_folder, remove, write_gzip_json, write_json
from swarm._util.secrets import clean, identity_values
from swarm._util.terminal import format_table
from swarm.engine.base import Engine
from swarm.engine.base_model import BaseModel
from swarm.engine.tokenization import encode_choice, encode_prompt
from swarm.errors import UserError
from swarm.executors import Executor, JobResult, Worker
from swarm.finetune.trainer import (
    TokenPair,
    Trainer,
    TrainingArguments,
    check_start_adapter,
    find_start_adapter,
    save_adapter,
    weights_digest,
    write_start_adapter,
)
from swarm.loop.context import check_context
from swarm.loop.evaluator import (
    Batching,
    Evaluator,
    records_to_scores,
    scores_to_records,
    split_dev_holdout,
)
from swarm.loop.search_inputs import check_run_path, digest_items, identity_settings
from swarm.pool.adapter import read_note, write_folder_atomic
from swarm.pool.pool import Pool
from swarm.runs.manifest import MANIFEST_FILE, Manifest
from swarm.runs.run_reader import RunFolder
from swarm.runs.verdict import (
    EXPERT,
    FOUND,
    Compared,
    HeldOut,
    Verdict,
    compare_constant_answers,
    describe_difference,
    domain_table,
    format_gain,
    list_caveats,
    read_verdict,
    result_table,
)
from swarm.stats.significance import PairedTest
from swarm.tasks.base import Item, Score, metric_task
from swarm.tasks.metrics import measure, paired_gain
from swarm.tasks.questions import QuestionTask

UNTESTED_REASON = "that run has no test"
"""Reason why a search is not compared with, until it has been tested."""


class FinetuneComparison:
    """Scores the start and the end of a fine-tuning on the same items with one engine.

    Args:
        task: The task.
        executor: Executor with a pool of the two adapters.
        job: Batching of the requests.
        label: Name of the start.
        held_out: Indices of dev items that were not trained on.
        test: Whether to score the test split, too.
    """

    def __init__(
        self,
        task: Any,
        executor: Executor,
        job: Batching,
        label: str,
        held_out: Sequence[int],
        test: bool,
    ) -> None:
        self.task, self.label, self.held_out, self.test = task, label, held_out, test
        self._executor = executor
        self._evaluator = Evaluator(task, executor, job)
        self._prompts = 0

    def compare(self, folder: Path, run: RunFolder | None) -> tuple[Verdict, dict[str, Any]]:
        """Return the verdict and the comparison with a search; write the answers to the folder.

        Args:
            folder: Folder of the fine-tuning.
            run: A search of the same task to compare with.
        """
        task = metric_task(self.task)
        splits = {"dev": "judged"} | ({"test": "test"} if self.test else {})
        scores = {name: self._score_split(split) for name, split in splits.items()}
        rows = {
            name: [scores_to_records(self.task.items(name), one) for one in pair]
            for name, pair in scores.items()
        }
        write_gzip_json(folder / "answers.json.gz", rows)
        dev, test = self.task.items("dev"), self.task.items("test") if self.test else []
        on_dev = [measure(task, one, dev) for one in scores["dev"]]
        on_test = [measure(task, one, test) for one in scores["test"]] if test else [None, None]
        gain = paired_gain(task, *reversed(scores["test"])) if self.test else None
        alternatives = [Compared(EXPERT, self.label, on_dev[0], on_test[0], gain)]
        after = scores["test"][1] if self.test else ()
        if constant := compare_constant_answers(task, dev, test, after):
            alternatives.append(constant)
        held_out = None
        if self.held_out:
            before, ending = ([one[i] for i in self.held_out] for one in scores["dev"])
            pair = paired_gain(task, ending, before)
            held_out = HeldOut(measure(task, before), measure(task, ending), pair, False)
        verdict = Verdict(
            Compared(FOUND, "tuned", on_dev[1], on_test[1]),
            self.label,
            sorted(alternatives, key=lambda one: -one.test.utility if one.test else 0.0),
            held_out=held_out,
            costs={"prompts_scored": self._prompts},
        )
        searched = self._compare_with_search(run, scores["test"][1]) if run and self.test else {}
        return verdict, searched

    def _score_split(self, split: str) -> list[list[Score]]:
        return self._evaluator.score_positions(np.eye(2).tolist(), split, self._count_prompts)

    def _count_prompts(self, result: JobResult) -> None:
        self._prompts += result.prompts

    def _compare_with_search(self, run: RunFolder, tuned: Sequence[Score]) -> dict[str, Any]:
        """Compare with the search's best, or return why the two are not comparable."""
        rows = run.load_test_answers(run.find_best())
        if rows is None:
            return {"not_compared": UNTESTED_REASON}
        if run.verdict is None or run.test_items != digest_items(self.task, "test"):
            return {"not_compared": "that run was tested on different items"}
        task, before = metric_task(self.task), records_to_scores(rows)
        same = run.identity.get("task items") == digest_items(self.task, "dev")
        return {
            "searched": {
                "run": run.path.name,
                "prompts": run.verdict.cost,
                "same_items": same,
                "utility": task.utility(before),
                "gain": asdict(paired_gain(task, tuned, before)),
            }
        }


def scores_table(verdict: Verdict, before: str, after: str) -> list[str]:
    """Format dev and test scores as a table: baselines, then start and end with these labels."""
    return format_table(*result_table(verdict, (before, after)))


def domain_lines(verdict: Verdict, before: str, after: str) -> list[str]:
    """Format utilities by domain on test (without a test on dev) after an empty line."""
    found = domain_table(verdict, (before, after))
    return ["", *format_table(*found)] if found else []


def format_tuning(verdict: Verdict, facts: Mapping[str, Any]) -> list[str]:
    """Format the verdict and the facts of a fine-tuning as a table and sentences."""
    names = (verdict.expert, "tuned")
    found = [*scores_table(verdict, *names), *domain_lines(verdict, *names)]
    found += list_caveats(replace(verdict, held_out=None), names)
    found.append(
        f"Brackets: 95 % intervals. {facts['examples']} of the dev items were used for training, "
        "so the dev score of the tuned model is optimistic."
    )
    found.append(
        f"Chosen: step {facts['step']} of {facts['steps']}. Training examples (forward and "
        f"backward): {facts['examples_seen']}; held-out examples (forward): "
        f"{facts['examples_evaluated']}; prompts for this table: {verdict.cost}."
    )
    if kept := verdict.held_out:
        gain = describe_difference(kept.gain, "held-out dev items", True)
        found.append(
            f"Held-out dev items: {kept.expert.utility:.3f} before, {kept.found.utility:.3f} "
            f"after. {gain}"
        )
    for one in verdict.alternatives:
        if one.gain:
            label = verdict.expert if one.name == EXPERT else f"the {one.label}"
            found.append(f"Gain on test over {label}: {format_gain(verdict, one)}.")
    if searched := facts.get("searched"):
        gain = describe_difference(PairedTest(**searched["gain"]), "test items", True)
        found.append(
            f"Compared to the best found of {searched['run']}, at the cost of "
            f"{searched['prompts']} dev prompts, {searched['utility']:.3f} on test: {gain}"
        )
    if reason := facts.get("not_compared"):
        found.append(f"Not compared with the best found: {reason}.")
    return found


log = logging.getLogger(__name__)

STATE_FILE = "tuning.json"
CHECKPOINT_FILE = "training.safetensors"
ANSWERS = "answers.json.gz"


class FinetuneRun:
    """Trains a LoRA adapter on a task's dev items; construction is cheap, `tune` does the work.

    Args:
        name: Name of the folder below `folder`; a killed run is resumed.
        task: Task with gold answers: multiple choice or exact match.
        model, pool, engine, executor, job: As for a search.
        expert: Name of an expert of the pool, or folder of an adapter, to start from.
        run: A run folder, whose best initial expert is the start; without both, a fresh LoRA is.
        steps, batch, rate, every, patience: See `swarm.finetune.trainer.TrainingArguments`.
        holdout: Share of dev items held out from training; 0 for none.
        rank, alpha, targets: Parameters of a fresh LoRA.
        seed: Random seed.
        test: Whether to compare start and end on the test split.
        gpus: CUDA devices; the first one trains.
        folder: Parent of the run's folder.

    Raises:
        UserError: A value is invalid.
    """

    def __init__(
        self,
        name: str,
        task: Any,
        model: BaseModel,
        pool: Any,
        engine: Engine,
        executor: Executor,
        job: Batching,
        expert: str | None = None,
        run: str | None = None,
        steps: int = 100,
        batch: int = 8,
        rate: float = 1e-3,
        holdout: float = 0.2,
        every: int = 10,
        patience: int = 3,
        rank: int = 8,
        alpha: float = 16,
        targets: Sequence[str] = ("q_proj", "v_proj"),
        seed: int = 42,
        test: bool = True,
        gpus: Sequence[int] = (),
        folder: str = "search",
    ) -> None:
        name = str(name) if type(name) is int else name  # Hydra parses name=2 as a number
        check_run_path(name, folder)
        if not isinstance(task, QuestionTask) or task.rounds > 1:
            raise UserError(
                "fine-tuning needs gold answers: a task of "
                "swarm.tasks.multiple_choice.MultipleChoice "
                "or swarm.tasks.exact_match.ExactMatch, e.g. task=nlgraph_mini"
            )
        if not isinstance(pool, Pool):
            raise UserError("fine-tuning trains an adapter and needs pool=adapters")
        for key, value in (("expert", expert), ("run", run)):
            if value is not None and not (isinstance(value, str) and value.strip()):
                raise UserError(f"{key}={value!r}: must be null or a folder name")
        if expert and run:
            raise UserError(f"expert={expert} and run={run}: give only one to start from")
        if type(holdout) not in (int, float) or not 0 <= holdout < 1:
            raise UserError(f"holdout={holdout!r}: must be a fraction of dev, from 0 to below 1")
        if type(seed) is not int or seed < 0:
            raise UserError(f"seed={seed!r}: must be an integer, 0 or more")
        if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or alpha <= 0:
            raise UserError(f"rank={rank!r}, alpha={alpha!r}: must be an integer and a number")
        if isinstance(targets, str) or not targets or not all(isinstance(t, str) for t in targets):
            raise UserError(
                f"targets={targets!r}: must be a list of layers, such as [q_proj,v_proj]"
            )
        self.task: Any = task
        self.model, self.pool, self.engine = model, pool, engine
        self.executor, self.job, self.expert, self.run = executor, job, expert, run
        self.recipe = TrainingArguments(steps, batch, rate, every, patience, seed)
        self.holdout, self.seed, self.test = holdout, seed, test
        self.fresh: dict[str, Any] = {
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": list(targets),
        }
        self.device = f"cuda:{gpus[0]}" if gpus else "cpu"
        self.folder = Path(folder) / name
        self.state: dict[str, Any] = {}
        self._manifest = Manifest(self.folder)

    def tune(self, config: Mapping[str, Any] | None = None) -> Verdict:
        """Train, resume, or print the results of a finished run; return the verdict.

        Args:
            config: Configuration, stored in the folder and compared on resume.

        Raises:
            UserError: An input is invalid; nothing has been written then.
        """
        tokenizer = self.model.load_tokenizer(self.model.resolve())
        splits = ("dev", "test") if self.test else ("dev",)
        check_context(self.task, tokenizer, self.model.context_length(), splits)
        dev = self.task.items("dev")
        test_digest = {"test_items": digest_items(self.task, "test") if self.test else None}
        trained, held_out = split_dev_holdout(dev, self.holdout, self.seed)
        label, source = find_start_adapter(self.expert, self.run, self.pool.folder)
        if not (self.folder / "tuned").is_dir():
            check_start_adapter(source, self.fresh["target_modules"], self.model)
        self._open_state(config or {}, label, source)
        if not (self.folder / "tuned").is_dir():
            self._train_adapter(
                label, source, [dev[i] for i in trained], [dev[i] for i in held_out]
            )
        verdict, facts = read_verdict(self.state), self.state.get("tuning") or {}
        if (
            verdict is None
            or facts["test_digest"] != test_digest
            or self._is_search_tested_now(facts)
        ):
            verdict, facts = self._compare_start_end(label, held_out)
            facts |= {"test_digest": test_digest, **read_note(self.folder / "tuned")["training"]}
            self._save_state(verdict=verdict.to_dict(), tuning=facts)
        print("\n".join(format_tuning(verdict, facts)))
        print(f"tuned adapter: {self.folder / 'tuned'}")
        return verdict

    def _is_search_tested_now(self, facts: Mapping[str, Any]) -> bool:
        """Return whether the search has been tested since the comparison with it was skipped."""
        if not self.run or facts.get("not_compared") != UNTESTED_REASON:
            return False
        return bool(RunFolder(find_path(self.run)).test_items)

    def _open_state(self, config: Mapping[str, Any], label: str, source: Path | None) -> None:
        """Read the state of this fine-tuning from the folder, or write the initial one."""
        chosen = {key: config[key] for key in ("task", "model") if key in config}
        identity = {
            **identity_settings(chosen),
            **asdict(self.recipe),
            "holdout": self.holdout,
            "task items": digest_items(self.task, "dev"),
            "base weights": self.model.fingerprint(),
            "start": label,
            "start weights": weights_digest(source) if source else json.dumps(self.fresh),
        }
        path = self.folder / STATE_FILE
        if path.is_file():
            self.state = read_state(path)
            self._verify()
            if self._has_started() or self.state["identity"] == identity:
                self._check_identity(identity)
                return
            shutil.rmtree(self.folder / "start", ignore_errors=True)
            self._manifest.remove_paths("start")
            self.state = {}
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(f"{self.folder} contains something else; choose another name=")
        self._save_state(identity=identity, config=clean(config))

    def _verify(self) -> None:
        """Verify the checksums of the folder's files; damaged answers are computed again.

        Raises:
            UserError: Any other file is damaged or missing.
        """
        damaged = self._manifest.read().find_damaged()
        if self._manifest.lost and self._has_started():
            log.warning(
                "%s is missing or damaged; recomputed from the present files",
                self.folder / MANIFEST_FILE,
            )
        for path in damaged:
            if path != ANSWERS:
                raise UserError(
                    f"{self.folder / path} is damaged or missing; restore it from a copy, or "
                    "choose another name= to train again"
                )
            log.warning("%s is damaged or missing; evaluated again", self.folder / path)
            remove(self.folder / path)
            self.state["verdict"] = None
        # A kill may leave a file without a checksum, but never with a wrong one.
        with self._manifest.updating_checksums(STATE_FILE, *damaged):
            for path in ("start", "tuned", ANSWERS):
                if not self._manifest.paths_under(path):
                    self._manifest.add_checksums(path)

    def _has_started(self) -> bool:
        """Return whether the folder contains trained weights."""
        return any((self.folder / name).exists() for name in (CHECKPOINT_FILE, "tuned"))

    def _check_identity(self, new: Mapping[str, Any]) -> None:
        old = self.state["identity"] = identity_values(self.state["identity"])
        differ = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        if differ:
            changes = "; ".join(f"{k}: {old.get(k)!r} then, {new.get(k)!r} now" for k in differ[:6])
            raise UserError(
                f"name={self.folder.name}: {self.folder} contains another fine-tuning ({changes}); "
                "give the same values to resume, or another name= to start again"
            )

    def _save_state(self, **more: Any) -> None:
        self.state |= more
        make_folder(self.folder, private=True)
        with self._manifest.updating_checksums(STATE_FILE):
            write_json(self.folder / STATE_FILE, self.state)

    def _train_adapter(
        self, label: str, source: Path | None, examples: Sequence[Item], held_out: Sequence[Item]
    ) -> None:
        import torch
        from peft import PeftModel

        from swarm.engine.base_model import quiet_transformers

        model, tokenizer = self.model.load(self.device)
        with quiet_transformers():
            if not (self.folder / "start").is_dir():
                with self._manifest.updating_checksums("start"):
                    write_start_adapter(
                        self.folder / "start", source, lambda: self._add_fresh_lora(model), label
                    )
            adapted = PeftModel.from_pretrained(model, self.folder / "start", is_trainable=True)
        pairs = [tokenize_items(self.task, items, tokenizer) for items in (examples, held_out)]
        print(f"{self.folder}: training on {len(examples)} dev items, holding out {len(held_out)}")
        trainer = Trainer(adapted, self.recipe, self.folder / CHECKPOINT_FILE, print)
        try:
            progress = trainer.train(*pairs)
        except torch.OutOfMemoryError:
            raise UserError(
                f"out of memory on {self.device}; lower batch={self.recipe.batch}"
            ) from None
        examples_seen = progress.step * self.recipe.batch
        training = {
            "step": progress.best,
            "steps": progress.step,
            "evaluations": progress.evaluations,
            "examples": len(examples),
            "examples_seen": examples_seen,
            "examples_evaluated": len(progress.evaluations) * len(held_out),
        }
        note = {
            "tuned_from": label,
            "task": self.task.name,
            "training": training,
        }
        with self._manifest.updating_checksums("tuned"):
            write_folder_atomic(
                self.folder / "tuned", lambda to: save_adapter(adapted, to), note, "adapter"
            )
        (self.folder / CHECKPOINT_FILE).unlink(missing_ok=True)

    def _add_fresh_lora(self, model: Any) -> Any:
        """Return the model with a fresh LoRA, whose initial change is zero."""
        import torch
        from peft import LoraConfig, get_peft_model

        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **self.fresh))
        adapted.peft_config["default"].base_model_name_or_path = self.model.name or self.model.path
        return adapted

    def _compare_start_end(
        self, label: str, held_out: Sequence[int]
    ) -> tuple[Verdict, dict[str, Any]]:
        """Compare start and end, which are the positions [1, 0] and [0, 1] of a pool."""
        pool = Pool(self.folder.resolve(), ["start", "tuned"])
        pool.open(self.model).check()
        run = RunFolder(find_path(self.run)) if self.run else None
        try:
            self.executor.open(Worker(self.model, pool, self.task, self.engine))
            compared = FinetuneComparison(
                self.task, self.executor, self.job, label, held_out, self.test
            )
            with self._manifest.updating_checksums(ANSWERS):
                return compared.compare(self.folder, run)
        finally:
            self.executor.close()


def read_state(path: Path) -> dict[str, Any]:
    """Read a fine-tuning's state file.

    Raises:
        UserError: It is damaged.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found["identity"], dict):
            return found
    except (OSError, ValueError, TypeError, KeyError):
        pass
    raise UserError(f"{path} is damaged: choose another name=, or remove its folder")


def tokenize_items(task: QuestionTask, items: Sequence[Item], tokenizer: Any) -> list[TokenPair]:
    """Tokenize prompts and gold answers as a search does; append the end token."""
    found = []
    for item in items:
        request = task.gold_request(item)
        answer = encode_choice(tokenizer, request.prompt, request.choices[0])
        found.append((encode_prompt(tokenizer, request.prompt), [*answer, tokenizer.eos_token_id]))
    return found
