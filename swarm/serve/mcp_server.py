"""Served models as tools of the Model Context Protocol, over standard input and output."""

from collections.abc import Mapping
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from swarm._util.settings import Positive
from swarm.errors import UserError
from swarm.models.base import Message, Model, Request, with_prompt_form
from swarm.multi_agent.consortium.consortium import Consortium
from swarm.serve.api_errors import resolve_name

Budget = Annotated[
    Positive | None, Field(description="Of a consortium: the maximum number of calls of members.")
]


def build_mcp_server(models: Mapping[str, Model], longest: int | None) -> MCPServer:
    """Return a server with the tools `list_models` and `ask`; its `run` serves until the end of
    standard input.

    Args:
        longest: See `swarm.serve.app.ChatService`.
    """
    server = MCPServer("model-swarms")

    @server.tool()
    def list_models() -> list[str]:
        """List the models that can be asked.

        local/ are models on this machine, moa/ mixtures of agents, whose last model writes one
        answer from the others', consortium/ models that answer until a judge is confident.
        """
        return list(models)

    @server.tool()
    def ask(
        model: Annotated[str, Field(description="A name of list_models.")],
        question: str,
        system: str = "",
        max_tokens: Positive | None = longest,
        budget: Budget = None,
    ) -> str:
        """Ask a model, a mixture or a consortium a question, and return its answer."""
        try:
            asked = models[resolve_name(model, models)]
            if budget is not None:
                if not isinstance(asked, Consortium):
                    raise UserError(f"budget: only a consortium has one, not {model}; omit it")
                asked = asked.with_budget(budget)
            turns = [Message("system", system)] * bool(system) + [Message("user", question)]
            request = with_prompt_form(asked, Request(tuple(turns), max_tokens))
            return asked.generate([request])[0].text
        except UserError as error:
            raise ToolError(str(error)) from None

    return server
