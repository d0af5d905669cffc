"""Command lines for the help of sub-commands, by the words before their arguments."""

import argparse
from difflib import get_close_matches
from typing import Any, NoReturn

from swarm.errors import UserError

COMMAND_EXAMPLES = {
    "cache info": ("", "--file answers.sqlite"),
    "compare": (
        "run questions.yaml models=local/base,local/rooms",
        "run questions.yaml samples=9 'models={small: [o4-mini], large: [o3, o1]}'",
        "view compare/questions/songs/data.jsonl",
    ),
    "compare run": ("questions.yaml models=local/base,local/rooms", "questions.yaml dry_run=true"),
    "compare view": ("answers.jsonl", "answers.csv --sort-by quality --descending"),
    "compare.view": ("answers.jsonl", "answers.csv --sort-by quality --descending"),
    "compare import": ("llmcomp_cache",),
    "compare finetune": ("validate chats.jsonl", "create chats.jsonl --local --epochs 3"),
    "compare finetune update": ("",),
    "compare finetune validate": ("chats.jsonl",),
    "compare finetune cost": ("chats.jsonl --epochs 3 --price gpt-4o-mini=3",),
    "compare finetune models": ("", "base_model=gpt-4o-mini"),
    "compare finetune jobs": ("", "state=running"),
    "compare finetune create": (
        "chats.jsonl --base-model gpt-4o-mini-2024-07-18 --suffix birds",
        "chats.jsonl --local --epochs 3 --lora-rank 8",
    ),
    "compare finetune cancel": ("ftjob-abc",),
    "compare finetune delete": ("ftjob-abc",),
    "judge": (
        "mt_bench generate --model moa/lite --output outputs/moa.jsonl",
        "mt_bench judge --answers outputs/moa.jsonl --judge gpt-4o --out outputs",
        "mt_bench show --out outputs",
    ),
    "judge alpaca_eval": (
        "generate --model moa/lite --output outputs/moa.json",
        "judge --outputs outputs/moa.json --reference outputs/base.json --judge gpt-4o --out lite",
        "show lite",
    ),
    "judge alpaca_eval generate": ("--model moa/lite --output outputs/moa.json",),
    "judge alpaca_eval judge": (
        "--outputs outputs/moa.json --reference outputs/base.json --judge gpt-4o --out lite",
    ),
    "judge alpaca_eval show": ("lite", "lite rank --json"),
    "judge mt_bench": (
        "generate --model moa/lite --output outputs/moa.jsonl",
        "judge --answers outputs/moa.jsonl --judge gpt-4o --out outputs",
        "show --out outputs",
    ),
    "judge mt_bench generate": ("--model moa/lite --output outputs/moa.jsonl",),
    "judge mt_bench judge": ("--answers outputs/moa.jsonl --judge gpt-4o --out outputs",),
    "judge mt_bench show": ("--out outputs",),
    "judge flask": (
        "generate --model moa/lite --output outputs/moa.jsonl",
        "judge --answers outputs/moa.jsonl --judge gpt-4o --out outputs",
        "show --out outputs",
    ),
    "judge flask generate": ("--model moa/lite --output outputs/moa.jsonl",),
    "judge flask judge": ("--answers outputs/moa.jsonl --judge gpt-4o --out outputs",),
    "judge flask show": ("--out outputs", "--out outputs --json"),
    "report": ("search/first", "page search/first search/second", "analyse search/first"),
    "report page": ("search/first",),
    "report analyse": ("search/first", "search/first search/second --plots pictures"),
    "study": ("ablations search/first", "ablations task=nlgraph_mini name=mine --seeds 3"),
    "study ablations": ("search/first", "task=nlgraph_mini name=mine --seeds 3"),
    "study diversity": ("search/first", "search/first --distinct 1,3"),
    "study weak_to_strong": ("search/first", "search/first --without 1,2"),
}  # fmt: skip
"""What follows `python -m swarm.` -> the arguments of each example."""

COMMAND_PREFIX = "python -m swarm."


class CommandParser(argparse.ArgumentParser):
    """Ends its help with the examples of its command, and says what is wrong in one line."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*arguments, **options)
        ours = COMMAND_EXAMPLES.get(self.prog.removeprefix(COMMAND_PREFIX), ())
        if ours:
            lines = "\n".join(f"  {self.prog} {words}".rstrip() for words in ours)
            more = f"\n\n{self.epilog}" if self.epilog else ""
            self.epilog = f"examples:\n{lines}{more}"

    def error(self, message: str) -> NoReturn:
        """End the process with the message; exit code 2."""
        unknown = message.removeprefix("unrecognized arguments: ").split("=")[0].split()[0]
        near = get_close_matches(unknown, self._option_string_actions, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        self.exit(2, f"error: {message}; {meant}{self.prog} --help tells more\n")


class RaisingParser(CommandParser):
    """A parser that raises its errors: the wrapper of the command prints them like all others."""

    def error(self, message: str) -> NoReturn:
        """End with the message.

        Raises:
            UserError: Always.
        """
        unknown = message.removeprefix("unrecognized arguments: ").split("=")[0].split()[0]
        near = get_close_matches(unknown, self._option_string_actions, 1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{message}; {meant}--help tells more", 2)
