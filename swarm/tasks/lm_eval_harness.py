"""Tasks of the lm-evaluation-harness (EleutherAI).

Its tasks are loaded with their documents, prompts and metrics; its instances become requests, and
completions become its responses.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

from swarm._util.files import find_path, hash_file_cached, short_digest
from swarm._util.settings import Count, Positive, Text, checked
from swarm.errors import UserError, install_command
from swarm.models.base import Completion, Example, Request
from swarm.tasks.base import Item, Score, SplitTask, Task, TaskRun
from swarm.tasks.dataset import balance_domains
from swarm.tasks.mixture import Combination, Mixture
from swarm.tasks.perplexity import (
    UNIFORM_BITS_PER_BYTE,
    choice_logprob,
    preceding_context,
    split_windows,
)

log = logging.getLogger(__name__)

FEWSHOT_SEED = 1234
"""Seed of lm-eval, so that the same examples are drawn."""

KEY = "task=lm_eval"
"""Beginning of errors about what a task requires."""

INVALID_TEXT = "[invalid]"
"""Output of lm-eval's filters for a text in which they find no match."""


def load_lm_eval_tasks(name: str, include_path: str | None) -> dict[str, Any]:
    """Load the tasks of a task's, group's or tag's name.

    Raises:
        UserError: The folder or name is unknown, or lm-eval cannot load it.
    """
    from lm_eval.tasks import TaskManager

    folder = None if include_path is None else str(find_path(include_path))
    if folder and not Path(folder).is_dir():
        raise UserError(f"task.include_path={include_path}: no such folder")
    # lm-eval takes seconds to read the index of its 14,000 tasks.
    manager = TaskManager(include_path=folder, include_defaults=False) if folder else None
    if manager is None or name not in manager.all_tasks:
        manager = TaskManager(include_path=folder)
    if name not in manager.all_tasks:
        matches = ", ".join(get_close_matches(name, manager.all_tasks, 3)) or "none is similar"
        raise UserError(f"""task.tasks: lm-eval has no task {name} ({matches}); see
            task.include_path""")
    try:
        return dict(manager.load([name])["tasks"])
    except Exception as error:
        raise UserError(f"""task.tasks={name}: lm-eval cannot load it:
            {error or type(error)}""") from error


def split_documents(task: Any, split: str, seed: int) -> Sequence[Any]:
    """Return the documents of "dev" or "test" (see `LMEvalTask`).

    Raises:
        UserError: The task has no split.
    """
    found: dict[str, Any] = {}
    for kind in ("test", "validation", "training"):
        if getattr(task, f"has_{kind}_docs")():
            name = getattr(task.config, f"{kind}_split", None) or kind
            found.setdefault(name, getattr(task, f"{kind}_docs"))
    if not found:
        raise UserError(f"""task.tasks={task.task_name}: it has no test, validation or training
            split; set test_split in its yaml.""")
    first, *others = found.values()
    docs = others[0]() if others and split == "dev" else first()
    if not (hasattr(docs, "__getitem__") and hasattr(docs, "__len__")):
        docs = list(docs)
    if others:
        return docs
    order = list(range(len(docs)))
    Random(seed).shuffle(order)
    half = (len(order) + 1) // 2
    return [docs[index] for index in sorted(order[:half] if split == "dev" else order[half:])]


class FewShotSampler:
    """A sampler of few-shot examples that never draws the document being evaluated, `doc`."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.doc: Any = None

    def sample(self, n: int, eval_doc: Any = None, **more: Any) -> Any:
        """Sample as lm-eval's samplers; return all examples if there are at most `n`."""
        known = self.doc if len(self.sampler.df) > n else None
        return self.sampler.sample(n, eval_doc=known, **more)


def build_items(task: Any, docs: Sequence[Any], count: int, apart: bool) -> list[Item]:
    """Return the first documents as items with prompts, in order, as lm-eval draws its examples.

    Args:
        apart: Exclude each document from its own examples.
    """
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    sampler = getattr(task, "sampler", None)
    others = FewShotSampler(sampler)
    if apart and sampler is not None:
        task.sampler = others
    items: list[Item] = []
    for index in range(count):
        others.doc = doc = docs[index]
        context = task.fewshot_context(
            doc,
            num_fewshot=task.config.num_fewshot,
            system_instruction=None,
            apply_chat_template=False,
            fewshot_as_multiturn=False,
            chat_template=None,
            gen_prefix=task.doc_to_prefix(doc),
        )
        target = task.doc_to_target(doc)  # as text, for people
        if isinstance(target, int) and getattr(task.config, "doc_to_choice", None) is not None:
            target = dict(enumerate(task.doc_to_choice(doc))).get(target, target)
        items.append(
            {
                "id": f"{task.task_name}:{index}",
                "task": task.task_name,
                "doc": doc,
                "context": context,
                "prompt": (context if isinstance(context, str) else "\n".join(context)).rstrip(),
                "answer": str(target),
            }
        )
    if sampler is not None:
        task.sampler = sampler
    return items


def build_instances(task: Any, item: Item) -> list[Any]:
    """Return lm-eval's instances of an item."""
    metadata = (item["task"], item["id"], task.config.repeats)
    made = task.construct_requests(doc=item["doc"], ctx=item["context"], metadata=metadata)
    return list(made) if isinstance(made, list) else [made]


GOLD_KINDS = ("multiple_choice", "loglikelihood", "generate_until")

CHOICE_LENGTHS = {"acc_norm": len, "acc_bytes": lambda choice: len(choice.encode("utf-8"))}
"""Length by which a metric divides a choice's log probability."""


def find_gold(task: Any, doc: Any) -> int | str | None:
    """Return the first target, the index of a choice or a text; `None` if it is none of these."""
    # If the choices are contexts, their index is the document's text.
    target = (task.doc_to_text if getattr(task, "multiple_input", 0) else task.doc_to_target)(doc)
    target = target[0] if isinstance(target, list) and target else target
    if task.OUTPUT_TYPE != "multiple_choice" and task.config.doc_to_choice is None:
        return str(target) if str(target).strip() else None
    choices = task.doc_to_choice(doc)
    if isinstance(target, str) and target in choices:
        return int(choices.index(target))
    return target if isinstance(target, int) and 0 <= target < len(choices) else None


def build_gold_example(task: Any, item: Item, metric: str) -> Example:
    """Return an item's prompt with its gold answer (see `LMEvalTask.gold_examples`)."""
    gold = find_gold(task, item["doc"])
    if task.OUTPUT_TYPE == "generate_until":
        text = task.doc_to_choice(item["doc"])[gold] if isinstance(gold, int) else gold or ""
        starts = item["context"][-1:].isspace() or text[:1].isspace()
        delimiter = "" if starts else task.config.target_delimiter
        return Example(item["context"], (f"{delimiter}{text}",), final=True)
    instances = build_instances(task, item)
    gold = gold if isinstance(gold, int) else 0
    if task.OUTPUT_TYPE == "multiple_choice":
        # What follows the choices are the same choices without a context (acc_mutual_info).
        instances = instances[: len(task.doc_to_choice(item["doc"]))]
    if getattr(task, "multiple_input", 0):
        instances, gold = [instances[gold]], 0
    ((_, (request,), _), *_) = plan_requests(instances)
    units: tuple[float, ...] = ()
    if len(request.choices) > 1 and (measure := CHOICE_LENGTHS.get(metric)):
        units = tuple(max(1.0, float(measure(one))) for one in task.doc_to_choice(item["doc"]))
    return Example(request.prompt, request.choices, gold, units=units)


def is_whole_text(task: Any) -> bool:
    """Return whether complete texts are scored, by bits per byte: the lower, the better."""
    return bool(task.OUTPUT_TYPE == "loglikelihood_rolling")


def mean_metrics(task: Any) -> list[str]:
    """Return the metrics that are means over documents and better the higher they are.

    For complete texts, the bits per byte.
    """
    from lm_eval.api.registry import get_aggregation

    average, higher = get_aggregation("mean"), task.higher_is_better()
    if is_whole_text(task):
        return [metric for metric in task.aggregation() if metric == "bits_per_byte"]
    return [
        metric
        for metric, combine in task.aggregation().items()
        if combine is average and higher.get(metric, True)
    ]


def compute_metrics(task: Any, item: Item, responses: Sequence[Any]) -> dict[str, float]:
    """Return a document's numeric metrics; empty if a metric fails."""
    firsts = [one[0] if isinstance(one, tuple) else one for one in responses]
    if any(isinstance(one, float) and math.isnan(one) for one in firsts):
        return {}
    try:
        found = task.process_results(item["doc"], responses)
    except Exception as error:
        log.warning("%s: no metric of %s: %s", item["task"], item["id"], error)
        return {}
    if is_whole_text(task):
        logprob, size = found["bits_per_byte"]
        return {"bits_per_byte": -logprob / (size * math.log(2))}
    numbers = {name: float(v) for name, v in found.items() if hasattr(v, "__float__")}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


ROLLING_WINDOW, ROLLING_CONTEXT = 1000, 500
"""Characters of a long text scored together, and characters shown before them."""

DEFAULT_NEW_TOKENS = 256
"""Maximum number of new tokens if a task sets none, as in lm-eval's own models."""

LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


Exchange = tuple[list[Any], list[Request], Callable[[list[Completion]], list[Any]]]
"""Instances, the requests that answer them, and what makes their responses of the completions."""


def plan_requests(instances: Sequence[Any]) -> list[Exchange]:
    """Return the requests of a document's instances; choices after the same context share one.

    Responses are those of lm-eval's models.

    Raises:
        UserError: The kind cannot be answered by greedy decoding of text.
    """
    grouped = groupby(
        instances, key=lambda one: one.args[0] if one.request_type == "loglikelihood" else id(one)
    )
    return [_plan_group(list(group)) for _, group in grouped]


def _plan_group(group: list[Any]) -> Exchange:
    kind, context = group[0].request_type, group[0].args[0]
    if kind == "loglikelihood":
        # A word and the space before it are one token: the space belongs to the word.
        shown = context.rstrip()
        choices = tuple(context[len(shown) :] + one.args[1] for one in group)
        return group, [Request(shown, 0, choices)], _read_logprobs
    if kind == "loglikelihood_rolling":
        requests = [
            Request(preceding_context(context, at, ROLLING_CONTEXT), 0, (part,))
            for at, part in split_windows(context, ROLLING_WINDOW)
        ]
        return group, requests, lambda answers: [sum(choice_logprob(a, KEY) for a in answers)]
    if kind != "generate_until":
        raise UserError(f"{KEY}: it requires {kind}, which is not supported.")
    settings = group[0].args[1]
    if settings.get("do_sample") and settings.get("temperature") != 0:
        raise UserError(f"""{KEY}: {group[0].task_name} samples (do_sample), but a search needs
            greedy answers; set do_sample: false in your own yaml.""")
    limits = (settings[key] for key in LENGTH_KEYS if settings.get(key))
    until = settings.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    limit = int(next(limits, DEFAULT_NEW_TOKENS))
    request = Request(context, limit, stop_check=partial(contains_stop, stops))
    return group, [request], lambda answers: [cut_at_stops(answers[0].text, stops)]


def _read_logprobs(answers: list[Completion]) -> list[Any]:
    (answer,) = answers
    if not answer.logprobs:
        raise UserError(f"""{KEY}: this task needs a model that returns log probabilities; this one
            does not.""")
    greedy = answer.greedy or (False,) * len(answer.logprobs)
    return list(zip(answer.logprobs, greedy, strict=True))


def contains_stop(stops: Sequence[str], text: str) -> bool:
    """Return whether the text contains a stop string."""
    return any(stop in text for stop in stops if stop)


def cut_at_stops(text: str, stops: Sequence[str]) -> str:
    """Return the text up to the first stop string."""
    for stop in filter(None, stops):
        text = text.split(stop)[0]
    return text


def lm_eval(
    name: str = "lm_eval",
    tasks: Sequence[str] = ("arc_easy",),
    combine: Combination = "mean",
    **settings: Any,
) -> Task:
    """Return tasks of the lm-evaluation-harness by name: one as itself, several as a `Mixture`.

    Args:
        name: The task's name here.
        tasks: Names of lm-eval's tasks, groups or tags.
        combine: How several tasks' utilities become one (see `Mixture`).
        **settings: Those of `LMEvalTask`, the same for all tasks.
    """
    if isinstance(tasks, str) or not tasks:
        raise UserError("task.tasks: must be a list of lm-eval task names, such as [arc_easy]")
    if len(tasks) == 1:
        return LMEvalTask(name, tasks[0], **settings)
    return Mixture(name, {task: LMEvalTask(task, task, **settings) for task in tasks}, combine)


@checked("task")
@dataclass(eq=False)
class LMEvalTask(SplitTask):
    """One task, group or tag of the lm-evaluation-harness; the utility is a metric's mean.

    Test is the split that lm-eval evaluates (test, else validation). Dev is the task's next split
    among validation and training; without one, the only split is divided into two halves by the
    seed. In a group, the documents of all tasks have equal weight.

    Few-shot examples are drawn as lm-eval draws them, so that the test utility is its number for
    the same model; no dev document is among its own examples. Three things differ: prompts are not
    cut to the model's length, complete texts (loglikelihood_rolling) are cut into windows of
    characters, and decoding is always greedy.

    The yamls of `include_path` may name Python functions, which are then run.

    Args:
        name: The task's name here.
        task: Its name in lm-eval.
        include_path: A folder with yamls of custom tasks, or `None`.
        num_fewshot: Examples per prompt; `None` is the task's default. A task with 0 stays at 0, as
            in lm-eval.
        metric: The metric, for example "acc_norm"; if a task has several filters, the first one
            unless it is named: "exact_match,flexible-extract". `None` is the task's first metric
            that is a mean over documents, and minus the bits per byte for complete texts.
        dev_limit, test_limit: Maximum number of documents, from the first on; in a group, in
            proportion.
        seed: Seed of the division of an only split.
        max_prompt_tokens: Documents with a longer prompt are left out.
    """

    name: Text
    task: Text
    include_path: Text | None = None
    num_fewshot: Count | None = None
    metric: Text | None = None
    dev_limit: Positive | None = None
    test_limit: Positive | None = None
    seed: Count = 0
    max_prompt_tokens: Positive | None = None

    votes = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tasks: dict[str, Any] = {}
        self._gold_checked: tuple[Sequence[Item], str | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # lm-eval's tasks hold functions of yamls and open files, which cannot be pickled; each
        # process loads them again.
        return {**self.__dict__, "_tasks": {}}

    def check(self) -> None:
        if find_spec("lm_eval") is None:
            raise UserError(
                f"task={self.name} needs the lm-evaluation-harness, which is not installed: "
                + install_command("lm-eval")
            )

    def source_digests(self) -> dict[str, str]:
        """See `Setup.source_digests`: the yamls and the Python files of `include_path`."""
        if self.include_path is None:
            return {}
        folder = find_path(self.include_path)
        files = sorted(one for one in folder.rglob("*") if one.suffix in (".py", ".yaml", ".yml"))
        digests = [(one.relative_to(folder).as_posix(), hash_file_cached(one)) for one in files]
        return {"include_path files": short_digest(digests)}

    def open(self, device: str) -> None:
        """Load the tasks, whose data are already on disk, without progress bars."""
        from datasets import disable_progress_bars

        disable_progress_bars()
        self.load_tasks()

    def run(self, items: Sequence[Item]) -> TaskRun:
        """Send all requests of the documents in one round."""
        made = [build_instances(self.load_tasks()[item["task"]], item) for item in items]
        plans = [plan for instances in made for plan in plan_requests(instances)]
        rest = iter((yield [request for _, requests, _ in plans for request in requests]))
        for instances, requests, read in plans:
            responses = read([next(rest) for _ in requests])
            for instance, response in zip(instances, responses, strict=True):
                # Greedy decoding returns the same text for every repeat.
                instance.resps = [response] * (instance.repeats or 1)
        return [self.score_responses(item, mine) for item, mine in zip(items, made, strict=True)]

    @property
    def gold_error(self) -> str | None:
        """Why a document has no gold answer; `None` if all dev documents have one."""
        items = self.items("dev")
        if self._gold_checked is None or self._gold_checked[0] is not items:
            self._gold_checked = items, self._find_gold_error(items)
        wrong = self._gold_checked[1]
        return f"task {self.name} has no gold answers: {wrong}" if wrong else None

    def gold_examples(self, items: Sequence[Item]) -> list[Example]:
        """See `Task.gold_examples`: the target, as it follows the prompt.

        For "multiple_choice" the right choice's share among all choices, of log probabilities per
        character or byte if the metric divides by these (of several contexts, what follows the
        right one); for "loglikelihood" the continuation; for "generate_until" the first target and
        the end-of-text token.
        """
        tasks = self.load_tasks()
        return [
            build_gold_example(tasks[i["task"]], i, self._select_metric(tasks[i["task"]])[0])
            for i in items
        ]

    def _find_gold_error(self, items: Sequence[Item]) -> str | None:
        for name, task in self.load_tasks().items():
            if task.OUTPUT_TYPE not in GOLD_KINDS:
                return f"{name} is of the output type {task.OUTPUT_TYPE}"
        for item in items:
            if find_gold(self.load_tasks()[item["task"]], item["doc"]) is None:
                return f"the target of document {item['id']} is blank, or none of its choices"
        return None

    def grade(self, item: Item, answer: str | None) -> float:
        """Return the value, which a score's answer contains as text."""
        if answer is not None:
            return float(answer)
        whole = is_whole_text(self.load_tasks()[item["task"]])
        return -UNIFORM_BITS_PER_BYTE if whole else 0.0

    def score_responses(self, item: Item, instances: Sequence[Any]) -> Score:
        """Score a document's responses."""
        task = self.load_tasks()[item["task"]]
        metric, filtering = self._select_metric(task)
        next(f for f in task._filters if f.name == filtering).apply(instances)
        responses = [instance.filtered_resps[filtering] for instance in instances]
        text = instances[0].resps[0] if task.OUTPUT_TYPE == "generate_until" else ""
        measures = compute_metrics(task, item, responses)
        if metric not in measures:
            return Score(self.grade(item, None), None, text, measures=measures)
        value = -measures[metric] if is_whole_text(task) else measures[metric]
        texts = [one.strip() for one in responses if isinstance(one, str)]
        readable = not texts or any(one not in ("", INVALID_TEXT) for one in texts)
        return Score(value, repr(value) if readable else None, text, measures=measures)

    def load_tasks(self) -> Mapping[str, Any]:
        """Return lm-eval's tasks by name, loaded once per process.

        Raises:
            UserError: The package is missing, the task is unknown, or lm-eval cannot load it.
        """
        if self._tasks:
            return self._tasks
        self.check()
        self._tasks = load_lm_eval_tasks(self.task, self.include_path)
        for task in self._tasks.values():
            configured = task.get_config("num_fewshot")
            wanted = configured if self.num_fewshot is None or configured == 0 else self.num_fewshot
            task.set_config(key="num_fewshot", value=wanted or 0)
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                raise UserError(f"""task.tasks={self.task}: tasks that run the model's code or show
                    images are not supported""")
            self._select_metric(task)  # says now what is wrong
            if is_whole_text(task):
                self.lowest = -math.inf
        return self._tasks

    def _select_metric(self, task: Any) -> tuple[str, str]:
        """Return the metric and the filter that count."""
        metric, _, filtering = (self.metric or "").partition(",")
        filters = [one.name for one in task._filters]
        means = mean_metrics(task)
        if not means or (metric and metric not in means):
            raise UserError(f"""task.metric={self.metric}: must be a mean over documents, the
                higher the better; allowed for {task.task_name}: {", ".join(means) or "none"}
                (of {", ".join(task.aggregation())})""")
        if filtering and filtering not in filters:
            raise UserError(f"""task.metric={self.metric}: unknown filter; allowed:
                {", ".join(filters)}""")
        return metric or means[0], filtering or filters[0]

    def load_items(self, split: str) -> tuple[Item, ...]:
        """Return a split's items; a group's are ordered so that a limit is proportional."""
        docs = {n: split_documents(t, split, self.seed) for n, t in self.load_tasks().items()}
        documents = [{"domain": name, "at": at} for name in docs for at in range(len(docs[name]))]
        limit = self.dev_limit if split == "dev" else self.test_limit
        chosen = balance_domains(documents)[:limit]
        if not chosen:
            raise UserError(f"task.tasks={self.task}: its {split} split is empty.")
        counts = Counter(str(document["domain"]) for document in chosen)
        made = {
            name: build_items(self.load_tasks()[name], docs[name], count, split == "dev")
            for name, count in counts.items()
        }
        return tuple(made[document["domain"]][document["at"]] for document in chosen)
