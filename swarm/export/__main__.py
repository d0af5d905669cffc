"""Export a result for use elsewhere: python -m swarm.export search/first to=mine."""

import sys
from collections.abc import Sequence
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from swarm._util.cli import one_line_errors, run_program
from swarm._util.files import conf_folder
from swarm.errors import UserError

HELP_TEXT = """\
Export the result of a search or a fine-tuning: a PEFT adapter, a full model
or a GGUF file, with its model card.

  python -m swarm.export search/first to=mine                  # the adapter
  python -m swarm.export search/first to=mine format=merged    # the whole model
  python -m swarm.export search/first to=mine format=gguf quantize=q8_0   # for llama.cpp, Ollama
  python -m swarm.export search/first to=mine push_to_hub=user/name

The first argument is a run folder, or the folder of an adapter; then keys, set with key=value:
"""


def parse_arguments(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the source and the keys of the command line.

    Raises:
        UserError: An argument is invalid.
    """
    sources = [word for word in words if "=" not in word]
    if len(sources) != 1:
        raise UserError("give one run folder and keys as key=value; see --help", 2)
    keys: dict[str, Any] = {}
    for word in words:
        key, equals, _ = word.partition("=")
        try:
            keys |= {key: OmegaConf.from_dotlist([word])[key]} if equals else {}
        except (yaml.YAMLError, OmegaConfBaseException):
            raise UserError(f"{word}: the value cannot be parsed", 2) from None
    return sources[0], keys


def main() -> None:
    """Parse the command line and export."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(HELP_TEXT + (conf_folder() / "export.yaml").read_text(), end="")
        return
    with one_line_errors(""):
        source, keys = parse_arguments(words)
        from swarm.export.export import Export

        print("\n".join(Export(source, **keys).write()))


if __name__ == "__main__":
    run_program(main)
