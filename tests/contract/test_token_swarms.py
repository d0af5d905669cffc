"""Token Swarms: whole models mixed token by token; the engine's answers: test_engine.py."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import searches
import task_items
import tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from swarm.engine.base_model import BaseModel
from swarm.engine.token_ensemble import ModelEnsemble, TokenEnsembleEngine, TokenEnsembleModel
from swarm.errors import UserError
from swarm.executors import ray
from swarm.models.base import Request
from swarm.runs.folder import read_state
from swarm.runs.verdict import read_verdict
from swarm.tasks.multiple_choice import MultipleChoice

PROMPTS = (
    "the question is which of the answers is right",
    "a graph of 5 nodes",
    "please answer with one word: yes or no, true or false",
    "Choose the best option",
)
CHOICES = (" (A)", " yes or no", " B", "")


def opened(models: Sequence[Path]) -> TokenEnsembleEngine:
    engine, panel = TokenEnsembleEngine(), ModelEnsemble(list(map(str, models))).open()
    engine.open(panel.base, panel, "cpu")
    return engine


def texts(engine: Any, weights: Any, new: int = 12, choices: tuple[str, ...] = ()) -> Any:
    """What is written at each position, or the log probabilities of the choices."""
    positions = np.atleast_2d(np.array(weights, dtype=np.float64))
    requests = [Request(prompt, new, choices) for prompt in PROMPTS]
    rows = engine.generate(positions, [requests] * len(positions))
    return [[one.logprobs if choices else one.text for one in row] for row in rows]


def test_a_text_is_read_once_for_all_particles(tiny_llama: Path, tiny_gemma: Path) -> None:
    engine = opened([tiny_llama, tiny_gemma])
    counts = [0, 0]

    def read(weights: Any, *more: Any) -> list[int]:
        """How many tokens each model reads for that, padding and all."""
        counts[:] = 0, 0
        texts(engine, weights, *more)
        return [*counts]

    def count(model: Any, _: Any, given: dict[str, Any]) -> None:
        counts[engine._model._models.index(model)] += given["input_ids"].numel()

    for model in engine._model._models:
        model.register_forward_pre_hook(count, with_kwargs=True)
    for more in ((1, ()), (0, CHOICES)):
        one = read([0.3, 0.7], *more)
        assert min(one) > 0 and read([[0.3, 0.7]] * 3 + [[1.4, -0.4]] * 3, *more) == one
    single = read([1.0, 0.0])
    assert read([[1.0, 0.0]] * 2) == single and single[1] == 0, "answers that agree; no weight"


def test_adapters_share_their_bases_weights(tiny_llama: Path, tiny_pool: Path) -> None:
    engine = opened([tiny_llama, tiny_pool / "amber", tiny_pool / "birch"])
    held = [{one.data_ptr() for one in model.parameters()} for model in engine._model._models]
    assert held[0] == held[1] == held[2]


def change_tokenizer(model: Path, folder: Path, how: str) -> Path:
    """A copy of a model whose tokenizer is another one in a single point."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    ids = content["model"]["vocab"]
    if how == "vocabulary":
        ids["a"], ids["b"] = ids["b"], ids["a"]
    elif how == "special":
        word = {**content["added_tokens"][3], "content": "the", "special": True}
        content["added_tokens"].append({**word, "id": ids["the"]})
    else:
        content["post_processor"] = None
    path.write_text(json.dumps(content))
    return folder


def llama(folder: Path, **shape: int) -> Path:
    """A random Llama of one layer and another shape."""
    tiny.tokenizer(folder)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = LlamaConfig(
        num_hidden_layers=1, num_key_value_heads=2, initializer_range=0.2, **(small | shape)
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("vocabulary", "tiny-llama and stranger .*2 tokens differ"),
        ("special", "tiny-llama and stranger .*'the' is a special token of only one"),
        ("beginning", "tiny-llama and stranger .*split or start a text differently"),
        ("small", "stranger has 200 embeddings"),
        ("lora", "lora on .*stranger: the experts do not fit the base"),
    ],
)
def test_what_cannot_be_mixed_is_refused_by_name(
    how: str, said: str, tiny_llama: Path, tiny_gemma: Path, tmp_path: Path
) -> None:
    other, models = tmp_path / "stranger", [str(tiny_llama)]
    if how == "small":
        llama(other, vocab_size=200)
    elif how == "lora":
        llama(other, vocab_size=320, hidden_size=64)
        tiny.expert(tiny_gemma, tmp_path / "lora", 1)
        tiny.change(tmp_path / "lora", base_model_name_or_path=None)
        models = [str(other), str(tmp_path / "lora")]
    else:
        change_tokenizer(tiny_gemma, other, how)
    panel = ModelEnsemble([*models, str(other)] if how != "lora" else models).open()
    for act in (
        TokenEnsembleEngine().check,
        lambda *both: TokenEnsembleEngine().open(*both, "cpu"),
    ):
        with pytest.raises(UserError, match=said):
            act(panel.base, panel)


def command(folder: Path, models: Sequence[Path], **more: Any) -> list[str]:
    """The command line of a small search over whole models."""
    plain = searches.arguments(folder, models[0], models[0], **more)
    kept = [one for one in plain if not one.startswith(("model", "pool."))]
    listed = ",".join(map(str, models))
    return [*kept, "experiment=token_swarms", f"pool.models=[{listed}]"]


def test_a_search_saves_a_mixture_that_answers_as_it_was_evaluated(
    tiny_llama: Path, tiny_gemma: Path, tmp_path: Path
) -> None:
    wide = llama(tmp_path / "tiny-wide", vocab_size=340)  # with more padding in its vocabulary
    words = command(tmp_path, [tiny_llama, tiny_gemma, wide], optimizer__max_iterations=8)
    result = commands.run("swarm.search", *words)
    assert result.code == 0, result.err
    run = tmp_path / "search" / "run"
    state = read_state(run)
    assert state["experts"] == ["tiny-llama", "tiny-gemma", "tiny-wide"]
    first = state["rounds"][0]
    assert np.array_equal(np.array(first["positions"])[:3], np.eye(3))
    metrics = read_verdict(state)
    assert metrics.start_model.dev.utility == max(first["utilities"][:3])
    assert metrics.dev.utility >= max(first["utilities"][:3])
    assert len({u for entry in state["rounds"] for u in entry["utilities"]}) > 1
    assert "swarm.export" not in result.out, "a mixture of models is no adapter"
    task = MultipleChoice("tiny", str(tmp_path / "tiny.json"), scoring="logits")
    for folder in (run / "global_best", run / "particle_4" / "personal_best"):
        facts = json.loads((folder / "swarm.json").read_text())
        model = TokenEnsembleModel(folder)
        assert model.weights.tolist() == [facts["coefficients"]]
        scores = task_items.played(task, task.items("dev"), model)
        rows = [json.loads(x) for x in (folder / "answers_dev.jsonl").read_text().splitlines()]
        assert [score.answer for score in scores] == [row["answer"] for row in rows]
        assert task.utility(scores) == facts["validation_utility"]


def test_a_saved_mixture_writes_the_same_text(
    tiny_llama: Path, tiny_gemma: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    """Also with adapters whose base has another name on this disk."""
    home = Path(shutil.copytree(tiny_llama, tmp_path / "copy"))
    base = BaseModel(str(home), name=str(tiny_llama))
    panel = ModelEnsemble([str(tiny_gemma), str(tiny_pool / "amber")], base).open()
    engine = TokenEnsembleEngine()
    engine.open(base, panel, "cpu")
    panel.save([0.4, 0.6], tmp_path / "best")
    model = TokenEnsembleModel(tmp_path / "best")
    assert model.panel.members()[1].base.path == str(home)
    said = model.generate([Request(prompt, 12) for prompt in PROMPTS])
    assert [[completion.text for completion in said]] == texts(engine, [0.4, 0.6])
    (tmp_path / "best" / "mixture.json").write_text('{"models": 3}')
    with pytest.raises(UserError, match=r"mixture\.json is not a readable mixture"):
        TokenEnsembleModel(tmp_path / "best")


@pytest.mark.parametrize(
    ("models", "said"),
    [
        ("null", "two or more"),
        ("[{llama},nowhere/at/all]", "pool.models: nowhere/at/all"),
        ("[{pool}/amber,{llama}]", "is an adapter"),
        ("[{llama},{stranger}]", "tiny-llama and stranger do not share a tokenizer"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    models: str, said: str, tiny_llama: Path, tiny_gemma: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    stranger = change_tokenizer(tiny_gemma, tmp_path / "stranger", "vocabulary")
    given = models.format(llama=tiny_llama, stranger=stranger, pool=tiny_pool)
    words = command(tmp_path, [tiny_llama, tiny_gemma])
    result = commands.run("swarm.search", *words, f"pool.models={given}")
    assert result.code in (1, 2), result.err
    assert len(result.err.strip().splitlines()) == 1 and said in result.err, result.err
    assert not (tmp_path / "search").exists()


def test_a_member_that_is_not_finite_and_packing_for_ray_are_refused(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_pool / "amber", tmp_path / "amber")
    file = tmp_path / "amber" / "adapter_model.safetensors"
    weights = load_file(file)
    next(iter(weights.values()))[0, 0] = float("nan")
    save_file(weights, file)
    panel = ModelEnsemble([str(tiny_llama), str(tmp_path / "amber")]).open()
    with pytest.raises(UserError, match="amber"):
        panel.check()
    with pytest.raises(UserError, match=r"executor\.experts=path"):
        ray.pack_experts(panel)
