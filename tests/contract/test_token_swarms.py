"""Token Swarms: whole models of different architectures, mixed token by token."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import searches
import task_items
import tiny
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig

from swarm.engine.base_model import BaseModel
from swarm.engine.hf import HFEngine
from swarm.engine.token_ensemble import ModelEnsemble, TokenEnsembleEngine, TokenEnsembleModel
from swarm.errors import UserError
from swarm.executors import ray
from swarm.models.base import Completion, Request
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
WEIGHTS = (
    (0.5, 0.5, 0.0),
    (0.2, 0.3, 0.5),
    (1.4, -0.4, 0.0),
    (0.0, 2.0, -1.0),
    (-0.3, 0.6, 0.7),
)


@pytest.fixture(scope="module")
def tiny_wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral with more rows of padding in its vocabulary than the other tiny models have."""
    folder = tmp_path_factory.mktemp("base") / "tiny-wide"
    tiny.tokenizer(folder)
    return mistral(folder, vocab_size=340, sliding_window=None)


def mistral(folder: Path, **more: Any) -> Path:
    """Save a random Mistral of two layers."""
    config = MistralConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=2,
        **more,
    )
    with tiny.seeded(9):
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trio(tiny_llama: Path, tiny_gemma: Path, tiny_wide: Path) -> list[str]:
    return [str(folder) for folder in (tiny_llama, tiny_gemma, tiny_wide)]


def opened(models: Sequence[str], **settings: Any) -> TokenEnsembleEngine:
    engine, panel = TokenEnsembleEngine(**settings), ModelEnsemble(models).open()
    engine.open(panel.base, panel, "cpu")
    return engine


def answers(
    engine: TokenEnsembleEngine, weights: Any, new: int = 12, choices: tuple[str, ...] = ()
) -> list[list[Completion]]:
    positions = np.atleast_2d(np.array(weights, dtype=np.float64))
    requests = [Request(prompt, new, choices) for prompt in PROMPTS]
    return engine.generate(positions, [requests] * len(positions))


def words(models: Sequence[str]) -> Any:
    return AutoTokenizer.from_pretrained(models[0])


def shares(networks: Sequence[Any], weights: Sequence[float], ids: list[int]) -> Any:
    """The mixture's chances of the next token, in float64, from the whole text every time."""
    total = torch.zeros(tiny_width(), dtype=torch.float64)
    with torch.inference_mode():
        for network, weight in zip(networks, weights, strict=True):
            logits = network(torch.tensor([ids])).logits[0, -1, : tiny_width()]
            total += weight * logits.double().softmax(-1)
    return total.clamp(min=0) / total.clamp(min=0).sum()


def tiny_width() -> int:
    return tiny.WORDS


def written(networks: Sequence[Any], weights: Sequence[float], start: list[int]) -> list[int]:
    """Twelve tokens at most, one after the other."""
    new: list[int] = []
    while len(new) < 12:
        token = int(shares(networks, weights, start + new).argmax())
        if token == 2:
            break
        new.append(token)
    return new


def test_one_alone_says_what_its_own_generate_says(trio: list[str]) -> None:
    tokenizer = words(trio)
    assert len(tokenizer) == tiny_width()
    rows = answers(opened(trio), np.eye(3))
    said = {completion.text for row in rows for completion in row}
    assert len(said) > len(PROMPTS), "the models say the same"
    for folder, row in zip(trio, rows, strict=True):
        network = tiny.load(Path(folder))
        padding = list(range(tiny_width(), network.config.vocab_size))
        for prompt, completion in zip(PROMPTS, row, strict=True):
            ids = tokenizer(prompt, return_tensors="pt")
            with torch.inference_mode():
                out = network.generate(
                    **ids, max_new_tokens=12, do_sample=False, suppress_tokens=padding
                )
            new = out[0, ids.input_ids.shape[1] :]
            assert completion.text == tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.parametrize("max_tokens", [None, 60])
def test_a_mixture_says_what_a_plain_loop_says(trio: list[str], max_tokens: int | None) -> None:
    """No caches, no batches, float64; all mixtures at once and in small batches."""
    tokenizer, networks = words(trio), [tiny.load(Path(folder)) for folder in trio]
    rows = answers(opened(trio, max_tokens=max_tokens), WEIGHTS)
    for weights, row in zip(WEIGHTS, rows, strict=True):
        for prompt, completion in zip(PROMPTS, row, strict=True):
            new = written(networks, weights, tokenizer(prompt).input_ids)
            assert completion.text == tokenizer.decode(new, skip_special_tokens=True)
            assert completion.new_tokens == len(new)
    alone = answers(opened(trio), np.eye(3))
    assert any(all(a[i].text != rows[0][i].text for a in alone[:2]) for i in range(len(PROMPTS))), (
        "a mixture never says anything of its own"
    )


def test_choices_have_the_mixtures_chances(trio: list[str]) -> None:
    tokenizer, networks = words(trio), [tiny.load(Path(folder)) for folder in trio]
    engine = opened(trio)
    everyone = [*WEIGHTS, *np.eye(3).tolist()]
    for weights, row in zip(everyone, answers(engine, everyone, 0, CHOICES), strict=True):
        for prompt, completion in zip(PROMPTS, row, strict=True):
            start, found = (
                engine._prompt_ids(prompt),
                engine._choice_ids(Request(prompt, 0, CHOICES)),
            )
            for choice, logprob, greedy in zip(
                found, completion.logprobs, completion.greedy, strict=True
            ):
                steps = [shares(networks, weights, start + choice[:i]) for i in range(len(choice))]
                chances = [step[t].item() for step, t in zip(steps, choice, strict=True)]
                if all(chances):
                    assert logprob == pytest.approx(np.log(chances).sum(), abs=2e-3)
                else:
                    assert -90 * len(choice) < logprob < -60, "what is impossible has a floor"
                likeliest = [int(s.argmax()) == t for s, t in zip(steps, choice, strict=True)]
                assert greedy == all(likeliest)
    assert tokenizer.eos_token_id == 2


@contextmanager
def counted(engine: TokenEnsembleEngine) -> Iterator[list[int]]:
    """How many tokens each model reads inside, padding and all."""
    counts = [0] * len(engine._model._models)

    def count(number: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            counts[number] += kwargs["input_ids"].numel()

        return hook

    hooks = [
        model.register_forward_pre_hook(count(number), with_kwargs=True)
        for number, model in enumerate(engine._model._models)
    ]
    yield counts
    for hook in hooks:
        hook.remove()


def test_a_text_is_read_once_for_all_particles(trio: list[str]) -> None:
    engine = opened(trio)
    for new, choices in ((1, ()), (0, CHOICES)):
        with counted(engine) as one:
            answers(engine, [0.3, 0.3, 0.4], new, choices)
        with counted(engine) as many:
            answers(engine, [[0.3, 0.3, 0.4]] * 3 + [[1.4, -0.2, -0.2]] * 3, new, choices)
        assert min(one) > 0 and many == one
    with counted(engine) as twins:
        answers(engine, [[0.5, 0.5, 0.0]] * 2)
    with counted(engine) as single:
        answers(engine, [0.5, 0.5, 0.0])
    assert twins == single and single[2] == 0, "answers that agree, and a model of no weight"


def test_particles_may_ask_different_things(trio: list[str]) -> None:
    """As in the second round of a game: other prompts, other choices, or none."""
    engine = opened(trio)
    positions = np.array(WEIGHTS[:3])
    asked = [
        [Request("yes or no", 4), Request("a graph of 5 nodes", 6)],
        [Request("the answer is", 4), Request("a graph of 5 nodes", 2)],
        [Request("yes or no", 0, (" (A)", " no")), Request("the answer is", 5)],
    ]
    together = engine.generate(positions, asked)
    for position, requests, row in zip(positions, asked, together, strict=True):
        for request, completion in zip(requests, row, strict=True):
            alone = engine.generate(position[None], [[request]])[0][0]
            assert completion.text == alone.text
            assert completion.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_a_model_with_a_sliding_window_is_mixed_alike(tiny_gemma: Path, tmp_path: Path) -> None:
    """Its cache cannot be cut, so that choices are read with their prompts."""
    narrow = tmp_path / "narrow"
    tiny.tokenizer(narrow)
    mistral(narrow, vocab_size=320, sliding_window=6)
    models, mixed = [str(tiny_gemma), str(narrow)], [0.4, 0.6]
    engine, tokenizer = opened(models), words(models)
    networks = [tiny.load(Path(folder)) for folder in models]
    written_by = answers(engine, [mixed, [0.0, 1.0]])[0]
    scored = answers(engine, [mixed, [0.0, 1.0]], 0, CHOICES)[0]
    for prompt, text, choices in zip(PROMPTS, written_by, scored, strict=True):
        start = tokenizer(prompt).input_ids
        new = written(networks, mixed, start)
        assert text.text == tokenizer.decode(new, skip_special_tokens=True)
        first = engine._choice_ids(Request(prompt, 0, CHOICES[:1]))[0]
        chances = [shares(networks, mixed, start + first[:i])[t] for i, t in enumerate(first)]
        assert choices.logprobs[0] == pytest.approx(np.log(chances).sum(), abs=2e-3)


def test_adapters_are_members_and_share_their_bases_weights(
    tiny_llama: Path, tiny_gemma: Path, tiny_pool: Path
) -> None:
    models = [str(tiny_llama), str(tiny_pool / "amber"), str(tiny_pool / "birch"), str(tiny_gemma)]
    engine, tokenizer = opened(models), words(models)
    rows = answers(engine, np.eye(4))
    for name, row in zip(("amber", "birch"), rows[1:3], strict=True):
        network = PeftModel.from_pretrained(tiny.load(tiny_llama), tiny_pool / name).eval()
        padding = list(range(tiny_width(), network.config.vocab_size))
        for prompt, completion in zip(PROMPTS, row, strict=True):
            ids = tokenizer(prompt, return_tensors="pt")
            with torch.inference_mode():
                out = network.generate(
                    **ids, max_new_tokens=12, do_sample=False, suppress_tokens=padding
                )
            new = out[0, ids.input_ids.shape[1] :]
            assert completion.text == tokenizer.decode(new, skip_special_tokens=True)
    first, second = (
        {weight.data_ptr() for weight in model.parameters()} for model in engine._model._models[:2]
    )
    assert first == second


def change_tokenizer(model: Path, folder: Path, how: str) -> Path:
    """A copy of a model whose tokenizer is another one in a single point."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    if how == "vocabulary":
        ids = content["model"]["vocab"]
        ids["a"], ids["b"] = ids["b"], ids["a"]
    elif how == "special":
        word = {**content["added_tokens"][3], "content": "the", "special": True}
        content["added_tokens"].append({**word, "id": content["model"]["vocab"]["the"]})
    elif how == "beginning":
        content["post_processor"] = None
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("vocabulary", "2 tokens differ"),
        ("special", "'the' is a special token of only one"),
        ("beginning", "split or start a text differently"),
    ],
)
def test_other_tokenizers_are_refused_by_name(
    how: str, said: str, tiny_llama: Path, tiny_gemma: Path, tmp_path: Path
) -> None:
    other = change_tokenizer(tiny_gemma, tmp_path / "stranger", how)
    panel = ModelEnsemble([str(tiny_llama), str(other)]).open()
    for act in (
        TokenEnsembleEngine().check,
        lambda *both: TokenEnsembleEngine().open(*both, "cpu"),
    ):
        with pytest.raises(UserError, match=f"tiny-llama and stranger .*{said}"):
            act(panel.base, panel)


def test_too_small_an_embedding_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    tiny.tokenizer(small)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(small)
    panel = ModelEnsemble([str(tiny_llama), str(small)]).open()
    with pytest.raises(UserError, match="small has 200 embeddings"):
        TokenEnsembleEngine().check(panel.base, panel)


def command(folder: Path, models: Sequence[Path], name: str = "run", **more: Any) -> list[str]:
    """The command line of a small search over whole models."""
    plain = searches.arguments(folder, models[0], models[0], name, **more)
    kept = [one for one in plain if not one.startswith(("model", "pool."))]
    listed = ",".join(map(str, models))
    return [*kept, "experiment=token_swarms", f"pool.models=[{listed}]"]


@pytest.fixture(scope="module")
def done(trio: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, commands.Done]:
    """The place and the output of one finished search of three models."""
    place = tmp_path_factory.mktemp("search")
    words = command(place, list(map(Path, trio)), optimizer__max_iterations=8)
    result = commands.run("swarm.search", *words)
    assert result.code == 0, result.err
    return place, result


def test_a_search_finds_at_least_the_best_model(
    done: tuple[Path, commands.Done],
) -> None:
    place, result = done
    folder = place / "search" / "run"
    state = read_state(folder)
    assert state["experts"] == ["tiny-llama", "tiny-gemma", "tiny-wide"]
    first = state["rounds"][0]
    assert np.array_equal(np.array(first["positions"])[:3], np.eye(3))
    metrics = read_verdict(state)
    assert metrics.start_model.dev.utility == max(first["utilities"][:3])
    assert metrics.dev.utility >= max(first["utilities"][:3])
    assert len({u for entry in state["rounds"] for u in entry["utilities"]}) > 2
    last, following = result.out.splitlines()[-2:]
    assert last.startswith(f"best mixture: {folder / 'global_best'} (after ")
    assert following == f"next: python -m swarm.report {folder} (the result as a page)"


def test_the_saved_mixture_answers_as_it_was_evaluated(
    done: tuple[Path, commands.Done],
) -> None:
    place, _ = done
    task = MultipleChoice("tiny", str(place / "tiny.json"), scoring="logits")
    for best in ("global_best", "particle_4/personal_best"):
        folder = place / "search" / "run" / best
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
    home = tmp_path / "copy"
    shutil.copytree(tiny_llama, home)
    base = BaseModel(str(home), name=str(tiny_llama))
    panel = ModelEnsemble([str(tiny_gemma), str(tiny_pool / "amber")], base).open()
    engine = TokenEnsembleEngine()
    engine.open(base, panel, "cpu")
    panel.save([0.4, 0.6], tmp_path / "best")
    expected = [completion.text for completion in answers(engine, [0.4, 0.6])[0]]
    model = TokenEnsembleModel(tmp_path / "best")
    assert model.panel.members()[1].base.path == str(home)
    said = model.generate([Request(prompt, 12) for prompt in PROMPTS])
    assert [completion.text for completion in said] == expected
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


def test_an_adapter_of_another_base_is_refused(
    tiny_gemma: Path, tiny_qwen2: Path, tmp_path: Path
) -> None:
    tiny.expert(tiny_gemma, tmp_path / "lora", 1)
    tiny.change(tmp_path / "lora", base_model_name_or_path=None)
    wide = tmp_path / "wide"
    tiny.tokenizer(wide)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(wide)
    panel = ModelEnsemble([str(wide), str(tmp_path / "lora")]).open()
    with pytest.raises(UserError, match="lora does not fit"):
        TokenEnsembleEngine().check(panel.base, panel)


def test_an_adapter_that_is_not_finite_is_refused(
    tiny_llama: Path, tiny_pool: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_pool / "amber", tmp_path / "amber")
    file = tmp_path / "amber" / "adapter_model.safetensors"
    weights = load_file(file)
    next(iter(weights.values()))[0, 0] = float("nan")
    save_file(weights, file)
    with pytest.raises(UserError, match="amber"):
        ModelEnsemble([str(tiny_llama), str(tmp_path / "amber")]).open().check()


def test_ray_sends_no_models_and_adapters_need_the_other_engine(trio: list[str]) -> None:
    panel = ModelEnsemble(trio).open()
    with pytest.raises(UserError, match=r"executor\.experts=path"):
        ray.pack_experts(panel)
    with pytest.raises(UserError, match="needs pool=adapters"):
        HFEngine().open(panel.base, panel, "cpu")
