"""Low-level calls of one model: text, token probabilities, sampled answers, many at once."""

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from swarm.compare.config import Config
from swarm.compare.sampling.scheduler import as_completed, run_scripts
from swarm.compare.sampling.types import ModelCall, SampleRequest, Script
from swarm.compare.settings import get_max_workers
from swarm.compare.validation import validate_conversation, validate_int
from swarm.errors import InvalidArgument, UserError

T = TypeVar("T")

RunnerResult = tuple[Any, dict[str, Any]]
"""A result, and the parameters that were sent."""


class Runner:
    """Queries one model; cached answers are not requested again.

    Args:
        model: Name of the model.
    """

    def __init__(self, model: str) -> None:
        self.model = model

    @property
    def client(self) -> Any:
        """See `Config.client_for_model`."""
        return Config.client_for_model(self.model)

    def get_text(self, params: Mapping[str, Any]) -> RunnerResult:
        """Return one answer's text.

        Args:
            params: Parameters in the chat format; "messages" is required.

        Returns:
            The text and the parameters that were sent.

        Raises:
            UserError: The request failed.
        """
        return self._run_one(self._get_text(params))

    def single_token_probs(
        self, params: Mapping[str, Any], *, num_samples: int = 1, convert_to_probs: bool = True
    ) -> RunnerResult:
        """Return the most probable next tokens.

        Args:
            params: See `get_text`; "top_logprobs" defaults to 20.
            num_samples: Number of answers whose probabilities are averaged.
            convert_to_probs: Return probabilities instead of natural logarithms.

        Returns:
            Probability by token, the most probable first, and the parameters that were sent.

        Raises:
            UserError: The request failed, or the endpoint reports no probabilities.
        """
        return self._run_one(
            self._single_token_probs(
                params, num_samples=num_samples, convert_to_probs=convert_to_probs
            )
        )

    def sample_probs(self, params: Mapping[str, Any], *, num_samples: int) -> RunnerResult:
        """Return the frequency of each answer.

        Args:
            params: See `get_text`.
            num_samples: Number of requests.

        Returns:
            Share by answer, the most frequent first, and the parameters that were sent.

        Raises:
            UserError: A sample failed.
        """
        return self._run_one(self._sample_probs(params, num_samples=num_samples))

    def get_many(
        self,
        func: Callable[..., RunnerResult],
        kwargs_list: Sequence[Mapping[str, Any]],
        *,
        max_workers: int | None = None,
        silent: bool = False,
        title: str | None = None,
        executor: Executor | None = None,
        in_order: bool = False,
    ) -> Iterator[tuple[Mapping[str, Any], RunnerResult]]:
        """Call a function with each set of arguments, concurrently.

        Args:
            func: A method of this or another runner; or any function.
            kwargs_list: Arguments of each call; keys that begin with _ are not passed, but returned
                with the others.
            max_workers: Maximum number of concurrent calls; `None`: `Config.max_workers`.
            silent: Disable the progress bar.
            title: Title of the progress bar.
            executor: Executor for functions other than a runner's methods.
            in_order: Yield in the order of `kwargs_list` instead of completion.

        Yields:
            Arguments and (result, parameters that were sent); for a failed call (None, {}), and the
                reason is printed to stderr.
        """
        arguments = [{k: v for k, v in one.items() if not k.startswith("_")} for one in kwargs_list]
        workers = (
            get_max_workers() if max_workers is None else validate_int("max_workers", max_workers)
        )
        owner = getattr(func, "__self__", None)
        if getattr(func, "__func__", None) in SCRIPTED_METHODS:
            make = getattr(owner, f"_{func.__name__}")
            scripts = [_catch_user_errors(make(**one)) for one in arguments]
            results: Iterator[tuple[int, Any]] = as_completed(
                scripts, title or self.model, workers, silent
            )
        else:
            results = _run_in_threads(func, arguments, workers, executor)
        yield from _report_failures(kwargs_list, in_number_order(results) if in_order else results)

    def _run_one(self, script: Script[RunnerResult | UserError]) -> RunnerResult:
        [result] = run_scripts([script], self.model)
        if isinstance(result, UserError):
            raise result
        return result

    def _get_text(self, params: Mapping[str, Any]) -> Script[RunnerResult | UserError]:
        call = ModelCall(self.model, validate_params(params))
        [outcome] = yield [SampleRequest(call)]
        return outcome if isinstance(outcome, UserError) else (outcome.text, call.api_kwargs)

    def _single_token_probs(
        self, params: Mapping[str, Any], num_samples: int = 1, convert_to_probs: bool = True
    ) -> Script[RunnerResult | UserError]:
        from swarm.compare.token_probs import MOST_TOP_LOGPROBS, read_next_token, with_logprobs

        top = params.get("top_logprobs", MOST_TOP_LOGPROBS)
        call = ModelCall(self.model, with_logprobs(validate_params(params), top))
        found = yield from read_next_token(call, range(num_samples), convert_to_probs)
        return found.error or (found.answer, call.api_kwargs)

    def _sample_probs(
        self, params: Mapping[str, Any], num_samples: int
    ) -> Script[RunnerResult | UserError]:
        from swarm.compare.token_probs import sample_answers

        found = yield from sample_answers(validate_params(params), self.model, num_samples)
        return found.error or (found.answer, found.api_kwargs)


SCRIPTED_METHODS = (Runner.get_text, Runner.single_token_probs, Runner.sample_probs)
"""Methods whose calls share one pool; an override in a subclass is treated as any function."""


def _catch_user_errors(script: Script[T]) -> Script[T | UserError]:
    """Return the error as the result, so that a failed call does not end the others."""
    try:
        return (yield from script)
    except UserError as error:
        return error


def validate_params(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters if they contain a conversation.

    Raises:
        InvalidArgument: They do not.
    """
    if not isinstance(params, Mapping) or not params.get("messages"):
        raise InvalidArgument(
            'params: must be a dict with "messages": [{"role": ..., "content": ...}]'
        )
    validate_conversation(params["messages"])
    return params


def in_number_order(done: Iterator[tuple[int, Any]]) -> Generator[tuple[int, Any], None, None]:
    """Yield numbered results in order, each as early as possible."""
    early: dict[int, Any] = {}
    following = 0
    for number, one in done:
        early[number] = one
        while following in early:
            yield following, early.pop(following)
            following += 1


def _report_failures(
    kwargs_list: Sequence[Mapping[str, Any]], results: Iterator[tuple[int, Any]]
) -> Any:
    for number, one in results:
        if isinstance(one, Exception):
            print(f"call {number} failed: {one}", file=sys.stderr)
            one = (None, {})
        yield kwargs_list[number], one


def _run_in_threads(
    func: Callable[..., Any], arguments: Sequence[Any], workers: int, executor: Executor | None
) -> Generator[tuple[int, Any], None, None]:
    """Yield the index and the result or exception of each call as it completes."""
    from concurrent.futures import ThreadPoolExecutor, as_completed

    pool = executor or ThreadPoolExecutor(workers)
    futures = {pool.submit(func, **one): number for number, one in enumerate(arguments)}
    try:
        for future in as_completed(futures):
            error = future.exception()
            yield futures[future], error if error else future.result()
    finally:
        for future in futures:
            future.cancel()
        if executor is None:
            pool.shutdown(wait=False)
