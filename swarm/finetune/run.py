"""A fine-tuning run in its folder, and the comparison of its end with its start."""

import json
import logging
import shutil
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, SkipValidation

from swarm._util.files import (
    find_path,
    hash_file_cached,
    make_folder,
    parse_json,
    remove,
    write_gzip_json,
    write_json,
)
from swarm._util.secrets import clean, identity_values
from swarm._util.settings import Count, Positive, PositiveNumber, Text, checked
from swarm._util.terminal import format_table
from swarm.engine.base import Engine
from swarm.engine.base_model import BaseModel
from swarm.engine.tokenization import encode_choice, encode_prompt
from swarm.errors import UserError
from swarm.executors import Executor, Worker
from swarm.loop.context import check_context
from swarm.loop.evaluator import (
    Batching,
    Evaluator,
    scores_to_records,
    split_dev_holdout,
)
from swarm.loop.identity import check_run_path, digest_items, identity_settings
from swarm.optimizers.base import GRADIENT_COST
from swarm.pool.adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_adapter,
    read_note,
    write_folder_atomic,
)
from swarm.pool.discovery import check_base_models
from swarm.pool.pool import Pool
from swarm.runs.folder import CHECKSUMS_FILE, Record
from swarm.runs.verdict import (
    EXPERT,
    FOUND,
    FRESH_LABEL,
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
from swarm.tasks.base import Item, Score
from swarm.tasks.metrics import measure, paired_gain
from swarm.tasks.questions import QuestionTask

if TYPE_CHECKING:
    from swarm.finetune.trainer import TokenPair

log = logging.getLogger(__name__)

STATE_FILE = "tuning.json"
TRAINING = "training"
"""Folder of the checkpoints, until training has ended."""

ANSWERS = "answers.json.gz"


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
        f"Chosen: step {facts['step']} of {facts['steps']}, rate {facts['rate']:g}. Training "
        f"examples (forward and backward): {facts['examples_seen']}; held-out examples (forward): "
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
    return found


@checked()
class FinetuneRun:
    """Trains a LoRA adapter on a task's dev items; construction is cheap, `tune` does the work.

    Args:
        name: Name of the folder below `folder`; a killed run is resumed.
        task: Task with gold answers: multiple choice or exact match.
        model, pool, engine, executor, job: As for a search.
        expert: Name of an expert of the pool, or folder of an adapter, to start from; `None` is a
            fresh LoRA.
        batch, every, patience: See `swarm.finetune.trainer.AdapterTrainer`.
        steps: Steps of the chosen rate, its trial included; `None` is what `budget` pays for, or
            100.
        budget: Maximum cost in prompt-equivalents, trials included: 3 for a training example, 1
            for a held-out one. It lowers `steps`; `None` is no limit.
        rate: Learning rate, or several, each tried for `every` steps from the same start; the one
            with the lowest held-out loss is trained further.
        holdout: Share of dev items held out from training; 0 for none, with one rate.
        rank, alpha, targets: Parameters of a fresh LoRA; "all-linear" is all linear layers but the
            output's.
        seed: Random seed.
        test: Whether to compare start and end on the test split.
        gpus: CUDA devices; the first one trains.
        folder: Parent of the run's folder.

    Raises:
        UserError: A value is invalid.
    """

    def __init__(
        self,
        name: str | int,
        task: Any,
        model: BaseModel,
        pool: Any,
        engine: SkipValidation[Engine],
        executor: SkipValidation[Executor],
        job: Batching,
        expert: Text | None = None,
        steps: Positive | None = None,
        budget: Positive | None = None,
        batch: Positive = 8,
        rate: PositiveNumber | Annotated[list[PositiveNumber], Field(min_length=1)] = 1e-3,
        holdout: Annotated[float, Field(ge=0, lt=1)] = 0.2,
        every: Positive = 10,
        patience: Positive = 3,
        rank: Positive = 16,
        alpha: PositiveNumber = 32,
        targets: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)] = "all-linear",
        seed: Count = 42,
        test: bool = True,
        gpus: Sequence[int] = (),
        folder: str = "search",
    ) -> None:
        name = str(name)  # Hydra parses name=2 as a number
        check_run_path(name, folder)
        if not isinstance(task, QuestionTask) or task.rounds > 1:
            raise UserError(
                "fine-tuning needs gold answers: a task of "
                "swarm.tasks.multiple_choice.MultipleChoice "
                "or swarm.tasks.exact_match.ExactMatch, e.g. task=nlgraph_mini"
            )
        if not isinstance(pool, Pool):
            raise UserError("fine-tuning trains an adapter and needs pool=adapters")
        self.task: Any = task
        self.model, self.pool, self.engine = model, pool, engine
        self.executor, self.job, self.expert = executor, job, expert
        rates = rate if isinstance(rate, list) else [rate]
        if len(rates) > 1 and not holdout:
            raise UserError("holdout=0: held-out items choose among several rates; give one rate=")
        steps = steps if steps or budget else 100
        self.recipe: dict[str, Any] = {"steps": steps, "batch": batch, "rate": rates}
        self.recipe |= {"every": every, "patience": patience, "seed": seed}
        self.budget, self.holdout, self.seed, self.test = budget, holdout, seed, test
        self.splits = ("dev", "test") if test else ("dev",)
        self.fresh: dict[str, Any] = {"r": rank, "lora_alpha": alpha}
        self.fresh["target_modules"] = targets
        self.device = f"cuda:{gpus[0]}" if gpus else "cpu"
        self.folder = Path(folder) / name
        self.state: dict[str, Any] = {}
        self._record = Record(self.folder, CHECKSUMS_FILE)

    def tune(self, config: Mapping[str, Any] | None = None) -> Verdict:
        """Train, resume, or print the results of a finished run; return the verdict.

        Args:
            config: Configuration, stored in the folder and compared on resume.

        Raises:
            UserError: An input is invalid; nothing has been written then.
        """
        tokenizer = self.model.load_tokenizer(self.model.resolve())
        if self.task.chat == "auto":  # a new LoRA learns either form
            self.task.chat = False
        check_context(self.task, tokenizer, self.model.context_length(), self.splits)
        dev, tuned = self.task.items("dev"), self.folder / "tuned"
        test_digest = {"test_items": digest_items(self.task, "test") if self.test else None}
        trained, held_out = split_dev_holdout(dev, self.holdout, self.seed)
        if self.budget:
            self._limit_steps(self.budget, len(held_out))
        label, source = self._find_start()
        if not tuned.is_dir():
            check_start_adapter(source, self.fresh["target_modules"], self.model)
        self._open_state(config or {}, label, source)
        if not tuned.is_dir():
            self._train_adapter(
                label, source, [dev[i] for i in trained], [dev[i] for i in held_out]
            )
        verdict, facts = read_verdict(self.state), self.state.get("tuning") or {}
        if verdict is None or facts["test_digest"] != test_digest:
            verdict = self._compare_start_end(label, held_out)
            facts = {"test_digest": test_digest, **read_note(tuned)["training"]}
            self._save_state(verdict=verdict.to_dict(), tuning=facts)
        print("\n".join(format_tuning(verdict, facts)))
        print(f"tuned adapter: {tuned}")
        return verdict

    def _limit_steps(self, budget: int, held_out: int) -> None:
        """Lower the steps of the chosen rate to those that a budget pays for, beside the trials.

        A step costs `GRADIENT_COST` for each example of its batch. The held-out examples are
        evaluated at the start of each rate, after every `every` steps, and at the end.

        Raises:
            UserError: It pays for no step.
        """
        batch, every = self.recipe["batch"], self.recipe["every"]
        others = len(self.recipe["rate"]) - 1

        def cost(steps: int) -> int:
            trained = steps + others * min(every, steps)
            evaluations = 1 + -(-steps // every) + 2 * others
            return GRADIENT_COST * batch * trained + held_out * evaluations

        steps = bisect_right(range(budget), budget, key=cost) - 1
        if steps < 1:
            raise UserError(f"budget={budget} is too small for a training step of each rate")
        self.recipe["steps"] = min(steps, self.recipe["steps"] or steps)

    def _open_state(self, config: Mapping[str, Any], label: str, source: Path | None) -> None:
        """Read the state of this fine-tuning from the folder, or write the initial one."""
        chosen = {key: config[key] for key in ("task", "model") if key in config}
        new = {
            **identity_settings(chosen),
            **self.recipe,
            "holdout": self.holdout,
            "task items": digest_items(self.task, "dev"),
            "base weights": self.model.fingerprint(),
            "start": label,
            "start weights": (
                hash_file_cached(source / WEIGHTS_FILE)[:16] if source else json.dumps(self.fresh)
            ),
        }
        path = self.folder / STATE_FILE
        if path.is_file():
            self.state = read_state(path)
            old = self.state["identity"] = identity_values(self.state["identity"])
            self._verify()
            differ = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
            if not differ:
                return
            if self._has_started():
                changes = [f"{k}: {old.get(k)!r} then, {new.get(k)!r} now" for k in differ[:6]]
                raise UserError(
                    f"name={self.folder.name}: {self.folder} contains another fine-tuning "
                    f"({'; '.join(changes)}); give the same values to resume, or another name= to "
                    "start again"
                )
            for name in ("start", TRAINING):
                shutil.rmtree(self.folder / name, ignore_errors=True)
            self._record.forget(self._record.paths_under("start", TRAINING))
            self.state = {}
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(f"{self.folder} contains something else; choose another name=")
        self._save_state(identity=new, config=clean(config))

    def _verify(self) -> None:
        """Verify the checksums of the folder's files; damaged answers are computed again.

        Raises:
            UserError: The adapter of the start or of the end is damaged or missing.
        """
        self._record = record = Record(self.folder, CHECKSUMS_FILE).read()
        damaged = record.find_damaged()
        if (record.damage or not record.path.is_file()) and self._has_started():
            log.warning("%s is missing or damaged; recomputed from the present files", record.path)
        for path in damaged:
            if path == ANSWERS:
                log.warning("%s is damaged or missing; evaluated again", self.folder / path)
                remove(self.folder / path)
                self.state["verdict"] = None
            elif not path.startswith(f"{TRAINING}/"):  # see `_last_checkpoint`
                raise UserError(
                    f"{self.folder / path} is damaged or missing; restore it from a copy, or "
                    "choose another name= to train again"
                )
        # A kill may leave a file without a checksum, but never with a wrong one.
        record.forget(damaged)
        known = (STATE_FILE, "start", "tuned", ANSWERS)
        record.add_checksums(*(path for path in known if not record.paths_under(path)))

    def _has_started(self) -> bool:
        """Return whether the folder contains trained weights."""
        checkpoints = (self.folder / TRAINING).glob("*/checkpoint-*")
        return (self.folder / "tuned").exists() or any(checkpoints)

    def _last_checkpoint(self, rate: float) -> Path | None:
        """Return the last checkpoint at a rate of which all files are intact."""
        found = (self.folder / TRAINING / f"{rate:g}").glob("checkpoint-*")
        for folder in sorted(found, key=lambda one: -int(one.name.split("-")[1])):
            files = {path.relative_to(self.folder).as_posix() for path in folder.iterdir()}
            if files and files <= set(self._record.sums):
                return folder
            log.warning("%s is incomplete or damaged; its steps are repeated", folder)
        return None

    def _save_state(self, **more: Any) -> None:
        self.state |= more
        make_folder(self.folder, private=True)
        with self._record.replacing(STATE_FILE):
            write_json(self.folder / STATE_FILE, self.state)

    def _train_adapter(
        self, label: str, source: Path | None, examples: Sequence[Item], held_out: Sequence[Item]
    ) -> None:
        import torch
        from peft import PeftModel

        from swarm.engine.base_model import quiet_transformers
        from swarm.finetune.trainer import AdapterTrainer, save_adapter, shuffled_batches

        model, tokenizer = self.model.load(self.device)
        with quiet_transformers():
            if not (self.folder / "start").is_dir():
                with self._record.replacing("start"):
                    self._write_start(model, label, source)
        trained, held = (tokenize_items(self.task, one, tokenizer) for one in (examples, held_out))
        print(f"{self.folder}: training on {len(examples)} dev items, holding out {len(held_out)}")
        recipe = dict(self.recipe)
        batch, steps, rates = (recipe.pop(key) for key in ("batch", "steps", "rate"))
        trial = min(recipe["every"], steps) if len(rates) > 1 else 0

        def add_checksums() -> None:
            with self._record.replacing(TRAINING):
                pass

        def train(rate: float, last: int) -> AdapterTrainer:
            """Train up to the step `last`, from the last checkpoint."""
            with quiet_transformers():
                adapted = PeftModel.from_pretrained(model, self.folder / "start", is_trainable=True)
            trainer = AdapterTrainer(
                adapted,
                trained,
                shuffled_batches(len(trained), batch, steps, self.seed),
                rate,
                say=partial(print, f"rate {rate:g},") if trial else print,
                trial=trial,
                held_out=held,
                folder=self.folder / TRAINING / f"{rate:g}",
                checkpoint=self._last_checkpoint(rate),
                on_checkpoint=add_checksums,
                **recipe,
            )
            try:
                trainer.run(last)
            except torch.OutOfMemoryError:
                raise UserError(f"out of memory on {self.device}; lower batch={batch}") from None
            return trainer

        tried: dict[float, AdapterTrainer] = {}
        for rate in rates if trial else ():
            tried[rate] = train(rate, trial)
            model = tried[rate].model.unload()
        rate = min(tried, key=lambda one: tried[one].losses[trial], default=rates[0])
        best = tried[rate] = train(rate, steps)
        training = {
            "rate": rate,
            "step": best.best_step,
            "steps": best.state.global_step,
            "evaluations": best.evaluations,
            "examples": len(examples),
            "examples_seen": sum(one.state.global_step for one in tried.values()) * batch,
            "examples_evaluated": sum(len(one.losses) for one in tried.values()) * len(held_out),
        }
        note = {"tuned_from": label, "task": self.task.name, "training": training}
        with self._record.replacing("tuned", TRAINING):
            write_folder_atomic(
                self.folder / "tuned", lambda to: save_adapter(best.model, to), note, "adapter"
            )
            shutil.rmtree(self.folder / TRAINING, ignore_errors=True)

    def _find_start(self) -> tuple[str, Path | None]:
        """Return the label and the folder of the start; a folder of `None` is a fresh LoRA.

        Raises:
            UserError: There is no such adapter.
        """
        if not self.expert:
            return FRESH_LABEL, None
        for folder in (self.pool.folder / self.expert, find_path(self.expert)):
            if folder.is_dir():
                read_adapter(folder)
                return folder.name, folder
        raise UserError(
            f"expert={self.expert}: neither an expert in {self.pool.folder} nor a folder; "
            "give one of the two, or null for a fresh LoRA"
        )

    def _write_start(self, model: Any, label: str, source: Path | None) -> None:
        """Write a copy of the adapter in `source`, or a fresh LoRA, whose initial change is 0."""
        import torch
        from peft import LoraConfig, get_peft_model

        from swarm.finetune.trainer import save_adapter

        def write_files(to: Path) -> None:
            if source:
                for name in (CONFIG_FILE, WEIGHTS_FILE):
                    shutil.copyfile(source / name, to / name)
                return
            with torch.random.fork_rng():
                torch.manual_seed(self.seed)
                adapted: Any = get_peft_model(
                    model, LoraConfig(task_type="CAUSAL_LM", **self.fresh)
                )
            config = adapted.peft_config["default"]
            config.base_model_name_or_path = self.model.name or self.model.path
            save_adapter(adapted, to)
            adapted.unload()

        write_folder_atomic(self.folder / "start", write_files, {"copy_of": label}, "adapter")

    def _compare_start_end(self, label: str, held_out: Sequence[int]) -> Verdict:
        """Score start and end, the positions [1, 0] and [0, 1] of a pool, on the same items.

        Args:
            label: Name of the start.
            held_out: Indices of dev items that were not trained on.
        """
        pool = Pool(self.folder.resolve(), ["start", "tuned"])
        pool.open(self.model).check()
        prompts: list[int] = []
        try:
            self.executor.open(Worker(self.model, pool, self.task, self.engine))
            evaluator = Evaluator(self.task, self.executor, self.job)
            evaluator.on_job = lambda result: prompts.append(result.prompts)
            with self._record.replacing(ANSWERS):
                ends = np.eye(2).tolist()
                scores = {split: evaluator.score_positions(ends, split) for split in self.splits}
                rows = {
                    split: [scores_to_records(self.task.items(split), one) for one in pair]
                    for split, pair in scores.items()
                }
                write_gzip_json(self.folder / ANSWERS, rows)
        finally:
            self.executor.close()
        verdict = self._judge(label, scores, held_out)
        return replace(verdict, costs={"prompts_scored": sum(prompts)})

    def _judge(
        self, label: str, scores: Mapping[str, Sequence[list[Score]]], held_out: Sequence[int]
    ) -> Verdict:
        """Return the verdict on the scores of start and end, by split."""
        task = self.task.metric_task
        dev, test = self.task.items("dev"), self.task.items("test") if self.test else []
        on_dev = [measure(task, one, dev) for one in scores["dev"]]
        on_test = [measure(task, one, test) for one in scores["test"]] if test else [None, None]
        gain = paired_gain(task, *reversed(scores["test"])) if self.test else None
        alternatives = [Compared(EXPERT, label, on_dev[0], on_test[0], gain)]
        after = scores["test"][1] if self.test else ()
        if constant := compare_constant_answers(task, dev, test, after):
            alternatives.append(constant)
        kept = None
        if held_out:
            before, ending = ([one[i] for i in held_out] for one in scores["dev"])
            pair = paired_gain(task, ending, before)
            kept = HeldOut(measure(task, before), measure(task, ending), pair, False)
        return Verdict(
            Compared(FOUND, "tuned", on_dev[1], on_test[1]),
            label,
            sorted(alternatives, key=lambda one: -one.test.utility if one.test else 0.0),
            held_out=kept,
        )


def read_state(path: Path) -> dict[str, Any]:
    """Read a fine-tuning's state file.

    Raises:
        UserError: It is damaged.
    """
    try:
        found: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        return {**found, "identity": dict(found["identity"])}
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(f"{path} is damaged: choose another name=, or remove its folder") from None


def tokenize_items(task: QuestionTask, items: Sequence[Item], tokenizer: Any) -> "list[TokenPair]":
    """Tokenize prompts and gold answers as a search does; append the end token."""
    found = []
    for item in items:
        request = task.gold_request(item)
        answer = encode_choice(tokenizer, request.prompt, request.choices[0])
        found.append((encode_prompt(tokenizer, request.prompt), [*answer, tokenizer.eos_token_id]))
    return found


def check_start_adapter(source: Path | None, targets: Sequence[str] | str, base: BaseModel) -> None:
    """Check that the adapter in `source`, or a fresh one of `targets`, fits the base.

    Only the shapes of the base are built, not its weights.

    Raises:
        UserError: It belongs to another base, or a layer does not exist or has another shape.
    """
    import torch

    adapter = read_adapter(source) if source else None
    if adapter:
        check_base_models([adapter], base)
    model, _ = base.load_without_weights()
    layers = {
        name: (layer.in_features, layer.out_features)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    for name, (inputs, outputs, _) in (adapter.shapes if adapter else {}).items():
        if layers.get(name) != (inputs, outputs):
            raise UserError(
                f"{source}: adapts {name}, {inputs} to {outputs}, which {base.path} does not "
                "have as a linear layer; give an adapter of this base, or its own base as model="
            )
    for target in [] if adapter or isinstance(targets, str) else targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            have = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise UserError(
                f"targets has {target!r}, which is not a linear layer of {base.path}; "
                f"available: {have}"
            )
