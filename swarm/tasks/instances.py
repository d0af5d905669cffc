"""What lm-evaluation-harness asks, as requests, and completions as what it is told."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

from swarm.errors import UserError
from swarm.models import Completion, Request
from swarm.tasks.perplexity import preceding_context, choice_logprob, split_windows

ROLLING_WINDOW, ROLLING_CONTEXT = 1000, 500
"""Characters of a long text that are scored together, and that are shown before them."""

DEFAULT_NEW_TOKENS = 256
"""The most new tokens where a task says nothing, as lm-eval's own models have it."""

LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class InstanceRequests(NamedTuple):
    """Instances (of one kind, about one context) and the requests they are answered by."""

    kind: str
    instances: list[Any]
    requests: list[Request]


def group_requests(instances: Sequence[Any]) -> list[InstanceRequests]:
    """The requests of a document's instances; choices after the same context share one.

    Raises:
        UserError: The kind is none that a language model of text answers greedily.
    """
    grouped = groupby(
        instances, key=lambda one: one.args[0] if one.request_type == "loglikelihood" else id(one)
    )
    return [_build_requests(list(group)) for _, group in grouped]


def set_responses(asked: InstanceRequests, completions: Iterator[Completion]) -> None:
    """Give the instances their responses, as lm-eval's models do."""
    said = [next(completions) for _ in asked.requests]
    if asked.kind == "loglikelihood":
        responses: list[Any] = _loglikelihoods(asked, said[0])
    elif asked.kind == "loglikelihood_rolling":
        responses = [sum(choice_logprob(one, "task=lm_eval") for one in said)]
    else:
        responses = [cut_at_stops(said[0].text, _stop_strings(asked.instances[0]))]
    for instance, response in zip(asked.instances, responses, strict=True):
        # Greedy decoding says the same however often it is asked.
        instance.resps = [response] * (instance.repeats or 1)


def cut_at_stops(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of the stops."""
    for stop in filter(None, stops):
        text = text.split(stop)[0]
    return text


def contains_stop(stops: Sequence[str], text: str) -> bool:
    """Whether a stop has been written."""
    return any(stop in text for stop in stops if stop)


def _build_requests(group: list[Any]) -> InstanceRequests:
    kind, context = group[0].request_type, group[0].args[0]
    if kind == "loglikelihood":
        # A word and the space before it are one token: the space goes with the word.
        shown = context.rstrip()
        spaces = context[len(shown) :]
        choices = tuple(spaces + one.args[1] for one in group)
        return InstanceRequests(kind, group, [Request(shown, 0, choices)])
    if kind == "loglikelihood_rolling":
        parts = split_windows(context, ROLLING_WINDOW)
        requests = [Request(preceding_context(context, at, ROLLING_CONTEXT), 0, (part,)) for at, part in parts]
        return InstanceRequests(kind, group, requests)
    if kind != "generate_until":
        raise UserError(f"task=lm_eval: it asks for {kind}, which is not supported.")
    return InstanceRequests(kind, group, [_generation_request(context, group[0])])


def _generation_request(context: str, instance: Any) -> Request:
    settings = instance.args[1]
    if settings.get("do_sample") and settings.get("temperature") != 0:
        raise UserError(
            f"task=lm_eval: {instance.task_name} samples (do_sample), and a search needs greedy"
            " answers; set do_sample: false in a yaml of your own."
        )
    most = next((settings[key] for key in LENGTH_KEYS if settings.get(key)), DEFAULT_NEW_TOKENS)
    return Request(context, int(most), decided=partial(contains_stop, _stop_strings(instance)))


def _stop_strings(instance: Any) -> tuple[str, ...]:
    stops = instance.args[1].get("until") or ()
    return (stops,) if isinstance(stops, str) else tuple(stops)


def _loglikelihoods(asked: InstanceRequests, said: Completion) -> list[tuple[float, bool]]:
    count = len(asked.requests[0].choices)
    if len(said.logprobs) != count:
        raise UserError(
            "task=lm_eval needs a model that gives log probabilities for this task; this one does"
            " not."
        )
    return list(zip(said.logprobs, said.greedy or (False,) * count, strict=True))
