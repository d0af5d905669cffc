"""The pages Models, Talk and Compare in a real browser, on a tiny model and an endpoint."""

import json
import re
from pathlib import Path
from typing import Any

import endpoints
import fake_models
import pytest
import tiny
import ui_pages
from headless_browser import SIZES, shown
from searches import choice_file
from ui_pages import HOSTILE, fits

from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.models.base import Message, Request
from swarm.registry.registry import Roster
from swarm.ui.chat import LOCAL_MAX_TOKENS

QUESTION = "the question is which of the answers is right"


@pytest.fixture(scope="module")
def roster(page_folder: Path, tiny_llama: Path, tiny_pool: Path) -> Roster:
    """What the page should say, without a page."""
    return Roster(base=str(tiny_llama), pool=str(tiny_pool), device="cpu", cache=None)


def said(model: Any, question: str = QUESTION) -> str:
    """A model's answer as the page asks for it."""
    asked = Request((Message("user", question),), LOCAL_MAX_TOKENS, temperature=0.0)
    text: str = model.generate([asked])[0].text
    return text


def said_plainly(model: Any) -> str:
    """A model's answer without chat template, as `ui_pages.run_folder`'s run was searched."""
    text: str = model.generate([Request(QUESTION, LOCAL_MAX_TOKENS, temperature=0.0)])[0].text
    return text.strip()


def ask(page: Any, question: str, answers: int = 1) -> Any:
    """Ask; gives the answers' cards once all are there."""
    before = page.locator(".chat-answers").count()
    field = page.get_by_label("Question")
    field.fill(question)
    field.press("Enter")
    cards = page.locator(".chat-answers").last.locator("> *")
    page.wait_for_function(
        "([sets, count]) => { const all = [...document.querySelectorAll('.chat-answers')];"
        " return all.length === sets && all.at(-1).children.length === count"
        " && !document.querySelector('.chat-answers .q-spinner:not(.hidden)'); }",
        arg=[before + 1, answers],
        timeout=60_000,
    )
    return cards


def anew(page: Any) -> None:
    """Begin a new conversation."""
    page.get_by_text("New conversation").click()
    page.locator(".chat-answers").first.wait_for(state="detached")


def choose(page: Any, *names: str) -> None:
    """Type names into the field of models."""
    field = page.get_by_role("combobox").first
    for name in names:
        field.fill(name)
        field.press("Enter")
        # The field sends all names it holds: one typed before the page answers replaces this one.
        page.locator(".q-chip", has_text=name).first.wait_for()
    field.press("Escape")


def text_of(card: Any) -> str:
    text: str = card.locator("[data-answer]").text_content().strip()
    return text


@pytest.mark.parametrize(("size", "scheme"), [("desk", "dark"), ("telephone", "light")])
def test_each_page_opens(browser: Any, page_url: str, size: str, scheme: str) -> None:
    with shown(browser, page_url, size, scheme) as page:
        for name in ("Talk", "Compare", "Models"):
            page.goto(f"{page_url}{name.lower()}")
            page.get_by_role("heading", name=name, exact=True).wait_for()
            fits(page, size)
        page.get_by_text("Endpoints:").click()
        page.get_by_text("FAKE_KEY is set").wait_for()
        page.get_by_text("NO_SUCH_KEY is not set").wait_for()
        page.get_by_text(
            "0.61 amber + 0.40 cedar - 0.23 birch + 0.22 dune; 0.500 on dev"
        ).wait_for()
        assert fake_models.KEY not in page.content()
        fits(page, size)


def test_a_chat_remembers_stops_and_shows_text_as_text(
    browser: Any, page_url: str, page_endpoint: endpoints.Endpoint
) -> None:
    page_endpoint.left.clear()
    with shown(browser, page_url) as page:
        page.goto(f"{page_url}talk?model=fake/one")
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("0.25")
        page.get_by_label("System").fill("Be brief.")
        page.get_by_label("System").blur()
        first = ask(page, HOSTILE)
        shown_text = HOSTILE.replace("**", "")  # Markdown, but no HTML
        assert text_of(first) == f"user: {shown_text} / system: Be brief."
        assert page.locator("#main img, #main script").count() == 0
        assert first.locator("strong").inner_text() == "bold"
        assert page_endpoint.asked[-1].body["temperature"] == 0.25
        second = ask(page, "again")
        expected = f"user: again / assistant: user: {shown_text} / system: Be brief. / user: "
        assert text_of(second).startswith(expected)
        assert page.locator("[aria-label='Answer again']:visible").count() == 1  # the last one's
        asked = len(page_endpoint.asked)
        second.get_by_label("Answer again").click()
        while len(page_endpoint.asked) == asked:  # another sample is not the cached one
            page.wait_for_timeout(50)
        second.get_by_text("Stages: 1 call").wait_for()
        assert text_of(second).startswith(expected)
        second.get_by_text("Stages: 1 call").click()
        second.get_by_text("1. fake/one").click()
        second.get_by_text("Be brief.", exact=True).wait_for()
        with page.expect_download() as coming:
            page.get_by_text("Download").click()
        kept = json.loads(Path(coming.value.path()).read_text())
        assert len(kept[1]["answers"]) == 2
        assert [one["question"] for one in kept] == [HOSTILE, "again"]
        assert kept[1]["answers"][0]["stages"][0][0]["prompt"][-1]["content"] == "again"
        anew(page)
        page.get_by_label("Question").fill("slow")
        page.get_by_label("Question").press("Enter")
        page.get_by_text("begun").wait_for()
        page.get_by_text("Stop", exact=True).click()
        page.get_by_text("stopped").wait_for()
        assert page_endpoint.left.wait(60)
        page.get_by_label("Answer again").click()
        page.get_by_text("Stop", exact=True).click()
        page.get_by_text("stopped").wait_for()
        assert text_of(ask(page, "anew")) == "user: anew / system: Be brief."


def test_the_best_of_a_run_is_asked_as_in_its_search(
    browser: Any, page_url: str, roster: Roster, page_folder: Path
) -> None:
    model = roster.model(f"local/{page_folder}/search/first")
    plain = said_plainly(model)
    with shown(browser, page_url) as page:
        page.goto(f"{page_url}talk?model=local/search/first")
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("0")
        assert text_of(ask(page, QUESTION).first) == plain
        anew(page)
        page.get_by_label("Prompt", exact=True).click()
        page.locator(".q-menu .q-item", has_text=re.compile("^chat$")).click()
        assert text_of(ask(page, QUESTION).first).strip() == said(model).strip()


def test_stages_errors_and_several_at_once(browser: Any, page_url: str) -> None:
    with shown(browser, page_url, "telephone") as page:
        page.goto(f"{page_url}talk?model=moa/two.yaml")
        choose(page, "consortium/jury.yaml", "keyless/x", "down/x", "local/nobody")
        cards = ask(page, "yes or no?", 5)
        both, jury, keyless, down, nobody = (cards.nth(n) for n in range(5))
        both.get_by_text("Stages: 3 calls").click()
        both.get_by_text("layer 1, proposer local/amber").wait_for()
        both.get_by_text("layer 2, aggregator fake/two").click()
        assert "user: yes or no?" in both.inner_text()
        assert text_of(jury).startswith("user: yes or no?")
        jury.get_by_text("Stages: 2 calls").wait_for()
        for card, words in ((keyless, "NO_SUCH_KEY"), (down, "127.0.0.1:9"), (nobody, "no such")):
            wrong = card.get_by_role("alert").inner_text()
            assert words in wrong and "\n" not in wrong, wrong
        fits(page, "telephone")


def test_sliders_change_the_answer(
    browser: Any, page_url: str, page_folder: Path, roster: Roster
) -> None:
    best = said_plainly(roster.model(f"local/{page_folder}/search/first"))
    base = said(roster.model("local/base"))
    uniform = said(roster.blend(dict.fromkeys(tiny.NAMES, 0.25)))
    assert len({best, uniform, base}) == 3
    with shown(browser, page_url) as page:
        page.goto(f"{page_url}models")
        assert text_of(ask(page, QUESTION)) == uniform.strip()
        anew(page)
        # The model is in memory; measured by the page, from the click to the first text.
        card = ask(page, QUESTION)
        seconds = re.search(r"first text after (\d+\.\d) s, ", card.inner_text())
        assert seconds and float(seconds[1]) < 2.0, card.inner_text()
        anew(page)
        page.get_by_label("Begin with").click()
        page.get_by_role("option", name="the best of first").click()
        page.wait_for_url("**/models?run=first")
        page.get_by_role("switch", name="Ask the base too").click()
        cards = ask(page, QUESTION, 2)
        assert [text_of(cards.nth(n)) for n in (0, 1)] == [best, base.strip()]
        page.get_by_label("Name").fill("mine")
        page.get_by_text("Save as adapter").click()
        page.get_by_role("link", name="local/mixtures/mine").wait_for()
        page.get_by_text("Save as adapter").click()
        page.get_by_text("already exists").wait_for()
        assert said_plainly(roster.model(f"local/{page_folder}/mixtures/mine")) == best
        slider = page.get_by_label("coefficient of dune")
        slider.scroll_into_view_if_needed()
        box = slider.bounding_box()
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] / 2, middle)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] + 50, middle, steps=3)
        page.mouse.up()
        page.get_by_text("sum 2.500").wait_for()
        page.get_by_role("spinbutton", name="amber").fill("-0.7")
        page.get_by_role("spinbutton", name="amber").press("Enter")
        page.get_by_text("sum 1.800").wait_for()
        anew(page)
        moved = {f"{page_folder}/search/first/global_best": 1.0, "amber": -0.7, "dune": 1.5}
        assert text_of(ask(page, QUESTION, 2).first) == said_plainly(roster.blend(moved))
        page.get_by_text("Sum to 1").click()
        page.get_by_text("sum 1.000").wait_for()


def test_a_mixture_is_scored_beside_its_neighbours(
    browser: Any, page_url: str, page_folder: Path
) -> None:
    many = str(choice_file(page_folder / "many.json", dev=4000, test=0))
    with shown(browser, page_url, "desk", "light") as page:
        page.goto(f"{page_url}models")
        page.get_by_text("All 0").click()
        page.get_by_role("spinbutton", name="amber").fill("0.7")
        page.get_by_role("spinbutton", name="amber").press("Enter")
        page.get_by_label("Task", exact=True).fill("mmlu")
        page.locator(".q-menu .q-item", has_text=re.compile("^mmlu$")).click()
        page.get_by_label("Further keys").fill(f"task.file={many} task.scoring=logits")
        page.get_by_label("Dev items").fill("4000")
        score = page.get_by_role("button", name="Score", exact=True)
        score.click()
        page.locator("[data-job]", has_text=re.compile("^[1-9]\\d* of \\d+ items")).wait_for()
        page.get_by_text("sum 0.700").wait_for()
        page.get_by_text("As it was", exact=True).click()  # the page answers while it scores
        page.get_by_text("sum 1.000").wait_for()
        page.get_by_role("button", name="Stop: Score").click()
        page.get_by_text(re.compile("stopped after \\d+ of \\d+ items")).wait_for()
        page.get_by_label("Dev items").fill("12")
        score.click()
        page.get_by_text("mixture: 0.25 amber + 0.25 birch + 0.25 cedar + 0.25 dune").wait_for()
        page.get_by_text("nearest expert: 1.00 amber").wait_for()
        assert page.get_by_text("uniform soup:").count() == 0  # it is the mixture
        for size in SIZES:
            page.set_viewport_size(SIZES[size])
            fits(page, size)
        page.get_by_label("Further keys").fill("task.scoring=x")
        score.click()
        page.get_by_role("alert").filter(has_text="scoring=x").wait_for()


def test_a_mixture_by_hand_is_what_a_run_has_saved(
    roster: Roster, page_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = [QUESTION, "yes or no", fake_models.ODD]
    best = roster.model(f"local/{page_folder}/search/first")
    said(best)
    monkeypatch.setattr(BaseModel, "load", lambda *_: pytest.fail("the base is loaded again"))
    mixed = roster.blend(dict(zip(tiny.NAMES, ui_pages.BEST, strict=True)))
    assert [said(mixed, one) for one in questions] == [said(best, one) for one in questions]
    assert said(roster.blend({"amber": 1.0})) == said(roster.model("local/amber"))
    assert said(roster.blend({"amber": 0.0})) == said(roster.model("local/base"))
    assert mixed.fingerprint() != roster.blend({"amber": 1.0}).fingerprint()  # type: ignore[attr-defined]
    for share in (float("nan"), True, "1"):
        with pytest.raises(UserError, match=r"amber: .* not a coefficient"):
            roster.blend({"amber": share})  # type: ignore[dict-item]
    with pytest.raises(UserError, match="no such model"):
        roster.blend({"nobody": 1.0})


def test_compare(browser: Any, page_url: str) -> None:
    with shown(browser, page_url, "telephone") as page:
        page.goto(f"{page_url}compare")
        start = page.get_by_role("button", name="Compare", exact=True)
        question = page.get_by_role("textbox", name="Question")
        start.click()
        page.get_by_text("choose at least one").wait_for()
        choose(page, "fake/one", "fake/two")
        question.fill("slow")
        start.click()
        page.get_by_text("0 of 20 answers").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("stopped; answers so far are stored").wait_for()
        page.goto(f"{page_url}compare")
        choose(page, "fake/one", "local/amber")
        question.fill("yes or no?")
        page.get_by_label("Maximum new tokens").fill("2")
        page.get_by_label("Samples per model").fill("3")
        start.click()
        page.get_by_role("img", name="Shares of the answers").locator("svg").wait_for()
        page.get_by_text("Numbers").click()
        page.get_by_text("user: yes or no?", exact=True).first.wait_for()
        page.get_by_text("6 rows; 0 refused").wait_for()
        fits(page, "telephone")
        # By its address: the chart above may still grow, and a click then lands beside the link.
        page.goto(page.get_by_role("link", name="Browse the answers").evaluate("one => one.href"))
        page.locator(".answer").wait_for()
        assert page.locator(".answer").inner_text() == "user: yes or no?"
