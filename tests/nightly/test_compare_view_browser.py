"""The viewer's page in a real browser, at the widths of a desk and of a telephone."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from headless_browser import SIZES, shown

from swarm.compare.view import view

HOSTILE = "<script>alert('x')</script></script><img src=x onerror=alert(1)> \u202e &amp;"
DOT = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA="
PICTURE = [
    {"type": "text", "text": "What is it?"},
    {"type": "image_url", "image_url": {"url": DOT}},
    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
]


def records() -> list[dict[str, Any]]:
    """120 answers of three models to two paraphrases, and odd ones at the end."""
    found: list[dict[str, Any]] = []
    for model in ("m1", "m2", "m3"):
        for n in range(40):
            question = ("Who sings?", "Who is it that sings?")[n % 2]
            asked = [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": question},
            ]
            found.append(
                {
                    "model": model,
                    "group": "base" if model == "m1" else "tuned",
                    "answer": f"{model} bird number {n}",
                    "quality": float(n),
                    "mood": "calm" if n % 4 else "dark",
                    "question": question,
                    "api_kwargs": {"model": model, "messages": asked, "temperature": 1},
                    "paraphrase_ix": n % 2,
                    "quality_question": "How good?",
                    "quality_probs": {"10": 0.75, "20": 0.25},
                    "error": None,
                }
            )
    found[0]["answer"] = HOSTILE
    found[1]["answer"] = {f"token{n}": 1 / (n + 2) for n in range(30)}
    found[2] |= {
        "question": PICTURE,
        "api_kwargs": {"messages": [{"role": "user", "content": PICTURE}]},
    }
    found[3] |= {"answer": None, "quality": None, "error": f"m1: it said 500 {HOSTILE}"}
    found[4]["api_kwargs"] = {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [1]}]
    }
    return found


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with view(records(), sort_by=None, port=0, open_browser=False, block=False) as running:
        yield running.url


def place(page: Any, number: int, total: int) -> None:
    """Wait until an answer of that number is there."""
    page.wait_for_function(
        "([number, total]) => document.getElementById('goto')?.value === String(number) &&"
        " document.querySelector('.pager label span').textContent === `of ${total}`",
        arg=[number, total],
    )


SLOW = """() => {
  const fetched = window.fetch;
  window.fetch = async (...asked) => {
    const reply = await fetched(...asked);
    await new Promise((done) => setTimeout(done, 400));
    return reply;
  };
}"""


STAYS = """() => {
  const set = window.setTimeout;
  window.setTimeout = (act, wait) => set(act, wait === 1200 ? 1e8 : wait);
}"""
"""What is said for a moment stays."""


def answer(page: Any) -> str:
    text: str = page.locator(".answer").inner_text()
    return text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_nothing_sticks_out(browser: Any, url: str, size: str, scheme: str) -> None:
    with shown(browser, url, size, scheme) as page:
        for words in ("", "row=1", "row=2", "view=list", "view=pairs", "is.model=m2&sort=-quality"):
            page.goto(f"{url}#{words}&x")
            page.wait_for_selector(".pager")
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= SIZES[size]["width"], words
        page.locator("#filters").evaluate("one => { one.open = true; }")
        assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size]["width"]
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(252, 252, 251)", "dark": "rgb(20, 23, 27)"}[scheme]


@pytest.mark.parametrize("size", SIZES)
def test_long_names_do_not_stick_out(browser: Any, size: str) -> None:
    rows = [{"model": f"vendor/{n}{'x' * 150}", "answer": "y" * 400, "good": n} for n in range(3)]
    with (
        view(rows, sort_by=None, port=0, open_browser=False, block=False) as running,
        shown(browser, running.url, size) as page,
    ):
        for words in ("", "view=list", "view=pairs"):
            page.goto(f"{running.url}#{words}")
            page.wait_for_selector(".means" if "pairs" in words else ".pager")
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= SIZES[size]["width"], words


def test_hostile_text_is_text(browser: Any, url: str) -> None:
    with shown(browser, url) as page:
        place(page, 1, 120)
        assert HOSTILE in answer(page)
        for words in ("row=3", "view=list", "view=pairs", "errors=only&view=list"):
            page.goto(f"{url}#{words}")
            page.wait_for_selector(".pager")
            page.wait_for_function("() => document.body.innerText.includes(\"<script>alert('x')\")")
            assert page.locator("main img, main script").count() == 0


def test_what_is_asked_may_be_parts_or_nothing(browser: Any, url: str) -> None:
    with shown(browser, f"{url}#row=2") as page:
        place(page, 3, 120)
        told = page.get_by_label("Conversation")
        assert "What is it?" in told.inner_text()
        assert told.locator("img").get_attribute("src") == DOT
        assert "a picture that is not loaded: https://example.org/a.png" in told.inner_text()
        page.goto(f"{url}#row=4")
        place(page, 5, 120)
        assert "tool_calls" in told.inner_text()
        page.goto(f"{url}#row=3")
        place(page, 4, 120)
        assert answer(page).startswith("failed: m1: it said 500")


def test_probabilities_are_bars(browser: Any, url: str) -> None:
    with shown(browser, f"{url}#row=1") as page:
        place(page, 2, 120)
        bars = page.locator(".answer .bars i")
        assert bars.count() == 20 and "and 10 more" in answer(page)
        widths = [
            one.evaluate("bar => bar.getBoundingClientRect().width") for one in bars.all()[:3]
        ]
        assert widths[0] == pytest.approx(widths[1] * 1.5, rel=0.02) and widths[1] > widths[2] > 0
        assert page.locator("summary", has_text="quality_probs").count() == 1


def test_keys_lead_through_it(browser: Any, url: str) -> None:
    with shown(browser, url) as page:
        place(page, 1, 120)
        for key, number in (("ArrowRight", 2), ("j", 3), ("ArrowLeft", 2), ("k", 1), ("k", 1)):
            page.keyboard.press(key)
            place(page, number, 120)
        page.keyboard.press("g")
        page.keyboard.type("60")
        page.keyboard.press("Enter")
        place(page, 60, 120)
        page.keyboard.press("Escape")
        page.keyboard.press("2")
        page.wait_for_selector("table.list")
        assert page.locator("#goto").input_value() == "51"
        page.keyboard.press("ArrowRight")
        page.wait_for_function("() => document.getElementById('goto').value === '101'")
        page.keyboard.press("3")
        page.wait_for_selector(".sides")
        page.keyboard.press("1")
        page.wait_for_selector(".one")
        page.keyboard.press("/")
        page.keyboard.type('m2 "number 7"')
        place(page, 1, 1)
        assert answer(page) == "m2 bird number 7"
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        assert page.locator("#keys").is_visible()
        page.keyboard.press("Escape")
        assert not page.locator("#keys").is_visible()


def test_a_number_being_typed_outlives_a_slow_answer(browser: Any, url: str) -> None:
    with shown(browser, url) as page:
        place(page, 1, 120)
        page.evaluate(SLOW)
        for typed in ("g60", "g6"):
            page.keyboard.press("ArrowRight")
            page.keyboard.press(typed[0])
            page.keyboard.type(typed[1:])
            page.wait_for_timeout(600)
            assert page.locator("#goto").input_value() == typed[1:]
            page.keyboard.press("Enter")
            place(page, int(typed[1:]), 120)
            page.keyboard.press("Escape")


def test_search_and_filters_and_their_address(browser: Any, url: str) -> None:
    with shown(browser, url) as page:
        place(page, 1, 120)
        page.locator("#filters summary").click()
        page.get_by_label("m2").check()
        place(page, 1, 40)
        page.get_by_label("m3").check()
        place(page, 1, 80)
        page.get_by_label("quality, least").fill("38")
        page.get_by_label("quality, least").press("Enter")
        place(page, 1, 4)
        page.locator("#search").fill("-39")
        place(page, 1, 2)
        assert page.locator("#count").inner_text() == "2 of 120 answers"
        page.locator("#next").click()
        place(page, 2, 2)
        assert answer(page) == "m3 bird number 38" and page.locator("#next").is_disabled()
        kept = page.url
        page.locator("#search").fill("nowhere")
        page.get_by_text("No answer fits").wait_for()
        page.goto("about:blank")
        page.goto(kept)
        place(page, 2, 2)
        assert answer(page) == "m3 bird number 38" and page.get_by_label("m2").is_checked()
        page.get_by_role("button", name="Clear filters").click()
        page.locator("#search").fill("")
        place(page, 1, 120)


def test_orders(browser: Any, url: str) -> None:
    with shown(browser, url) as page:
        place(page, 1, 120)
        page.locator("#sort").select_option("quality")
        page.locator("#direction").click()
        page.wait_for_function(
            "() => document.querySelector('.answer').innerText === 'm1 bird number 39'"
        )
        page.locator("#then").select_option("model")
        page.locator("#thendirection").click()
        page.wait_for_function(
            "() => document.querySelector('.answer').innerText === 'm3 bird number 39'"
        )
        page.locator("#sort").select_option("__random__")
        page.wait_for_function("() => location.hash.includes('__random__')")
        page.locator("[data-view=list]").click()
        page.wait_for_selector("table.list")
        numbers = page.locator("table.list td.answer")
        first = numbers.all_inner_texts()
        page.reload()
        page.wait_for_selector("table.list")
        assert numbers.all_inner_texts() == first
        page.locator("#shuffle").click()
        page.wait_for_function(
            "first => [...document.querySelectorAll('td.answer')].some("
            "(one, n) => one.innerText !== first[n])",
            arg=first,
        )
        page.get_by_role("button", name="quality").click()
        page.wait_for_selector("th[aria-sort=ascending]")
        page.get_by_role("button", name="quality ↑").click()
        page.wait_for_selector("th[aria-sort=descending]")
        assert numbers.first.inner_text() == "m3 bird number 39"  # of equals as before
        page.get_by_role("button", name="Open 2", exact=True).click()
        place(page, 2, 120)
        assert answer(page) == "m2 bird number 39"


def test_models_side_by_side(browser: Any, url: str) -> None:
    with shown(browser, f"{url}#view=pairs&search=number+38&left=m2&right=m3") as page:
        pair = page.locator(".sides")
        pair.wait_for()
        assert page.locator("#count").inner_text() == "1 pairs of 120 answers"
        told = pair.inner_text()
        assert "paraphrase 0, sample 19" in told and "Who sings?" in told
        assert pair.locator(".answer").all_inner_texts() == [
            "m2 bird number 38",
            "m3 bird number 38",
        ]
        page.locator("#swap").click()
        page.wait_for_function("() => document.querySelector('.answer').innerText.includes('m3')")
        page.locator("#by").select_option("group")
        page.wait_for_function("() => document.querySelector('.means').innerText.includes('tuned')")
        page.goto(f"{url}#view=pairs&left=m2&right=m3&from=10")
        page.wait_for_function("() => document.querySelectorAll('.sides').length === 10")
        assert page.locator("#goto").input_value() == "11"
        assert re.search(r"quality\s+19\.5\s+19\.5\s+0", page.locator(".means").inner_text())
        pair.last.get_by_role("button", name="open").last.click()
        page.wait_for_selector(".one")
        assert answer(page) == "m3 bird number 19"


def test_an_answer_is_copied(browser: Any, url: str) -> None:
    allowed = ["clipboard-read", "clipboard-write"]
    with shown(browser, f"{url}#row=50", permissions=allowed) as page:
        place(page, 51, 120)
        page.evaluate(STAYS)
        page.get_by_role("button", name="Copy").click()
        page.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == "m2 bird number 10"
        page.keyboard.press("ArrowRight")
        place(page, 52, 120)
        page.keyboard.press("c")
        page.get_by_role("button", name="Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == "m2 bird number 11"


def test_flags_and_exports(browser: Any, url: str) -> None:
    with shown(browser, f"{url}#row=50") as page:
        place(page, 51, 120)
        page.keyboard.press("f")
        page.get_by_role("button", name="⚑ Flagged").wait_for()
        page.keyboard.press("ArrowRight")
        place(page, 52, 120)
        page.locator("#flag").click()
        page.locator("#flag[aria-pressed=true]").wait_for()
        page.locator("#filters summary").click()
        page.get_by_label("flagged alone (2)").check()
        place(page, 1, 2)
        with page.expect_download() as kept:
            page.get_by_role("link", name="JSONL").click()
        lines = Path(kept.value.path()).read_text().splitlines()
        assert [json.loads(line)["answer"] for line in lines] == [
            "m2 bird number 10",
            "m2 bird number 11",
        ]
        assert kept.value.suggested_filename == "answers.jsonl"
        page.keyboard.press("Escape")
        page.locator("#flag").click()
        page.get_by_text("outside the filters").wait_for()
        page.locator("#next").click()
        place(page, 1, 1)
        page.locator("#flag").click()
        page.get_by_text("outside the filters").wait_for()
        assert page.locator("#next").is_disabled()


def test_the_toggle_turns_the_page(browser: Any, url: str) -> None:
    with shown(browser, url, scheme="dark") as page:
        page.get_by_role("button", name="Light page").click()
        paper = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(paper) == "rgb(252, 252, 251)"
        page.reload()
        assert page.evaluate(paper) == "rgb(252, 252, 251)"


def test_an_ended_viewer_and_a_wrong_address_are_told(browser: Any, url: str) -> None:
    rows = [{"answer": "alone"}]
    with view(rows, port=0, open_browser=False, block=False) as running:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{running.url}#view=pairs")
        page.get_by_text("There is nothing to compare").wait_for()
        page.goto(f"{running.url}#sort=quality")
        page.get_by_text("quality: no such column; there are answer").wait_for()
        page.goto(f"{running.url}#sort=answer")
        place(page, 1, 1)
        assert answer(page) == "alone" and page.locator("#failure").is_hidden()
    page.keyboard.press("2")
    page.get_by_text("The viewer has ended.").wait_for()
    context.close()
