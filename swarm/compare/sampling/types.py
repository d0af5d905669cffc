"""Requests of questions: the parameters of a call to one model, and samples of its answer."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from swarm.errors import UserError
from swarm.models.base import Completion

T = TypeVar("T")


class ModelCall:
    """Parameters of a call to one model; shared by all of its samples.

    Args:
        model: Name of the model.
        params: Parameters in the chat format ("messages", "temperature", "max_tokens", ...), before
            `ModelAdapter` is applied.
        together: Whether one request may return several samples (`n`), so that the prompt is paid
            once. For short answers, since such a request takes as long as its longest answer.
    """

    def __init__(self, model: str, params: Mapping[str, Any], together: bool = False) -> None:
        self.model, self.params, self.together = model, params, together
        self.prepared_kwargs: dict[str, Any] | None = None

    @property
    def api_kwargs(self) -> dict[str, Any]:
        """Parameters that are sent, with "model" and "timeout"; computed once."""
        # Not a cached_property: before Python 3.12 all instances share its lock, and a handler may
        # query models.
        if self.prepared_kwargs is None:
            from swarm.compare.model_adapter import ModelAdapter, validate_params
            from swarm.compare.settings import CompareSettings

            prepared = ModelAdapter.prepare(_copy_containers(dict(self.params)), self.model)
            self.prepared_kwargs = {
                "timeout": CompareSettings.timeout,
                **validate_params(prepared, self.model),
            }
        return self.prepared_kwargs


def _copy_containers(value: Any) -> Any:
    """Copy nested dictionaries and lists; ten times as fast as `copy.deepcopy`."""
    if isinstance(value, dict):
        return {
            key: _copy_containers(one) if isinstance(one, dict | list) else one
            for key, one in value.items()
        }
    return [_copy_containers(one) for one in value] if isinstance(value, list) else value


class SampleRequest(NamedTuple):
    """One sample of a call, by number."""

    call: ModelCall
    sample: int = 0


SampleOutcome = Completion | UserError
"""Outcome of a request."""

Script = Generator[Sequence[SampleRequest], list[SampleOutcome], T]
"""Computes one or several rows: yields requests any number of times, is sent their outcomes in
order, and
returns its result. Failures are sent, not raised. Thousands of scripts run at once
(`sampling.scheduler.run_scripts`); a sample requested by several of them is requested once.
"""
