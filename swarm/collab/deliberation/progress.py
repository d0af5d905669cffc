"""What goes on in a consortium, a line an event."""

from typing import TYPE_CHECKING, Any

from swarm.collab import AgentAnswer
from swarm.collab.deliberation.verdicts import Iteration

if TYPE_CHECKING:
    from swarm.collab.consortium import Consortium


def format_event(consortium: "Consortium", event: Any) -> str:
    """The event in words; empty where it is none to tell."""
    if isinstance(event, AgentAnswer):
        sample = f" #{event.sample + 1}" if event.sample else ""
        who = f"iteration {event.layer}, {event.role} {event.name}{sample}"
        if event.error or event.completion is None:
            return f"{who}: {event.error}"
        return f"{who}: {event.completion.seconds:.1f} s, {_format_token_count(event.completion.new_tokens)}"
    if isinstance(event, Iteration):
        sure = event.verdict.confidence
        words = "unknown" if sure is None else f"{sure:.3g}"
        return (
            f"iteration {event.number} of at most {consortium.max_iterations}: confidence {words}"
        )
    return ""


def _format_token_count(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
