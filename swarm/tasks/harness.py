"""Tasks of the lm-evaluation-harness (EleutherAI): its prompts, its metrics and our models."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from swarm.errors import UserError
from swarm.files import hash_file_cached, short_digest
from swarm.places import find_path
from swarm.tasks import Item, TaskRun, Score, Task, documents, keys, mean_score
from swarm.tasks.data import balance_domains
from swarm.tasks.instances import group_requests, set_responses
from swarm.tasks.mixture import Mixture
from swarm.tasks.perplexity import UNIFORM_BITS_PER_BYTE

WORST_VALUES = {
    "bits_per_byte": UNIFORM_BITS_PER_BYTE,
    "pct_female_preferred": 1.0,
    "pct_invalid": 1.0,
    "pct_male_preferred": 1.0,
    "pct_stereotype": 1.0,
}
"""Of the metrics of which lower is better, what a document counts that cannot be scored."""


def lm_eval(
    name: str = "lm_eval",
    tasks: Sequence[str] = ("arc_easy",),
    combine: str = "mean",
    include_path: str | None = None,
    num_fewshot: int | None = None,
    metric: str | None = None,
    dev_limit: int | None = None,
    test_limit: int | None = None,
    seed: int = 0,
    too_long: str = "refuse",
) -> Task:
    """Tasks of the lm-evaluation-harness by name: one as itself, several as a `Mixture`.

    Args:
        name: The task's name here.
        tasks: Their names there, of tasks, groups or tags.
        combine: How several tasks' utilities become one (see `Mixture`).

    The others are those of `Harness`, the same for all tasks.

    Raises:
        UserError: A value is not allowed.
    """
    settings = (include_path, num_fewshot, metric, dev_limit, test_limit, seed, too_long)
    if isinstance(tasks, str) or not tasks or not all(isinstance(t, str) and t for t in tasks):
        raise UserError("task.tasks: a list of lm-eval's task names is needed, as [arc_easy].")
    if len(tasks) == 1:
        return LMEvalTask(name, tasks[0], *settings)
    return Mixture(name, {task: LMEvalTask(task, task, *settings) for task in tasks}, combine)


class LMEvalTask:
    """One task, group or tag of the lm-evaluation-harness; the utility is a metric's mean.

    Test is the split that lm-eval evaluates (test, else validation). Dev is the next of
    validation and training that the task has; if it has none, its only split is divided into two
    halves by the seed. Of a group all tasks' documents count alike.

    Few-shot examples are drawn as lm-eval draws them, so that the test utility is its number for
    the same model; of dev no document is among its own examples. Three things differ: prompts
    are not cut to the model's length, texts that are scored as wholes (loglikelihood_rolling) are
    cut into windows of characters, and decoding is always greedy.

    The yamls of `include_path` may name Python functions, which are then run.

    Args:
        name: The task's name here.
        task: Its name there.
        include_path: A folder with yamls of tasks of your own; `None` is none.
        num_fewshot: Examples in a prompt; `None` is what the task says. A task that says 0 stays
            at it, as in lm-eval.
        metric: The metric, "acc_norm" say; where a task has several filters, of the first one
            unless it is named: "exact_match,flexible-extract". `None` is the task's first metric
            that is a mean over documents, and minus the bits a byte for texts as wholes. A metric
            of which lower is better is taken negative, if it is one of `WORST`: of another it is
            not known what a document that cannot be scored is worth.
        dev_limit, test_limit: The most documents, from the first on; of a group, in proportion.
        seed: Of the division of an only split.
        too_long: What becomes of documents that do not fit into the model's context: "refuse" or
            "drop"; lm-eval's prompts are not truncated.

    Raises:
        UserError: A value is not allowed.
    """

    votes = False
    lowest = 0.0

    def __init__(
        self,
        name: str,
        task: str,
        include_path: str | None = None,
        num_fewshot: int | None = None,
        metric: str | None = None,
        dev_limit: int | None = None,
        test_limit: int | None = None,
        seed: int = 0,
        too_long: str = "refuse",
    ) -> None:
        self.name, self.task = keys.check_text("name", name), keys.check_text("task", task)
        self.include_path = keys.check_optional_text("include_path", include_path)
        self.num_fewshot = None if num_fewshot is None else keys.check_non_negative_int("num_fewshot", num_fewshot)
        self.metric = keys.check_optional_text("metric", metric)
        self.limits = {
            "dev": keys.check_optional_int("dev_limit", dev_limit),
            "test": keys.check_optional_int("test_limit", test_limit),
        }
        self.seed = keys.check_non_negative_int("seed", seed)
        self.too_long = keys.check_one_of("too_long", too_long, ("refuse", "drop"))
        self._splits: dict[str, tuple[Item, ...]] = {}
        self._tasks: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Theirs hold functions of yamls and open files; each process loads its own.
        return {**self.__dict__, "_tasks": {}}

    def check(self) -> None:
        """Whether the package is there; see `Prepared.check`."""
        documents.require_lm_eval(f"task={self.name}")

    def source_digests(self) -> dict[str, str]:
        """See `swarm.tasks.Sourced`: the yamls and the functions of `include_path`."""
        if self.include_path is None:
            return {}
        folder = find_path(self.include_path)
        files = sorted(one for one in folder.rglob("*") if one.suffix in (".py", ".yaml", ".yml"))
        told = [(one.relative_to(folder).as_posix(), hash_file_cached(one)) for one in files]
        return {"include_path files": short_digest(told)}

    def open(self, device: str) -> None:
        """Load the tasks, whose data are on the disk by now: quietly, beside other workers."""
        from datasets import disable_progress_bars

        disable_progress_bars()
        self.load_tasks()

    def items(self, split: str) -> Sequence[Item]:
        """The documents of "dev" or "test" with their prompts; see `Task.items`."""
        if split not in self.limits:
            raise UserError(f"split: {split!r} is not one of {', '.join(self.limits)}.")
        if split not in self._splits:
            self._splits[split] = self._build_items(split)
        return self._splits[split]

    def replace_items(self, split: str, items: Sequence[Item]) -> None:
        """Take these in the place of a split's documents, from now on."""
        self._splits[split] = tuple(items)

    def run(self, items: Sequence[Item]) -> TaskRun:
        """Ask all that the documents ask, in one round."""
        made = [documents.build_instances(self.load_tasks()[item["task"]], item) for item in items]
        asked = [part for instances in made for part in group_requests(instances)]
        rest = iter((yield [request for part in asked for request in part.requests]))
        for part in asked:
            set_responses(part, rest)
        return [self.score_responses(item, mine) for item, mine in zip(items, made, strict=True)]

    def grade(self, item: Item, answer: str | None) -> float:
        """The value in words, which is the answer of a score."""
        if answer is not None:
            return float(answer)
        task = self.load_tasks()[item["task"]]
        metric, _ = self._select_metric(task)
        return 0.0 if _is_higher_better(task, metric) else -WORST_VALUES[metric]

    def utility(self, scores: Sequence[Score]) -> float:
        """The metric's mean."""
        return mean_score(scores)

    def score_responses(self, item: Item, instances: Sequence[Any]) -> Score:
        """What a document's responses are worth."""
        task = self.load_tasks()[item["task"]]
        metric, filtering = self._select_metric(task)
        next(f for f in task._filters if f.name == filtering).apply(instances)
        responses = [instance.filtered_resps[filtering] for instance in instances]
        text = instances[0].resps[0] if task.OUTPUT_TYPE == "generate_until" else ""
        measures = documents.compute_metrics(task, item, responses)
        if metric not in measures:
            return Score(self.grade(item, None), None, text, measures=measures)
        value = measures[metric] if _is_higher_better(task, metric) else -measures[metric]
        answer = repr(value) if documents.is_readable(responses) else None
        return Score(value, answer, text, measures=measures)

    def load_tasks(self) -> Mapping[str, Any]:
        """lm-eval's tasks by name, loaded once in a process.

        Raises:
            UserError: The package is missing, or it knows no such task or cannot load it.
        """
        if not self._tasks:
            self.check()
            self._tasks = documents.load_lm_eval_tasks(self.task, self.include_path)
            for task in self._tasks.values():
                self._prepare_task(task)
        return self._tasks

    def _prepare_task(self, task: Any) -> None:
        own = task.get_config("num_fewshot")
        wanted = own if self.num_fewshot is None or own == 0 else self.num_fewshot
        task.set_config(key="num_fewshot", value=wanted or 0)
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise UserError(f"task.tasks={self.task}: it runs code of the model's or shows images.")
        if not _is_higher_better(task, self._select_metric(task)[0]):
            self.lowest = -math.inf

    def _select_metric(self, task: Any) -> tuple[str, str]:
        """The metric and the filter that count."""
        metric, _, filtering = (self.metric or "").partition(",")
        filters = [one.name for one in task._filters]
        means = [m for m in documents.mean_metrics(task) if _is_higher_better(task, m) or m in WORST_VALUES]
        if not means or (metric and metric not in means):
            raise UserError(
                f"task.metric={self.metric}: of the metrics of {task.task_name}"
                f" ({', '.join(task.aggregation())}) these are means over documents, the higher"
                f" the better or with a known worst value: {', '.join(means) or 'none'}."
            )
        if filtering and filtering not in filters:
            raise UserError(f"task.metric={self.metric}: the filters are {', '.join(filters)}.")
        return metric or means[0], filtering or filters[0]

    def _build_items(self, split: str) -> tuple[Item, ...]:
        """The items of a split; of a group in such an order that a limit keeps the proportions."""
        docs = {n: documents.split_documents(t, split, self.seed) for n, t in self.load_tasks().items()}
        places = [{"domain": name, "at": at} for name in docs for at in range(len(docs[name]))]
        chosen = balance_domains(places)[: self.limits[split]]
        if not chosen:
            raise UserError(f"task.tasks={self.task}: its {split} split is empty.")
        counts = Counter(str(place["domain"]) for place in chosen)
        made = {
            name: documents.build_items(self.load_tasks()[name], docs[name], count, split == "dev")
            for name, count in counts.items()
        }
        return tuple(made[place["domain"]][place["at"]] for place in chosen)


def _is_higher_better(task: Any, metric: str) -> bool:
    """Whether more of a metric is better."""
    return bool(task.higher_is_better().get(metric, True))
