"""What a question asks: parameters for one model, and the samples that are wanted of its answer."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from swarm.errors import UserError
from swarm.models.base import Completion

T = TypeVar("T")


class ModelCall:
    """What one model is asked; all samples of it have one of these.

    Args:
        model: Its name.
        params: As a chat endpoint takes them: "messages", "temperature", "max_tokens" and so on,
            before `ModelAdapter` has made them this model's.
        together: Whether one request may ask for several samples (`n`), so that the prompt is paid
            once; of short answers, since a request with all of them takes as long as the longest.
    """

    def __init__(self, model: str, params: Mapping[str, Any], together: bool = False) -> None:
        self.model, self.params, self.together = model, params, together
        self.sent: dict[str, Any] | None = None

    @property
    def api_kwargs(self) -> dict[str, Any]:
        """What is sent, "model" and "timeout" included; a dictionary of its own, made once."""
        # No cached_property: all of a class share its lock, and a handler may ask models.
        if self.sent is None:
            from swarm.compare.model_adapter import ModelAdapter, validate_params
            from swarm.compare.settings import CompareSettings

            prepared = ModelAdapter.prepare(_copy_containers(dict(self.params)), self.model)
            self.sent = {
                "timeout": CompareSettings.timeout,
                **validate_params(prepared, self.model),
            }
        return self.sent


def _copy_containers(value: Any) -> Any:
    """A copy of its dictionaries and lists; ten times as fast as `copy.deepcopy`."""
    if isinstance(value, dict):
        return {
            key: _copy_containers(one) if isinstance(one, dict | list) else one
            for key, one in value.items()
        }
    return [_copy_containers(one) for one in value] if isinstance(value, list) else value


class SampleRequest(NamedTuple):
    """One answer: the n-th sample of what is asked."""

    asked: ModelCall
    sample: int = 0


SampleOutcome = Completion | UserError
"""What a want comes to."""

Script = Generator[Sequence[SampleRequest], list[SampleOutcome], T]
"""How a row, or a few, come to be: yields wants, is sent what each of them came to in their order,
as often as it likes, and returns its result. Failures are sent, not thrown. Thousands of scripts
are under way at once (`asking.running.run`); what several of them want is asked once."""
