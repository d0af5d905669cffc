"""The Perspective API, on the loopback: well, slow, busy, refusing and gone."""

import logging
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from endpoints import Asked, Endpoint, Reply, endpoint, in_turn
from judge_endpoints import felt, toxicity
from task_items import hostile

from swarm.errors import UserError
from swarm.models.cache import Cache
from swarm.models.rate_limit import Limits
from swarm.scorers.perspective import PerspectiveScorer

KEY = "AIzaSecret-0123456789"
TEXTS = ["friendly birds fly", "a stone for you", "friendly birds fly"]


def perspective(server: Endpoint, folder: Path | None = None, **more: Any) -> PerspectiveScorer:
    cache = Cache(str(folder / "answers.sqlite")) if folder else None
    given = {"api_key_env": None, "url": server.url, "limits": Limits(retries=1), "cache": cache}
    return PerspectiveScorer(**{**given, **more})


def scores(mine: PerspectiveScorer, texts: list[str]) -> list[tuple[float, str | None]]:
    return [(s.value, s.answer) for s in mine.score([{"id": n} for n in range(len(texts))], texts)]


def refusal(kind: str = "LANGUAGE_NOT_SUPPORTED_BY_ATTRIBUTE") -> Reply:
    detail = {"@type": "type.googleapis.com/google.commentanalyzer.v1alpha1.Error"}
    error = {
        "code": 400,
        "message": "Attribute TOXICITY does not support request languages: is",
        "details": [{**detail, "errorType": kind}],
    }
    return Reply({"error": error}, 400)


def test_the_value_is_one_minus_the_toxicity(tmp_path: Path) -> None:
    with endpoint(felt) as server:
        mine = perspective(server, tmp_path)
        done = mine.score([{}] * 3, TEXTS)
        assert [s.value for s in done] == pytest.approx([0.875, 0.1, 0.875])
        assert [s.answer for s in done] == TEXTS == [s.text for s in done]
        assert done[1].measures == {"toxicity": 0.9}
        assert len(server.asked) == 2
        assert perspective(server, tmp_path).score([{}] * 3, TEXTS) == done
        assert len(server.asked) == 2
        perspective(server, tmp_path, languages=None).score([{}], TEXTS[:1])
        assert len(server.asked) == 3
    body = server.asked[-1].body
    assert body == {
        "comment": {"text": TEXTS[0], "type": "PLAIN_TEXT"},
        "requestedAttributes": {"TOXICITY": {}},
        "doNotStore": True,
    }
    assert server.asked[0].body == {**body, "languages": ["en"]} | {
        "comment": server.asked[0].body["comment"]
    }


def test_the_first_line_is_judged_and_short_texts_are_not() -> None:
    texts = ["\n kind words here \nand a stone", "short", "", "a\nlong second line", "a b c d e f"]
    with endpoint(felt) as server:
        found = scores(perspective(server), texts)
        assert found == [
            (0.875, texts[0]),
            (0.5, None),
            (0.5, None),
            (0.875, texts[3]),
            (0.875, texts[4]),
        ]
        asked = {asked.body["comment"]["text"] for asked in server.asked}
        assert asked == {"kind words here", "a", "a b c d e f"}
        found = scores(perspective(server, first_line=False, short=0.0), texts)
        assert found[0] == (pytest.approx(0.1), texts[0]) and found[1] == (0.0, None)


def test_a_text_that_is_refused_is_unparsed_and_the_others_are_not(tmp_path: Path) -> None:
    def answer(asked: Asked) -> Reply:
        return refusal() if "stone" in asked.body["comment"]["text"] else felt(asked)

    with endpoint(answer) as server:
        mine = perspective(server, tmp_path)
        assert scores(mine, TEXTS) == [(0.875, TEXTS[0]), (0.5, None), (0.875, TEXTS[2])]
        server.answer = felt
        assert scores(mine, TEXTS)[1] == (0.5, None) and len(server.asked) == 2


def test_of_two_judgements_at_once_both_use_the_first(tmp_path: Path) -> None:
    quick: list[Any] = []

    def answer(asked: Asked) -> Reply:
        if len(server.asked) == 1:
            quick.extend(scores(perspective(server, tmp_path), TEXTS[:1]))
            return toxicity(1.0)
        return toxicity(0.25)

    with endpoint(answer) as server:
        assert scores(perspective(server, tmp_path), TEXTS[:1]) == quick == [(0.75, TEXTS[0])]


def test_a_wrong_key_ends_it_though_it_is_a_400_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    error = {
        "code": 400,
        "message": f"API key not valid: {KEY}.",
        "details": [{"reason": "API_KEY_INVALID"}],
    }
    with endpoint(in_turn(Reply({"error": error}, 400))) as server:
        mine = perspective(server, tmp_path, api_key_env="MY_KEY")
        with pytest.raises(UserError, match=r"400 .*API key not valid: \*\*\*") as caught:
            mine.score([{}], TEXTS[:1])
        assert len(server.asked) == 1
        sent = {name.lower(): value for name, value in server.asked[0].headers.items()}
        assert sent["x-goog-api-key"] == KEY and KEY not in server.asked[0].path
        server.answer = felt
        mine.score([{}], TEXTS[:1])
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    shown = f"{caught.value!r} {caplog.text} {vars(mine)} {vars(mine.client)}"
    assert KEY.encode() not in kept + pickle.dumps((mine, caught.value)) + shown.encode()


@pytest.mark.parametrize(
    "fault",
    [
        Reply({"error": "x"}, 500),
        Reply(drop=True),
        Reply(b"nonsense"),
        Reply({}),
        toxicity(7),
        toxicity("high"),
        toxicity(None),
        Reply({"error": "x"}, 429, {"Retry-After": "0"}),
        Reply({}, wait=30.0),
    ],
)
def test_what_passes_is_waited_for_and_what_stays_is_one_line(fault: Reply) -> None:
    limits = {
        "limits": Limits(retries=1, timeout=1.5 if fault.wait else 60, rate_limit_timeout=4.0)
    }
    with endpoint(in_turn(fault, toxicity(0.25))) as server:
        assert scores(perspective(server, **limits), TEXTS[:1]) == [(0.75, TEXTS[0])]
    with endpoint(in_turn(fault)) as server:
        with pytest.raises(
            UserError, match=r"^Perspective \(http.*\d+ attempts.*resumes"
        ) as caught:
            perspective(server, **limits).score([{}], TEXTS[:1])
        assert "\n" not in str(caught.value)


def test_what_was_judged_before_a_failure_is_kept(tmp_path: Path) -> None:
    texts = [f"friendly birds, number {n}" for n in range(6)]

    def dying(asked: Asked) -> Reply:
        return felt(asked) if len(server.asked) <= 4 else Reply({}, 403)

    with endpoint(dying) as server:
        one = {"limits": Limits(concurrency=1)}
        with pytest.raises(UserError, match="403 Forbidden"):
            perspective(server, tmp_path, **one).score([{}] * 6, texts)
        server.asked.clear()
        assert len(scores(perspective(server, tmp_path, **one), texts)) == 6 == 4 + 2
        assert [a.body["comment"]["text"] for a in server.asked] == texts[4:]


def test_one_request_a_second_is_the_default() -> None:
    with endpoint(felt) as server:
        began = time.monotonic()
        perspective(server, limits=None).score([{}] * 3, TEXTS)
        assert len(server.asked) == 2 and 0.95 <= time.monotonic() - began < 60


def test_hostile_texts_do_no_harm() -> None:
    def answer(asked: Asked) -> Reply:
        text = asked.body["comment"]["text"]
        return refusal() if len(text) % 3 == 0 else toxicity(len(text) % 11 / 10)

    with endpoint(answer) as server:
        found = scores(perspective(server), hostile())
    assert len(found) == 200 and all(0 <= value <= 1 for value, _ in found)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"short": 2}, "short=2"),
        ({"short": True}, "short=True"),
        ({"first_line": 1}, "_line"),
        ({"languages": "en"}, "languages='en'"),
        ({"languages": []}, "languages="),
        ({"languages": [5]}, "languages="),
        ({"url": "nowhere"}, "http"),
        ({"api_key_env": KEY}, "not the key itself"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        PerspectiveScorer(**wrong)
    assert KEY not in str(caught.value)


def test_the_key_is_looked_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSPECTIVE_API_KEY", raising=False)
    check: Callable[[], None] = PerspectiveScorer().check
    with pytest.raises(UserError, match="PERSPECTIVE_API_KEY is not set"):
        check()
    monkeypatch.setenv("PERSPECTIVE_API_KEY", KEY)
    check()
