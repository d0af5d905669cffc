"""Forms of a result for servers that choose or mix adapters per request."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm._util.files import write_json
from swarm.errors import UserError
from swarm.export import gguf_writer
from swarm.export.source import ExportSource, open_pool
from swarm.merging.lora_math import pad_rank
from swarm.pool.adapter import Adapter, PoolRow, write_adapters
from swarm.pool.discovery import combined_adapter
from swarm.pool.prompt_router import PromptRouter

REQUEST_FILE = "request.json"
ROUTER_PORT, VLLM_PORT = 8899, 8000

Mixture = Sequence[tuple[float, PoolRow]]


def read_parts(source: ExportSource) -> Mixture:
    """Return the adapters of a result with their coefficients.

    Raises:
        UserError: Modules have separate coefficients, or the pool is not known.
    """
    if len(source.note.get("groups", ())) > 1:
        raise UserError(
            f"format=parts: the coefficients of {source.name} differ by module, and servers mix "
            "whole adapters; use format=peft"
        )
    return open_pool(source).mixture(source.note["coefficients"])


def write_parts(
    mixture: Mixture, folder: Path, config: Mapping[str, Any] | None, base_name: str | None
) -> None:
    """Write each adapter of a mixture, and the part of a request that mixes them.

    llama.cpp adds adapters by their scales, as in the delta space; LoRAX adds their A and B
    separately, as in the factor space.

    Args:
        config: Content of the base's config.json for llama.cpp; `None` is LoRAX.
    """
    weights = [coefficient for coefficient, _ in mixture]
    if config is not None:
        for _, row in mixture:
            gguf_writer.write_lora_gguf(row, config, folder / f"{row.name}.gguf", row.name)
        scales = [{"id": number, "scale": weight} for number, weight in enumerate(weights)]
        return write_json(folder / REQUEST_FILE, {"lora": scales})
    rank = max(rank for _, row in mixture for _, _, rank in row.shapes.values())
    for _, row in mixture:
        # The scaling goes into B: LoRAX takes that of the first adapter for all.
        exact = {module: row.load_factors(module) for module in row.shapes}
        pairs = {m: pad_rank((a.float(), b.float()), rank) for m, (a, b) in exact.items()}
        own = [row] if isinstance(row, Adapter) else []
        adapter = combined_adapter(own, pairs, base_name)
        write_adapters(folder / row.name, [adapter], {"expert": row.name})
    names = [row.name for _, row in mixture]
    merged = {"ids": names, "weights": weights, "merge_strategy": "linear"}
    parameters = {"adapter_source": "local", "merged_adapters": merged}
    write_json(folder / REQUEST_FILE, {"parameters": parameters})


def semantic_router(router: PromptRouter, base: str) -> dict[str, Any]:
    """Return a configuration of vLLM Semantic Router 0.4: an adapter for each kind of prompt.

    It has its own embeddings, which are compared with one prompt of each kind.
    """
    kinds = list(zip(router.names, router.examples, strict=True))
    backend = {
        "name": "vllm",
        "provider": "vllm",
        "endpoint": f"127.0.0.1:{VLLM_PORT}",
        "protocol": "http",
    }
    nearest = {"enable_soft_matching": True, "top_k": 1, "min_score_threshold": 0.0}
    return {
        "version": "v0.3",
        "listeners": [{"name": "http", "address": "127.0.0.1", "port": ROUTER_PORT}],
        "providers": {
            "defaults": {"model": base},
            "models": [{"name": base, "backend_refs": [backend]}],
        },
        "routing": {
            "modelCards": [
                {"name": base, "loras": [{"name": n, "description": e} for n, e in kinds]}
            ],
            "signals": {
                "embeddings": [
                    {"name": n, "threshold": 0.5, "aggregation_method": "max", "candidates": [e]}
                    for n, e in kinds
                ]
            },
            "decisions": [
                {
                    "name": n,
                    "priority": 100,
                    "rules": {
                        "operator": "AND",
                        "conditions": [{"type": "embedding", "name": n}],
                    },
                    "modelRefs": [{"model": base, "use_reasoning": False, "lora_name": n}],
                }
                for n, _ in kinds
            ],
        },
        "global": {"model_catalog": {"embeddings": {"semantic": {"embedding_config": nearest}}}},
    }
