"""What can be named: presets, endpoints and the models of this machine."""

import os
from collections.abc import Iterator

from swarm.collab.presets import preset_names
from swarm.models.providers import Provider, Providers
from swarm.places import conf_folder
from swarm.roster.local import LocalModels


def format_available_models(providers: Providers, local: LocalModels) -> Iterator[str]:
    """Lines that tell of them."""
    yield "presets (--preset NAME, or the path of a yaml):"
    for name in preset_names():
        first = (conf_folder() / "moa" / f"{name}.yaml").read_text(encoding="utf-8").split("\n")[0]
        yield f"  {name:<12}{first.lstrip('# ')}"
    yield "endpoints (PROVIDER/MODEL; which models they have is theirs to say):"
    for name, provider in providers.items():
        yield f"  {name:<12}{format_endpoint(provider)}"
    yield "on this machine:"
    yield from (f"  local/{name}" for name in local.list_names())
    yield "  local/FOLDER, llm/NAME, function/MODULE:NAME, moa/PRESET"


def format_endpoint(provider: Provider) -> str:
    """Where an endpoint is, and whether its key is there."""
    key = provider.api_key_env
    there = key and os.environ.get(key, "").strip()
    told = f"{key} is {'' if there else 'not '}set" if key else "no key needed"
    where = f"the URL in {provider.base_url_env}" if provider.is_url_overridden else provider.base_url
    return f"{where}, {told}"
