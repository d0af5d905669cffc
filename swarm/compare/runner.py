"""Low-level calls of one model: text, token probabilities, sampled answers, many at once."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial, wraps
from typing import Any

from swarm._util.threads import run_concurrently
from swarm.compare.config import Config
from swarm.compare.sampling import (
    ModelCall,
    SampleRequest,
    Script,
    as_completed,
    run_scripts,
    validate_params,
)
from swarm.compare.token_probs import (
    MAX_TOP_LOGPROBS,
    count_answers,
    read_next_token,
    with_logprobs,
)
from swarm.errors import UserError

RunnerResult = tuple[Any, dict[str, Any]]
"""A result, and the parameters that were sent."""


SCRIPTS: dict[Any, Callable[..., Script[RunnerResult]]] = {}
"""By method of `Runner`, the script that it runs; those of many calls share one pool."""


def _run_script(make: Callable[..., Script[RunnerResult]]) -> Callable[..., RunnerResult]:
    """Decorate a script, so that it is a method that runs it."""

    @wraps(make)
    def call(self: "Runner", *args: Any, **given: Any) -> RunnerResult:
        [result] = run_scripts([_catch_user_errors(make(self, *args, **given))], self.model)
        if isinstance(result, UserError):
            raise result
        return result

    SCRIPTS[call] = make
    return call


def _catch_user_errors(script: Script[RunnerResult]) -> Script[RunnerResult | UserError]:
    """Return the error as the result, so that a failed call does not end the others."""
    try:
        return (yield from script)
    except UserError as error:
        return error


class Runner:
    """Queries one model; cached answers are not requested again.

    Args:
        model: Name of the model.
    """

    def __init__(self, model: str) -> None:
        self.model = model

    @property
    def client(self) -> Any:
        return Config.client_for_model(self.model)

    @_run_script
    def get_text(self, params: Mapping[str, Any]) -> Script[RunnerResult]:
        """Return one answer's text.

        Args:
            params: Parameters in the chat format; "messages" is required.

        Returns:
            The text and the parameters that were sent.

        Raises:
            UserError: The request failed.
        """
        call = ModelCall(self.model, validate_params(params, self.model))
        [outcome] = yield [SampleRequest(call)]
        if isinstance(outcome, UserError):
            raise outcome
        return outcome.text, call.api_kwargs

    @_run_script
    def single_token_probs(
        self, params: Mapping[str, Any], *, num_samples: int = 1, convert_to_probs: bool = True
    ) -> Script[RunnerResult]:
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
        top = params.get("top_logprobs", MAX_TOP_LOGPROBS)
        call = ModelCall(self.model, with_logprobs(validate_params(params, self.model), top))
        found = yield from read_next_token(call, range(num_samples))
        if found.error:
            raise found.error
        return (found if convert_to_probs else found.to_logprobs()).answer, call.api_kwargs

    @_run_script
    def sample_probs(self, params: Mapping[str, Any], *, num_samples: int) -> Script[RunnerResult]:
        """Return the frequency of each answer.

        Args:
            params: See `get_text`.
            num_samples: Number of requests.

        Returns:
            Share by answer, the most frequent first, and the parameters that were sent.

        Raises:
            UserError: A sample failed.
        """
        call = ModelCall(self.model, validate_params(params, self.model))
        found = yield from count_answers(call, range(num_samples))
        if found.error:
            raise found.error
        return found.answer, call.api_kwargs

    def get_many(
        self,
        func: Callable[..., RunnerResult],
        kwargs_list: Sequence[Mapping[str, Any]],
        *,
        max_workers: int | None = None,
        silent: bool = False,
        title: str | None = None,
        executor: Executor | None = None,
    ) -> Iterator[tuple[Mapping[str, Any], RunnerResult]]:
        """Call a function with each set of arguments, concurrently.

        Args:
            func: A method of this or another runner; or any function.
            kwargs_list: Arguments of each call; keys that begin with _ are not passed, but returned
                with the others.
            max_workers: Maximum number of concurrent calls; `None`: `Config.max_workers`.
            silent: Disable the progress bar.
            title: Title of the progress bar.
            executor: Executor for functions other than a runner's methods; results are then in
                the order of `kwargs_list`.

        Yields:
            Arguments and (result, parameters that were sent); for a failed call (None, {}), and the
                reason is printed to stderr.
        """
        arguments = [{k: v for k, v in one.items() if not k.startswith("_")} for one in kwargs_list]
        workers = max_workers or Config.max_workers
        results: Iterator[tuple[int, Any]]
        # An override in a subclass is called as any function.
        if make := SCRIPTS.get(getattr(func, "__func__", None)):
            runner = func.__self__  # type: ignore[attr-defined]
            scripts = [_catch_user_errors(make(runner, **one)) for one in arguments]
            results = as_completed(scripts, title or self.model, workers, silent)
        else:
            calls = [partial(_catch_exceptions, func, one) for one in arguments]
            if executor:
                results = enumerate(executor.map(_catch_exceptions, [func] * len(calls), arguments))
            else:
                results = run_concurrently(calls, workers)
        for number, one in results:
            if isinstance(one, Exception):
                print(f"call {number} failed: {one}", file=sys.stderr)
                one = (None, {})
            yield kwargs_list[number], one


def _catch_exceptions(func: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return func(**arguments)
    except Exception as error:
        return error
