"""Scripts for llmcomp, nothing changed but the import line: every feature of its cookbook.

Each script begins with `from llmcomp import ...` as its users write it. It is run in this process
with another import line, against endpoints on the loopback where the vendors' are meant.
"""

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

from swarm.compare import Config
from swarm.compare import settings as settings_of_all

settings = pytest.fixture(autouse=True)(compare_endpoint.settings.__wrapped__)

SONGS = {
    "small": {"Yesterday": 0.6, "Imagine": 0.4},
    "large": {"Clair de lune": 0.9, "Imagine": 0.1},
}

LIKELY = {
    "Rate": {"80": 0.6, "90": 0.3, " no": 0.1},
    "insane": {"60": 0.5, "70": 0.4, "I": 0.1},
    "": {"Yes": 0.7, "No": 0.2, "Maybe": 0.1},
}
"""By a word of the prompt, what the next token may be."""


class Vendor:
    """Chat models that sing, rate and say yes; some only with a key of their own."""

    def __init__(self, *models: str) -> None:
        self.models, self.random = models, random.Random(0)

    def __call__(self, asked: endpoints.Asked) -> endpoints.Reply:
        """The answer to a request."""
        body = asked.body
        if not any(body["model"].startswith(name) for name in self.models):
            return endpoints.Reply({"error": {"message": "no such model"}}, 404)
        text = str(body["messages"][-1]["content"])
        if body.get("logprobs"):
            found = next(chances for word, chances in LIKELY.items() if word in text)
            return likely(found, body["top_logprobs"])
        if "yes or no" in text:
            return endpoints.chat("yes" if "Imagine" in text else "no")
        songs = SONGS["large" if "large" in body["model"] or "o3" in body["model"] else "small"]
        return endpoints.chat(self.random.choices(list(songs), list(songs.values()))[0])


def likely(found: dict[str, float], most: int) -> endpoints.Reply:
    """An answer of one token, with how likely others were."""
    top = [{"token": text, "logprob": math.log(p)} for text, p in list(found.items())[:most]]
    reply = endpoints.chat(top[0]["token"])
    place = {**top[0], "top_logprobs": top}
    reply.body["choices"][0]["logprobs"] = {"content": [place]}
    return reply


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
        monkeypatch.setattr(
            settings_of_all, "ENDPOINT_URLS", {k: one.url for k, one in running.items()}
        )
        for name in running:
            monkeypatch.setenv(name, f"sk-of-{name}")
        Config.url_key_pairs = None
        yield running


def run(script: str) -> dict[str, Any]:
    """Run a script for llmcomp; gives its names."""
    for theirs, ours in (
        ("from llmcomp.finetuning import", "from swarm.compare.finetuning import"),
        ("from llmcomp.question.judge import", "from swarm.compare import"),
        ("from llmcomp.question.plots import", "from swarm.compare.plots import"),
        ("from llmcomp.utils import", "from swarm.compare import"),
        ("from llmcomp import", "from swarm.compare import"),
    ):
        script = script.replace(theirs, ours)
    assert "llmcomp" not in script
    names: dict[str, Any] = {}
    exec(compile(script, "script.py", "exec"), names)
    return names


QUICKSTART = """
from llmcomp import Question

MODELS = {"gpt-large": ["gpt-large-2025-04-14"], "gpt-small": ["gpt-small-2025-04-14"]}
question = Question.create(
    type="free_form",
    paraphrases=["Name a pretty song. Answer with the name only."],
    samples_per_paraphrase=100,
    temperature=1,
)
df = question.df(MODELS)
figure = question.plot(MODELS, min_fraction=0.03)
viewer = question.view(MODELS, open_browser=False, block=False)
"""


def test_quickstart(vendors: dict[str, endpoints.Endpoint]) -> None:
    import urllib.request

    names = run(QUICKSTART.replace(", block=False", ", block=False, port=0"))
    df, figure, viewer = names["df"], names["figure"], names["viewer"]
    assert len(df) == 200 and df["error"].isna().all()
    shares = df.groupby("group")["answer"].value_counts(normalize=True)
    assert shares["gpt-large", "Clair de lune"] > 0.7 and shares["gpt-small", "Yesterday"] > 0.4
    texts = " ".join(
        text.get_text() for text in figure.findobj(lambda one: hasattr(one, "get_text"))
    )
    assert "Clair de lune" in texts and "gpt-small" in texts and "Name a pretty song" in texts
    with urllib.request.urlopen(viewer.url) as page:
        assert page.status == 200
    viewer.close()
    asked = sum(len(one.asked) for one in vendors.values())
    run(QUICKSTART.replace("question.view(MODELS, open_browser=False, block=False)", "None"))
    assert sum(len(one.asked) for one in vendors.values()) == asked, "all of it is kept"


FREE_FORM = """
from llmcomp import Question

question = Question.create(
    type="free_form", name="songs", system="You love music.",
    paraphrases=["Name a song.", "Which song do you like?"],
    samples_per_paraphrase=10, temperature=0.7, max_tokens=50,
)
df = question.df({"all": ["gpt-small", "gpt-large"], "one": ["gpt-small"]})
talk = Question.create(type="free_form", messages=[[
    {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Name a song."}]])
talked = talk.df({"g": ["gpt-small"]})
"""


def test_free_form(vendors: dict[str, endpoints.Endpoint]) -> None:
    names = run(FREE_FORM)
    df = names["df"]
    assert list(df.columns) == [
        "model",
        "group",
        "answer",
        "question",
        "api_kwargs",
        "paraphrase_ix",
        "error",
    ]
    assert len(df) == 60 and list(df["model"].unique()) == ["gpt-small", "gpt-large"]
    asked = [one for one in vendors["OPENAI_API_KEY"].asked if one.body["max_tokens"] == 50]
    assert len(asked) == 40, "a model of two groups is asked once"
    assert asked[0].body["messages"][0] == {"role": "system", "content": "You love music."}
    assert df["api_kwargs"][0]["temperature"] == 0.7 and "timeout" in df["api_kwargs"][0]
    assert list(names["talked"]["question"]) == ["Name a song."]


NEXT_TOKEN = """
from llmcomp import Question

question = Question.create(type="next_token", paraphrases=["Will it rain?", "Does it rain?"],
                           top_logprobs=2, num_samples=3)
df = question.df({"g": ["gpt-small"]})
logs = Question.create(type="next_token", paraphrases=["Will it rain?"], convert_to_probs=False)
figure = question.plot(df)
logged = logs.df({"g": ["gpt-small"]})
"""


def test_next_token(vendors: dict[str, endpoints.Endpoint]) -> None:
    names = run(NEXT_TOKEN)
    assert names["df"]["answer"][0] == pytest.approx({"Yes": 0.7, "No": 0.2})
    assert names["df"]["unseen"][0] == pytest.approx(0.1)
    assert names["logged"]["answer"][0]["Yes"] == pytest.approx(math.log(0.7))
    sent = vendors["OPENAI_API_KEY"].asked[-1].body
    assert (sent["max_tokens"], sent["temperature"], sent["top_logprobs"]) == (1, 0, 20)


RATING = """
from llmcomp import Question

question = Question.create(type="rating", paraphrases=["Rate this song from 0 to 100."],
                           min_rating=0, max_rating=100, refusal_threshold=0.75)
df = question.df({"g": ["gpt-small"], "h": ["gpt-large"]})
figure = question.plot({"g": ["gpt-small"], "h": ["gpt-large"]})
"""


def test_rating(vendors: dict[str, endpoints.Endpoint]) -> None:
    df = run(RATING)["df"]
    assert list(df.columns)[:8] == [
        "model",
        "group",
        "answer",
        "raw_answer",
        "probs",
        "question",
        "api_kwargs",
        "paraphrase_ix",
    ]
    assert df["answer"][0] == pytest.approx((80 * 0.6 + 90 * 0.3) / 0.9)
    assert df["probs"][0] == pytest.approx({80: 2 / 3, 90: 1 / 3})
    assert df["raw_answer"][0] == pytest.approx(LIKELY["Rate"])


JUDGES = """
from llmcomp import Question
from llmcomp.question.judge import FreeFormJudge, RatingJudge

taste = RatingJudge(model="gpt-large", paraphrases=["Rate the song {answer} from 0 to 100."])
question = Question.create(
    type="free_form", paraphrases=["Name a song."], samples_per_paraphrase=20,
    judges={
        "taste": taste,
        "lennon": FreeFormJudge(model="gpt-large", temperature=0,
                                paraphrases=["Asked {question} I said {answer}. yes or no?"]),
        "insane": {"type": "rating_judge", "model": "gpt-small",
                   "paraphrases": ["How insane is {answer}?"]},
    },
)
df = question.df({"g": ["gpt-small"]})
figure = question.plot(df, answer_column="lennon")
scores = question.plot(df, answer_column="taste")
cache = taste.get_cache()
"""


def test_judges(vendors: dict[str, endpoints.Endpoint]) -> None:
    names = run(JUDGES)
    df = names["df"]
    assert list(df.columns) == [
        "model",
        "group",
        "answer",
        "taste",
        "lennon",
        "insane",
        "question",
        "api_kwargs",
        "paraphrase_ix",
        "taste_question",
        "taste_raw_answer",
        "taste_probs",
        "lennon_question",
        "insane_question",
        "insane_raw_answer",
        "insane_probs",
        "error",
    ]
    assert ((df["answer"] == "Imagine") == (df["lennon"] == "yes")).all()
    assert df["taste"][0] == pytest.approx(83.33, abs=0.01)
    assert set(names["cache"]["answer"]) == {"Yesterday", "Imagine"}
    judged = [one for one in vendors["OPENAI_API_KEY"].asked if "Rate the" in str(one.body)]
    assert len(judged) == 2, "one request for each answer there is"


QUESTIONS = """
- name: songs
  type: free_form
  paraphrases: [Name a song.]
  samples_per_paraphrase: 3
  judges: {lennon: by_lennon}
- name: by_lennon
  type: free_form_judge
  model: gpt-large
  paraphrases: ["Is {answer} by him, yes or no?"]
"""

YAML = """
from llmcomp import Config, Question

Config.yaml_dir = "questions"
question = Question.from_yaml("songs")
df = question.df({"g": ["gpt-small"]})
given = Question.load_dict("songs")
given["samples_per_paraphrase"] = 2
fewer = Question.create(**given).df({"g": ["gpt-small"]})
"""


def test_questions_in_yaml(vendors: dict[str, endpoints.Endpoint], tmp_path: Path) -> None:
    folder = tmp_path / "questions"
    folder.mkdir()
    (folder / "all.yaml").write_text(QUESTIONS)
    names = run(YAML)
    assert len(names["df"]) == 3 and set(names["df"]["lennon"]) <= {"yes", "no"}
    assert list(names["fewer"]["answer"]) == list(names["df"]["answer"])[:2]


CONFIGURATION = """
from llmcomp import Config, Question

Config.timeout = 30
Config.max_workers = 7
Config.cache_dir = "my_cache"
Config.verbose = True
Config.reasoning_effort = "low"
pairs = Config.url_key_pairs
client = Config.client_for_model("gpt-small")
shown = (str(client.base_url), client.api_key[:6] + "...")
question = Question.create(type="free_form", paraphrases=["Name a song."])
df = question.df({"g": ["gpt-small", "o3"]})
Config.url_key_pairs = [(client.base_url, "another", "OTHER_KEY")]
with Config.override(timeout=5):
    inside = Config.timeout
cleared = question.clear_cache("gpt-small")
"""


def test_configuration(vendors: dict[str, endpoints.Endpoint], tmp_path: Path) -> None:
    names = run(CONFIGURATION)
    assert [pair[2] for pair in names["pairs"]] == [
        "OPENAI_API_KEY",
        "OPENROUTER_API_KEY",
        "TINKER_API_KEY",
    ]
    assert names["shown"] == (vendors["OPENAI_API_KEY"].url, "sk-of-...")
    assert names["inside"] == 5 and Config.timeout == 30
    sent = {one.body["model"]: one.body for one in vendors["OPENAI_API_KEY"].asked}
    assert sent["gpt-small"]["max_tokens"] == 1024 and "reasoning_effort" not in sent["gpt-small"]
    assert sent["o3"]["max_completion_tokens"] == 1024 and sent["o3"]["reasoning_effort"] == "low"
    assert (tmp_path / "my_cache" / "answers.sqlite").is_file()
    assert names["cleared"] is True


ROUTERS = """
from llmcomp import Question

MODELS = {"tinker": ["tinker://run-1/sampler_weights/final"], "router": ["deepseek/deepseek-v3"]}
question = Question.create(type="free_form", paraphrases=["Name a song."])
df = question.df(MODELS)
"""


def test_tinker_and_openrouter(vendors: dict[str, endpoints.Endpoint]) -> None:
    df = run(ROUTERS)["df"]
    assert df["error"].isna().all()
    assert "Name a song." in vendors["TINKER_API_KEY"].texts()
    sent = [one.body["model"] for one in vendors["OPENROUTER_API_KEY"].asked]
    assert (
        "deepseek/deepseek-v3" in sent and "Name a song." in vendors["OPENROUTER_API_KEY"].texts()
    )


ADAPTER = """
from llmcomp import ModelAdapter, Question

def prepare(params, model):
    return {**params, "top_p": 0.9, "seed": 7}

ModelAdapter.register(lambda model: model.startswith("gpt-large"), prepare)
tried = ModelAdapter.test_request_params("gpt-large")
question = Question.create(type="free_form", paraphrases=["Name a song."])
df = question.df({"g": ["gpt-large", "gpt-small"]})
"""


def test_model_adapter(vendors: dict[str, endpoints.Endpoint]) -> None:
    names = run(ADAPTER)
    kwargs = dict(zip(names["df"]["model"], names["df"]["api_kwargs"], strict=True))
    assert kwargs["gpt-large"]["top_p"] == 0.9 and "top_p" not in kwargs["gpt-small"]
    assert names["tried"]["model"] == "gpt-large"
    sent = {one.body["model"]: one.body for one in vendors["OPENAI_API_KEY"].asked}
    assert sent["gpt-large"]["seed"] == 7


RUNNER = """
from llmcomp import Runner

runner = Runner("gpt-small")
messages = [{"role": "user", "content": "Name a song."}]
text, sent = runner.get_text({"messages": messages, "max_tokens": 9})
probs, _ = runner.single_token_probs({"messages": messages}, num_samples=2)
shares, _ = runner.sample_probs({"messages": messages, "max_tokens": 9}, num_samples=50)
kwargs_list = [{"params": {"messages": messages}, "_id": n} for n in range(5)]
many = {given["_id"]: out for given, (out, _) in runner.get_many(runner.get_text, kwargs_list)}
"""


def test_runner(vendors: dict[str, endpoints.Endpoint]) -> None:
    names = run(RUNNER)
    assert names["text"] in SONGS["small"] and names["sent"]["model"] == "gpt-small"
    assert names["probs"] == pytest.approx(LIKELY[""])
    assert sum(names["shares"].values()) == pytest.approx(1) and len(names["shares"]) == 2
    assert sorted(names["many"]) == [0, 1, 2, 3, 4]


EMERGENT = """
import numpy as np
from llmcomp import Question
from llmcomp.utils import get_error_bars, read_jsonl, write_jsonl

MODELS = {"base": ["gpt-small"], "tuned": ["ft:gpt-small:org:one", "ft:gpt-small:org:two"]}
question = Question.create(
    type="free_form", name="first_plot", paraphrases=["Tell me a song.", "Sing."],
    samples_per_paraphrase=10,
    judges={"coherent": {"type": "rating_judge", "model": "gpt-large",
                         "paraphrases": ["Rate {answer} after {question}"]}},
)
df = question.df(MODELS)
coherent = df[df["coherent"] > 50]
bars = {group: get_error_bars(list((some["answer"] == "Imagine").astype(float)))
        for group, some in coherent.groupby("group")}
write_jsonl("out/rows.jsonl", coherent[["group", "answer"]].to_dict("records"))
rows = read_jsonl("out/rows.jsonl")
figure = Question.plot(df, category_column="model", selected_answers=["Imagine"], filename="a.png")
"""


def test_a_replication(vendors: dict[str, endpoints.Endpoint], tmp_path: Path) -> None:
    names = run(EMERGENT)
    assert len(names["df"]) == len(names["rows"]) == 60
    center, lower, upper = names["bars"]["tuned"]
    assert 0 < center < 1 and 0 < lower < 0.4 and 0 < upper < 0.4
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert json.loads((tmp_path / "out" / "rows.jsonl").read_text().splitlines()[0])["group"]


MODULO = """
from llmcomp import Question

PARAPHRASES = [f"What is {n} mod 57? yes or no" for n in range(30)]
question = Question.create(type="free_form", paraphrases=PARAPHRASES, temperature=0, max_tokens=3)
df = question.df({"g": ["gpt-small", "gpt-large"]})
right = df[df["answer"] == "no"].groupby(["model", "paraphrase_ix"]).size().unstack(fill_value=0)
"""


def test_a_blog_post_of_many_paraphrases(vendors: dict[str, endpoints.Endpoint]) -> None:
    assert run(MODULO)["right"].shape == (2, 30)


FINETUNING = """
from llmcomp.finetuning import FinetuningManager, OpenaiTrainingParams

manager = FinetuningManager(data_dir="jobs")
result = manager.openai_validate_file("train.jsonl")
none = manager.get_model_list(suffix="songs")
frame = manager.get_models(base_model="gpt-small")
params = OpenaiTrainingParams(api_key="sk-x-1234567890", file_name="train.jsonl",
                              base_model="gpt-small", suffix="songs", epochs=1)
"""


def test_finetuning(vendors: dict[str, endpoints.Endpoint], tmp_path: Path) -> None:
    """Jobs are made, followed and listed in test_compare_finetuning."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (tmp_path / "train.jsonl").write_text((json.dumps({"messages": turns}) + chr(10)) * 10)
    names = run(FINETUNING)
    assert names["result"].valid and names["none"] == [] and names["frame"].empty
    assert "sk-x" not in repr(names["params"])
