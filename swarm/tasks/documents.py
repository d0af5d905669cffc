"""Tasks of the lm-evaluation-harness as it loads them: their documents, prompts and metrics."""

import logging
import math
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from swarm.errors import UserError
from swarm.places import find_path
from swarm.tasks import Item

log = logging.getLogger(__name__)

INSTALL_COMMAND = 'pip install "lm_eval>=0.4.13"'

FEWSHOT_SEED = 1234
"""lm-eval's own, so that the same examples are drawn."""

INVALID_TEXT = "[invalid]"
"""What lm-eval's filters give for a text in which they find nothing."""


def require_lm_eval(key: str) -> None:
    """See to it that the package is there.

    Raises:
        UserError: It is not.
    """
    if find_spec("lm_eval") is None:
        raise UserError(f"{key} needs the lm-evaluation-harness, which is not installed: {INSTALL_COMMAND}")


def load_lm_eval_tasks(name: str, include_path: str | None) -> dict[str, Any]:
    """The tasks of a task's, group's or tag's name.

    Raises:
        UserError: There is no such folder or name, or lm-eval cannot load it.
    """
    from lm_eval.tasks import TaskManager

    folder = None if include_path is None else _check_folder(include_path)
    # Reading the index of its own 14,000 tasks takes lm-eval seconds.
    manager = TaskManager(include_path=folder, include_defaults=False) if folder else None
    if manager is None or name not in manager.all_tasks:
        manager = TaskManager(include_path=folder)
    if name not in manager.all_tasks:
        near = ", ".join(get_close_matches(name, manager.all_tasks, 3)) or "none is similar"
        raise UserError(f"task.tasks: lm-eval has no task {name} ({near}); see task.include_path.")
    try:
        return dict(manager.load([name])["tasks"])
    except Exception as error:
        raise UserError(
            f"task.tasks={name}: lm-eval cannot load it: {error or type(error)}"
        ) from error


def _check_folder(include_path: str) -> str:
    folder: Path = find_path(include_path)
    if not folder.is_dir():
        raise UserError(f"task.include_path={include_path}: there is no such folder.")
    return str(folder)


def split_documents(task: Any, split: str, seed: int) -> Sequence[Any]:
    """The documents of "dev" or "test" (see `Harness`).

    Raises:
        UserError: The task has no split.
    """
    found: dict[str, Any] = {}
    for kind in ("test", "validation", "training"):
        if getattr(task, f"has_{kind}_docs")():
            name = getattr(task.config, f"{kind}_split", None) or kind
            found.setdefault(name, getattr(task, f"{kind}_docs"))
    if not found:
        raise UserError(
            f"task.tasks={task.task_name}: it has no split for test, validation or training;"
            " name one in its yaml, as test_split."
        )
    first, *others = found.values()
    if others:
        return _as_sequence(first() if split == "test" else others[0]())
    docs = _as_sequence(first())
    order = list(range(len(docs)))
    Random(seed).shuffle(order)
    half = (len(order) + 1) // 2
    mine = order[:half] if split == "dev" else order[half:]
    return [docs[place] for place in sorted(mine)]


def _as_sequence(docs: Any) -> Sequence[Any]:
    return docs if hasattr(docs, "__getitem__") and hasattr(docs, "__len__") else list(docs)


class FewShotSampler:
    """A sampler of few-shot examples that never draws the document that is asked about."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.doc: Any = None

    def sample(self, n: int, eval_doc: Any = None, **more: Any) -> Any:
        """As lm-eval's samplers; where there are no more than `n` to draw from, all of them."""
        known = self.doc if len(self.sampler.df) > n else None
        return self.sampler.sample(n, eval_doc=known, **more)


def build_items(task: Any, docs: Sequence[Any], count: int, apart: bool) -> list[Item]:
    """The first documents as items, with their prompts; made in order, as lm-eval draws examples.

    Args:
        apart: Keep each document from being an example of its own.
    """
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    sampler = getattr(task, "sampler", None)
    others = FewShotSampler(sampler)
    if apart and sampler is not None:
        task.sampler = others
    items: list[Item] = []
    for place in range(count):
        others.doc = doc = docs[place]
        context = task.fewshot_context(
            doc,
            num_fewshot=task.config.num_fewshot,
            system_instruction=None,
            apply_chat_template=False,
            fewshot_as_multiturn=False,
            chat_template=None,
            gen_prefix=task.doc_to_prefix(doc),
        )
        name = task.task_name
        shown = (context if isinstance(context, str) else "\n".join(context)).rstrip()
        items.append({"id": f"{name}:{place}", "task": name, "doc": doc, "context": context,
                      "prompt": shown, "answer": format_target(task, doc)})  # fmt: skip
    if sampler is not None:
        task.sampler = sampler
    return items


def format_target(task: Any, doc: Any) -> str:
    """A document's target in words, for people."""
    target = task.doc_to_target(doc)
    if isinstance(target, int) and getattr(task.config, "doc_to_choice", None) is not None:
        choices = task.doc_to_choice(doc)
        return str(choices[target]) if 0 <= target < len(choices) else str(target)
    return str(target)


def build_instances(task: Any, item: Item) -> list[Any]:
    """What lm-eval asks about an item."""
    metadata = (item["task"], item["id"], task.config.repeats)
    made = task.construct_requests(doc=item["doc"], ctx=item["context"], metadata=metadata)
    return list(made) if isinstance(made, list) else [made]


def mean_metrics(task: Any) -> list[str]:
    """The metrics that are means over documents; of texts scored as wholes, the bits a byte."""
    from lm_eval.api.registry import get_aggregation

    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        return [metric for metric in task.aggregation() if metric == "bits_per_byte"]
    average = get_aggregation("mean")
    return [metric for metric, combine in task.aggregation().items() if combine is average]


def compute_metrics(task: Any, item: Item, responses: Sequence[Any]) -> dict[str, float]:
    """A document's metrics that are numbers; none of them where a metric fails."""
    if any(math.isnan(number) for number in _float_responses(responses)):
        return {}
    try:
        found = task.process_results(item["doc"], responses)
    except Exception as error:
        log.warning("%s: no metric of %s: %s", item["task"], item["id"], error)
        return {}
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        logprob, size = found["bits_per_byte"]
        return {"bits_per_byte": -logprob / (size * math.log(2))}
    numbers = {name: float(v) for name, v in found.items() if hasattr(v, "__float__")}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def is_readable(responses: Sequence[Any]) -> bool:
    """Whether there is anything in the texts."""
    texts = [one for one in responses if isinstance(one, str)]
    return not texts or any(text.strip() not in ("", INVALID_TEXT) for text in texts)


def _float_responses(responses: Sequence[Any]) -> list[float]:
    firsts = [one[0] if isinstance(one, tuple) else one for one in responses]
    return [number for number in firsts if isinstance(number, float)]
