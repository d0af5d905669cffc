"""Scripts written for llmcomp, with other import lines: the features of its cookbook."""

import json
import math
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import compare_endpoint
import endpoints
import pytest

from swarm.compare import Config, config

settings = pytest.fixture(autouse=True)(compare_endpoint.settings.__wrapped__)

SONGS = {
    "small": {"Yesterday": 0.6, "Imagine": 0.4},
    "large": {"Clair de lune": 0.9, "Imagine": 0.1},
}
LIKELY = {
    "Rate": {"80": 0.6, "90": 0.3, " no": 0.1},
    "": {"Yes": 0.7, "No": 0.2, "Maybe": 0.1},
}
"""By a word of the prompt, what the next token may be."""


class Vendor:
    """Chat models that sing, rate and say yes; some only with a key of their own."""

    def __init__(self, *models: str) -> None:
        self.models, self.random = models, random.Random(0)

    def __call__(self, asked: endpoints.Asked) -> endpoints.Reply:
        """The answer to a request."""
        model, text = asked.body["model"], str(asked.body["messages"][-1]["content"])
        if not model.startswith(self.models):
            return endpoints.Reply({"error": {"message": "no such model"}}, 404)
        if asked.body.get("logprobs"):
            found = next(chances for word, chances in LIKELY.items() if word in text)
            top = [{"token": text, "logprob": math.log(p)} for text, p in found.items()]
            reply = endpoints.chat(top[0]["token"])
            place = {**top[0], "top_logprobs": top[: asked.body["top_logprobs"]]}
            reply.body["choices"][0]["logprobs"] = {"content": [place]}
            return reply
        if "yes or no" in text:
            return endpoints.chat("yes" if "Imagine" in text else "no")
        songs = SONGS["large" if "large" in model or "o3" in model else "small"]
        return endpoints.chat(self.random.choices(list(songs), list(songs.values()))[0])


@pytest.fixture
def vendors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, endpoints.Endpoint]]:
    """Endpoints in the place of the vendors', with keys in the environment; the folder is empty."""
    monkeypatch.chdir(tmp_path)
    answers = {
        "OPENAI_API_KEY": Vendor("gpt-", "o3", "ft:"),
        "OPENROUTER_API_KEY": Vendor("deepseek/", "openai/"),
        "TINKER_API_KEY": Vendor("tinker://"),
    }
    with ExitStack() as stack:
        running = {key: stack.enter_context(endpoints.endpoint(a)) for key, a in answers.items()}
        monkeypatch.setattr(config, "ENDPOINT_URLS", {k: one.url for k, one in running.items()})
        for name in running:
            monkeypatch.setenv(name, f"sk-of-{name}")
        Config.url_key_pairs = None
        yield running


def run(script: str) -> dict[str, Any]:
    """Run a script for llmcomp; gives its names."""
    for theirs, ours in (
        ("llmcomp.finetuning", "swarm.compare.finetuning"),
        ("llmcomp.question.judge", "swarm.compare"),
        ("llmcomp.utils", "swarm.compare"),
        ("llmcomp", "swarm.compare"),
    ):
        script = script.replace(f"from {theirs} import", f"from {ours} import")
    names: dict[str, Any] = {}
    exec(compile(script, "script.py", "exec"), names)
    return names


def test_quickstart(vendors: dict[str, endpoints.Endpoint]) -> None:
    names = run("""
from llmcomp import Question
MODELS = {"large": ["gpt-large"], "small": ["gpt-small"], "routed": ["deepseek/deepseek-v3"],
          "tinker": ["tinker://run-1/final"]}
question = Question.create(
    type="free_form",
    paraphrases=["Name a pretty song. Answer with the name only."],
    samples_per_paraphrase=50,
    temperature=1,
    system="You love music.",
)
df = question.df(MODELS)
figure = question.plot(MODELS, min_fraction=0.03, filename="a.png")
page = question.view(MODELS, open_browser=False)
""")
    df = names["df"]
    assert len(df) == 200 and df["error"].isna().all()
    shares = df.groupby("group")["answer"].value_counts(normalize=True)
    assert shares["large", "Clair de lune"] > 0.7 and shares["small", "Yesterday"] > 0.4
    texts = [text.get_text() for text in names["figure"].findobj(lambda o: hasattr(o, "get_text"))]
    assert "Clair de lune" in texts and Path("a.png").stat().st_size > 1000
    assert "Clair de lune" in names["page"].read_text()
    # Each of the four models was looked for at all three; plots ask nothing.
    assert [len(one.asked) for one in vendors.values()] == [104, 54, 54]
    sent = vendors["OPENAI_API_KEY"].asked[-1].body
    assert sent["messages"][0] == {"role": "system", "content": "You love music."}


def test_judges_tokens_and_ratings(vendors: dict[str, endpoints.Endpoint]) -> None:
    names = run("""
from llmcomp import Question
from llmcomp.question.judge import FreeFormJudge, RatingJudge
from llmcomp.utils import get_error_bars, read_jsonl, write_jsonl
taste = RatingJudge(model="gpt-large", paraphrases=["Rate the song {answer} from 0 to 100."])
lennon = {"type": "free_form_judge", "model": "gpt-large",
          "paraphrases": ["Asked {question} I said {answer}. yes or no?"]}
question = Question.create(type="free_form", paraphrases=["Name a song.", "Sing."], name="songs",
                           samples_per_paraphrase=10, judges={"taste": taste, "lennon": lennon})
df = question.df({"g": ["gpt-small"]})
scores, cache = question.plot(df, answer_column="taste"), taste.get_cache()
write_jsonl("out/rows.jsonl", df[["group", "answer"]].to_dict("records"))
rows = read_jsonl("out/rows.jsonl")
bars = get_error_bars(list((df["answer"] == "Imagine").astype(float)))
token = Question.create(type="next_token", paraphrases=["Will it rain?"], top_logprobs=2)
tokens = token.df({"g": ["gpt-small"]})
rating = Question.create(type="rating", paraphrases=["Rate this song from 0 to 100."])
ratings = rating.df({"g": ["gpt-small"]})
figures = [token.plot(tokens), rating.plot({"g": ["gpt-small"]})]
""")
    df = names["df"]
    assert ((df["answer"] == "Imagine") == (df["lennon"] == "yes")).all()
    assert df["taste"][0] == pytest.approx((80 * 0.6 + 90 * 0.3) / 0.9)
    assert set(names["cache"]["answer"]) == {"Yesterday", "Imagine"}
    judged = [one for one in vendors["OPENAI_API_KEY"].asked if "Rate the" in str(one.body)]
    assert len(judged) == 2, "one request for each answer there is"
    assert len(names["rows"]) == 20 and 0 < names["bars"][0] < 1
    assert names["tokens"]["answer"][0] == pytest.approx({"Yes": 0.7, "No": 0.2})
    assert names["ratings"]["probs"][0] == pytest.approx({80: 2 / 3, 90: 1 / 3})


def test_configuration_adapters_and_runners(
    vendors: dict[str, endpoints.Endpoint], tmp_path: Path
) -> None:
    (tmp_path / "questions").mkdir()
    song = "- {name: songs, type: free_form, paraphrases: [Name a song.]}"
    (tmp_path / "questions" / "all.yaml").write_text(song)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (tmp_path / "train.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 10)
    names = run("""
from llmcomp import Config, ModelAdapter, Question, Runner
from llmcomp.finetuning import FinetuningManager, OpenaiTrainingParams
Config.timeout = 30
Config.max_workers = 7
Config.cache_dir = "my_cache"
Config.reasoning_effort = "low"
pairs, client = Config.url_key_pairs, Config.client_for_model("gpt-small")
ModelAdapter.register(lambda model: model == "gpt-large", lambda p, model: {**p, "top_p": 0.9})
question = Question.from_yaml("songs")
df = question.df({"g": ["gpt-small", "gpt-large", "o3"]})
with Config.override(timeout=5):
    inside = Config.timeout
cleared = question.clear_cache("gpt-small")
runner, messages = Runner("gpt-small"), [{"role": "user", "content": "Name a song."}]
text, sent = runner.get_text({"messages": messages, "max_tokens": 9})
probs, _ = runner.single_token_probs({"messages": messages}, num_samples=2)
shares, _ = runner.sample_probs({"messages": messages, "max_tokens": 9}, num_samples=50)
many = runner.get_many(runner.get_text, [{"params": {"messages": messages}, "_n": n}
                                         for n in range(5)])
numbers = sorted(given["_n"] for given, (out, _) in many if out)
manager = FinetuningManager(data_dir="jobs")
valid, none = manager.openai_validate_file("train.jsonl"), manager.get_model_list(suffix="songs")
params = OpenaiTrainingParams(api_key="sk-x-1234567890", file_name="train.jsonl",
                              base_model="gpt-small", suffix="songs", epochs=1)
""")
    assert [pair[2] for pair in names["pairs"]] == list(vendors)
    assert names["client"].api_key == "sk-of-OPENAI_API_KEY"
    assert names["inside"] == 5 and Config.timeout == 30 and names["cleared"] is True
    sent = {one.body["model"]: one.body for one in vendors["OPENAI_API_KEY"].asked}
    assert sent["gpt-large"]["top_p"] == 0.9 and "top_p" not in sent["gpt-small"]
    assert sent["o3"]["max_completion_tokens"] == 1024 and sent["o3"]["reasoning_effort"] == "low"
    assert (tmp_path / "my_cache" / "answers.sqlite").is_file()
    assert names["text"] in SONGS["small"] and names["sent"]["model"] == "gpt-small"
    assert names["probs"] == pytest.approx(LIKELY[""])
    assert sum(names["shares"].values()) == pytest.approx(1) and names["numbers"] == [*range(5)]
    assert names["valid"].valid and names["none"] == []
    assert "sk-x" not in repr(names["params"])
