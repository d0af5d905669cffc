"""python -m swarm.serve mcp, asked by the client of the mcp package over its pipes."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import commands
import pytest
import searches
from mcp import Client, StdioServerParameters, stdio_client

FUNCTIONS = """
def shout(prompt):
    print("not the protocol's")
    return prompt[-1].content.upper()
"""
PANEL = """
models: {function/funs:shout: 3}
strategy: vote
"""


def test_a_client_lists_models_and_asks_them(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    (tmp_path / "funs.py").write_text(FUNCTIONS)
    (tmp_path / "panel.yaml").write_text(PANEL)
    names = ["local/amber", "function/funs:shout", "consortium/panel.yaml"]
    words = ["-m", "swarm.serve", "mcp", "--base", tiny_llama, "--pool", tiny_pool]
    words += ["--device", "cpu", "--max-tokens", 6]
    words += [word for name in names for word in ("--model", name)]
    told = {**searches.environment(), "LLM_USER_PATH": str(tmp_path)}
    command = StdioServerParameters(
        command=sys.executable, args=[*map(str, words)], cwd=tmp_path, env=told
    )

    async def talk() -> None:
        async with Client(stdio_client(command)) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert set(tools) == {"list_models", "ask"}
            assert tools["ask"].input_schema["required"] == ["model", "question"]
            listed = await client.call_tool("list_models", {})
            assert listed.structured_content == {"result": names}

            async def ask(model: str, **more: Any) -> tuple[bool, str]:
                found = await client.call_tool("ask", {"model": model, "question": "hi", **more})
                return found.is_error, found.content[0].text

            assert await ask("function/funs:shout") == (False, "HI")
            assert await ask("panel.yaml", budget=3) == (False, "HI")
            local = await asyncio.gather(*[ask("amber", system="be short") for _ in range(3)])
            assert not local[0][0] and local == [local[0]] * 3
            for keys, said in (
                ({"model": "elm"}, "model 'elm': is not served; available models: local/amber"),
                ({"model": "panel.yaml", "budget": 2}, "budget=2: the first iteration takes 3"),
                ({"model": "amber", "budget": 9}, "budget: only a consortium has one, not amber"),
            ):
                error, text = await ask(**keys)
                assert error and said in text and "\n" not in text

    asyncio.run(asyncio.wait_for(talk(), 120))


@pytest.mark.parametrize("words", [("--port", 1), ("--trace", "x")])
def test_options_of_the_http_server_are_refused(words: tuple[object, ...]) -> None:
    done = commands.run("swarm.serve", "mcp", *words)
    assert done.code == 2 and "mcp has no address and no clients" in done.err
