"""The requests of mixtures, consortia, judges and experiments, and their results, as recorded.

Each scenario is an example of the original programs' documentation, asked of an endpoint on the
loopback whose replies are a hash of the request. `python tests/contract/test_request_net.py`
records `request_net.json` again, after a change of requests that is meant.

Requests are sorted, since those of one round are sent at once, and equal ones are counted. Texts of
several lines are lists of lines, and long ones that occur twice stand once, in "texts". What
differs from run to run is "varies".
"""

import difflib
import hashlib
import io
import itertools
import json
import math
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import compare_endpoint
import pytest
from endpoints import Asked, Reply, chat, streamed
from judge_benches import rows, serving

from swarm.compare import Config, Question
from swarm.consortium import create_consortium
from swarm.consortium.cli import consortium
from swarm.judge.cli import main as judge
from swarm.moa.__main__ import main as moa

RECORD = Path(__file__).with_name("request_net.json")
VARIES = {"answer_id", "run", "seconds", "timestamp", "tstamp"}


# What the endpoint replies


def reply(asked: Asked) -> Reply:
    """A reply in the form that is asked for, by the hash of the request."""
    body = asked.body
    code = hashlib.sha256(json.dumps([asked.path, body], sort_keys=True).encode()).hexdigest()[:6]
    number = int(code, 16)
    if body.get("logprobs"):
        return likely(["A", "B"] if body["max_tokens"] == 1 else ["80", "35", "No"], number)
    text = judgement("\n".join(str(turn["content"]) for turn in body["messages"]), code)
    text = text or f"{body['model']} says {code}" + " indeed" * (number % 3)
    return streamed(text[:9], text[9:]) if body.get("stream") else chat(text)


def likely(tokens: list[str], number: int) -> Reply:
    """The first token, and how probable all of them were."""
    first = 0.5 + number % 40 / 100
    chances = [first, *[(1 - first) / (len(tokens) - 1)] * (len(tokens) - 1)]
    top = [{"token": one, "logprob": math.log(p)} for one, p in zip(tokens, chances, strict=True)]
    made = chat(tokens[0])
    made.body["choices"][0]["logprobs"] = {"content": [{**top[0], "top_logprobs": top}]}
    return made


def judgement(prompt: str, code: str) -> str:
    """The reply to a judge's prompt; empty for any other one."""
    number = int(code, 16)
    if "<synthesis>" in prompt:
        parts = {"synthesis": f"synthesis {code}", "confidence": f"0.{number % 90 + 10}"}
        parts |= {"analysis": f"analysis {code}", "dissent": f"dissent {code}"}
        return "\n".join(f"<{name}>\n{text}\n</{name}>" for name, text in parts.items())
    if "2 > 3 > 1" in prompt:
        return "2 > 1 > 3" if number % 2 else "3 > 2 > 1"
    if "Reply with its number" in prompt:
        return str(number % 2 + 2)
    if "[[" in prompt:
        verdict = "ABC"[number % 3] if "[[A]]" in prompt else number % 10 + 1
        return f"Because {code}.\n[[{verdict}]]"
    scores, forms = itertools.count(number), re.findall(r"\{\"[^{}]*\}", prompt)
    return re.sub(r": N\b", lambda _: f": {next(scores) % 5 + 1}", forms[-1]) if forms else ""


# The scenarios


def typed(program: Callable[[list[str]], int], *words: str, stdin: str = "") -> str:
    """The standard output of a command that ends well, with lines typed at a terminal."""
    lines, said, told = io.StringIO(stdin), io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(told):
        patch.setattr(lines, "isatty", lambda: True)
        patch.setattr(sys, "stdin", lines)
        assert program(list(words)) == 0, told.getvalue()
    return said.getvalue()


BOT = ("--aggregator", "Qwen/Qwen2-72B-Instruct", "--reference_models")
REFERENCES = (
    "Qwen/Qwen2-72B-Instruct,Qwen/Qwen1.5-72B-Chat,"
    "mistralai/Mixtral-8x22B-Instruct-v0.1,databricks/dbrx-instruct"
)


def moa_bot() -> Any:
    """The demo: a conversation of two turns, streamed."""
    lines = "What are some fun things to do in SF?\nAnd with children?\nexit\n"
    return typed(moa, *BOT, REFERENCES, "--temperature", "0.7", "--max_tokens", "512", stdin=lines)


def moa_layers() -> Any:
    """Three layers, as in the advanced example."""
    question = "What are 3 fun things to do in SF?"
    found = json.loads(typed(moa, *BOT, REFERENCES, "--layers", "3", "--json", question))
    layers = [[f"{one['model']}: {one['text']}" for one in layer] for layer in found["stages"]]
    return {"answer": found["answer"], "calls": found["calls"], "layers": layers}


def moa_ranked() -> Any:
    """The paper's prompt and its ranker, with two samples of a model and a seed."""
    words = ("--prompt", "paper", "--strategy", "rank", "--seed", "7", "--system", "Be brief.")
    return typed(moa, *BOT, "Qwen/Qwen1.5-72B-Chat:2,dbrx", *words, "Why is the sky blue?")


def consortium_python() -> Any:
    """`create_consortium` with counts and a minimum of iterations."""
    found = create_consortium(
        models=["openai/o3-mini:1", "openai/gpt-4o:2", "openai/gemini-2:3"],
        confidence_threshold=1,
        max_iterations=4,
        min_iterations=3,
        arbiter="openai/gemini-2",
        raw=True,
    ).orchestrate("Your prompt here")
    answers = [f"{one['model']}: {one['response']}" for one in found["model_responses"]]
    return {"answers": answers, "synthesis": found["synthesis"], "metadata": found["metadata"]}


def consortium_command() -> Any:
    """Two iterations, and a ranking arbiter with a system text and settings of the calls."""
    members = [part for name in ("opus", "sonnet", "gpt") for part in ("-m", f"openai/{name}")]
    given = ["What are the key considerations for AGI safety?", *members, "--json", "--quiet"]
    ranked = ("--strategy", "rank", "--system", "Your custom system prompt", "--temperature", "0.3")

    def council(words: list[str]) -> int:
        return consortium.main(words, "consortium", standalone_mode=False) or 0

    results = []
    for words in (("--max-iterations", "2"), (*ranked, "--max-tokens", "99")):
        found = json.loads(typed(council, *given, "--arbiter", "openai/opus", *words))
        results.append({"synthesis": found["synthesis"], "metadata": found["metadata"]})
    return results


def alpaca_eval() -> Any:
    """Answers of a mixture and of a model, compared in both orders."""
    made = ("alpaca_eval", "generate", "--limit", "2", "--model")
    mixture = ("--reference_models", "wizard,llama", "--rounds", "1")
    typed(judge, *made, "qwen", *mixture, "--output", "moa.json")
    typed(judge, *made, "gpt-4-preview", "--output", "gpt.json")
    pair = ("alpaca_eval", "judge", "--outputs", "moa.json", "--reference", "gpt.json")
    pair += ("--judge", "gpt-4-1106-preview", "--out")
    typed(judge, *pair, "soft")
    typed(judge, *pair, "hard", "--reading", "text", "--limit", "1")
    rates = [json.loads(Path(folder, "summary.json").read_text()) for folder in ("soft", "hard")]
    return {"answers": json.loads(Path("moa.json").read_text()), "rates": rates}


def mt_bench() -> Any:
    """Two turns of a question with a reference, graded and compared with a baseline."""
    some = ("--question_begin", "5", "--question_end", "6")
    for name in ("gpt-3.5-turbo", "vicuna"):
        words = ("--model", name, "--output", f"{name}.jsonl")
        typed(judge, "mt_bench", "generate", *words, *some)
    words = ("--answers", "gpt-3.5-turbo.jsonl,vicuna.jsonl", "--judge", "gpt-4", "--out", "out")
    baseline = ("--mode", "pairwise-baseline", "--baseline", "gpt-3.5-turbo")
    typed(judge, "mt_bench", "judge", *words, *some)
    typed(judge, "mt_bench", "judge", *words, *some, *baseline)
    found = [*rows(Path("out/gpt-4_single.jsonl")), *rows(Path("out/gpt-4_pair.jsonl"))]
    return [{key: one for key, one in row.items() if "prompt" not in key} for row in found]


def flask() -> Any:
    """Answers scored by the skills of their questions."""
    two = ("--limit", "2")
    typed(judge, "flask", "generate", "--model", "qwen", "--output", "a.jsonl", *two)
    words = ("--answers", "a.jsonl", "--judge", "gpt-4-0613", "--out", "out")
    typed(judge, "flask", "judge", *words, *two)
    return [
        [row["question_id"], row["model"], row["score"]] for row in rows(Path("out/reviews.jsonl"))
    ]


def compare(**question: Any) -> Any:
    """The rows of a question to the models of the quickstart."""
    models = {"gpt-4.1": ["gpt-4.1-2025-04-14"], "gpt-4.1-mini": ["gpt-4.1-mini-2025-04-14"]}
    return json.loads(Question.create(**question).df(models).to_json(orient="records"))


def compare_free_form() -> Any:
    """The quickstart, with a search for the endpoint of each model among two keys."""
    song = "Name a pretty song. Answer with the name only."
    Config.url_key_pairs = [*Config.url_key_pairs, (Config.url_key_pairs[0][0], "k", "FAKE_2")]
    free = {"type": "free_form", "samples_per_paraphrase": 2, "temperature": 1}
    return compare(paraphrases=[song, "Sing."], system="You love music.", **free)


def compare_rating() -> Any:
    """Numbers read from the probabilities of tokens."""
    how = "How good is the song Yesterday, from 0 to 100? Answer with the number only."
    return compare(type="rating", paraphrases=[how], min_rating=0, max_rating=100)


def compare_judges() -> Any:
    """Answers judged by a text and by a rating."""
    text = {"type": "free_form_judge", "model": "gpt-4.1-2025-04-14"}
    rating = {"type": "rating_judge", "model": "gpt-4.1-mini-2025-04-14"}
    judges = {
        "lennon": {**text, "paraphrases": ["Asked {question} I said {answer}. By him?"]},
        "taste": {**rating, "paraphrases": ["Rate the song {answer} from 0 to 100."]},
    }
    return compare(type="free_form", paraphrases=["Name a song."], judges=judges)


SCENARIOS = (
    *(moa_bot, moa_layers, moa_ranked, consortium_python, consortium_command),
    *(alpaca_eval, mt_bench, flask, compare_free_form, compare_rating, compare_judges),
)


# Recording


def record(scenario: Callable[[], Any], folder: Path) -> dict[str, Any]:
    """The requests of a scenario and its result, in an empty folder with caches of its own."""
    settings = contextmanager(compare_endpoint.settings.__wrapped__)
    with pytest.MonkeyPatch.context() as patch, settings(folder, patch):
        patch.chdir(folder)
        patch.setenv("LLM_USER_PATH", str(folder / "llm"))
        with serving(patch, folder, reply) as server:
            Config.url_key_pairs = [(server.url, "fake-key", "FAKE_API_KEY")]
            result = scenario()
    # The endpoint accepts no other method.
    bodies = (json.dumps({f"POST {one.path}": one.body}, sort_keys=True) for one in server.asked)
    sent = sorted(Counter(bodies).items())
    requests = [json.loads(body) | ({"times": n} if n > 1 else {}) for body, n in sent]
    return {"requests": requests, "result": result}


def lined(value: Any) -> Any:
    """JSON without what varies, with short numbers and a list for a text of several lines."""
    if isinstance(value, dict):
        return {key: "varies" if key in VARIES else lined(one) for key, one in value.items()}
    if isinstance(value, list):
        return [lined(one) for one in value]
    if isinstance(value, float):
        return round(value, 6)
    return value.split("\n") if isinstance(value, str) and "\n" in value else value


def replaced(value: Any, texts: Mapping[str, Any]) -> Any:
    """JSON with others in the place of some texts."""
    if isinstance(value, dict):
        return {key: replaced(one, texts) for key, one in value.items()}
    if isinstance(value, list):
        return [replaced(one, texts) for one in value]
    known = isinstance(value, str) and value in texts
    return replaced(texts[value], texts) if known else value


def shared(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A record with long texts, and then lines, that occur several times; `replaced` undoes it."""
    texts: dict[str, Any] = {}
    for _ in range(2):
        found = re.findall(r'"(?:[^"\\]|\\.){40,}"', json.dumps([recorded, texts]))
        often = [json.loads(text) for text, times in Counter(found).items() if times > 1]
        names = {text: f"<{hashlib.sha256(text.encode()).hexdigest()[:6]}>" for text in often}
        texts = replaced(texts, names) | {name: text for text, name in names.items()}
        recorded, texts = lined(replaced(recorded, names)), lined(texts)
    return {"texts": texts, **recorded}


def dumped(recorded: Any) -> str:
    """JSON with sorted keys, one value a line."""
    return json.dumps(recorded, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_requests_and_results_are_those_recorded(
    scenario: Callable[[], Any], tmp_path: Path
) -> None:
    name, kept = scenario.__name__, json.loads(RECORD.read_text(encoding="utf-8"))
    before = dumped(replaced(kept[name], kept["texts"])).splitlines()
    found = dumped(lined(record(scenario, tmp_path))).splitlines()
    changed = list(difflib.unified_diff(before, found, "recorded", "found", n=2, lineterm=""))
    more = [f"... and {len(changed) - 30} lines more"] * (len(changed) > 30)
    assert not changed, "\n".join([f"scenario {name}:", *changed[:30], *more])


if __name__ == "__main__":
    kept = {}
    for scenario in SCENARIOS:
        with tempfile.TemporaryDirectory() as folder:
            kept[scenario.__name__] = record(scenario, Path(folder))
    RECORD.write_text(dumped(shared(kept)), encoding="utf-8")
    print(f"{RECORD}: {len(kept)} scenarios, {RECORD.stat().st_size:,} bytes")
