"""The page's runs: their table, one of them, the form that starts one, and who may open them."""

import json
import re
import socket
import urllib.request
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
import run_folders
import ui_pages
from headless_browser import SIZES
from ui_pages import window

from swarm.runs.folder import read_state
from swarm.runs.lock import running_info

SCREENS = pytest.mark.parametrize(("size", "scheme"), [("desk", "light"), ("telephone", "dark")])


def settled(page: Any, state: str) -> None:
    """Wait until a run's page tells this state."""
    page.wait_for_function(
        "state => document.querySelector('[data-state]')?.textContent.trim() === state",
        arg=state,
    )


def test_each_page_opens(browser: Any, page_url: str) -> None:
    pages = {
        "": ", p = ",
        "start": "Reproduce the paper",
        "runs/made": "more than the best",
        "runs/nothing": "no such run",
        "runs/a%3Cscript%3Ealert(1)%3C": "a<script>alert(1)<",
        "runs/sweep%2Ftrial_00": "more than the best",
        "runs/sweep%2Ftrial_00/report": "All models",
        "runs/broken": "is damaged or missing",
        "runs/made/report": "All models",
    }
    papers = {"dark": "rgb(20, 23, 27)", "light": "rgb(252, 252, 251)"}
    with window(browser, page_url, "telephone", "dark") as page:
        for path, words in pages.items():
            page.goto(page_url + path)
            page.wait_for_function("words => document.body.innerText.includes(words)", arg=words)
            if path == "runs/made":
                page.wait_for_selector("canvas")
            for size, scheme in (("telephone", "dark"), ("desk", "light")):
                page.set_viewport_size(SIZES[size])
                page.emulate_media(color_scheme=scheme)
                ui_pages.fits(page, size)
                if not path.endswith("report"):
                    page.wait_for_function(
                        "paper => getComputedStyle(document.body).backgroundColor === paper",
                        arg=papers[scheme],
                    )
        page.goto(page_url)
        page.get_by_label("Light or dark").click()
        page.wait_for_selector("body.body--dark")
        page.goto(page_url + "start")
        page.wait_for_selector("body.body--dark")


@SCREENS
def test_the_form_shows_the_cost_and_takes_a_file(
    browser: Any, page_url: str, page_folder: Path, size: str, scheme: str
) -> None:
    with window(browser, page_url, size, scheme) as page:
        page.goto(f"{page_url}start")  # the page was started with adapters of its own
        page.get_by_text("Drop a file, or type its path.").wait_for()
        assert page.get_by_role("button", name="Start", exact=True).is_disabled()
        page.get_by_role("button", name="Reproduce the paper").click()
        page.get_by_text("experiment=paper").wait_for()
        page.get_by_role("button", name="My adapters and my file").press("Enter")
        rows = "".join(f"{n} + 1,{n + 1}\n" for n in range(40))
        file = {"name": "sums.csv", "mimeType": "text/csv"}
        content = f"question,answer\n{rows}".encode()
        page.locator("input[type=file]").set_input_files([{**file, "buffer": content}])
        page.get_by_text(re.compile("task=uploads/.*/sums.csv .*name=sums")).wait_for()
        page.locator("[data-cost]", has_text="The search takes at most").wait_for()
        page.get_by_text("What it would do").click()
        page.locator("[data-plan]", has_text="question -> answer").wait_for()
        with page.context.expect_page() as opened:
            page.get_by_role("button", name="Inspect").click()
        pool = opened.value
        pool.get_by_text("A search takes this folder as it is: 4 adapters.").wait_for()
        pool.get_by_text("down_proj x2").first.wait_for()
        pool.get_by_role("heading", name="Cosines of the updates").wait_for()
        ui_pages.fits(pool, size)
        pool.get_by_label("Pool folder").fill("no/such")
        pool.get_by_role("button", name="Inspect").click()
        pool.get_by_text("no such folder").wait_for()
        pool.close()
        page.get_by_label("Adapters").fill("no/such/pool")
        page.get_by_role("alert").filter(has_text="no/such/pool").wait_for()
        ui_pages.fits(page, size)


def start(page: Any, name: str, keys: str, **numbers: int) -> None:
    """Fill in the form for a search on the tiny model, and start it."""
    page.goto(f"{page.url.split('?')[0].rsplit('/', 1)[0]}/start")
    page.get_by_label("File of questions and answers").fill("mmlu")
    page.get_by_text("More", exact=True).click()
    for label, number in numbers.items():
        page.get_by_label(label, exact=True).fill(str(number))
    lines = page.get_by_label("Further keys, one key=value per line")
    lines.fill(f"task.file=tiny.json\ntask.scoring=logits\n{keys}")
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_text(f"name={name}").wait_for()
    page.get_by_role("button", name="Start", exact=True).click()


def test_a_search_from_the_form_ends(browser: Any, page_url: str, page_folder: Path) -> None:
    keys = "ensemble=2\nnoise_floor=false\noptimizer.inertia=x"
    with window(browser, page_url) as page:
        start(page, "formed", keys, **{"Rounds": 2, "Mixtures in a round": 5})
        page.get_by_role("alert").filter(has_text="optimizer.inertia").wait_for()
        assert page.url.endswith("/start") and not (page_folder / "search" / "formed").exists()
        lines = page.get_by_label("Further keys, one key=value per line")
        lines.fill(lines.input_value().replace("\noptimizer.inertia=x", ""))
        page.get_by_role("button", name="Start", exact=True).click()
        page.wait_for_url("**/runs/formed")
        settled(page, "finished")
        page.locator("[data-number]", has_text=" points").wait_for()
        page.get_by_text("All numbers and charts").click()
        page.locator("table", has_text="best expert (").first.wait_for()
        page.get_by_role("tab", name="Log").click()
        page.get_by_text("name=formed").wait_for()
        link = page.get_by_role("button", name="Chat with the best")
        assert link.is_visible() and not page.get_by_role("button", name="Resume").is_visible()
        page.goto(page_url + "start")
        page.get_by_label("File of questions and answers").fill("mmlu")
        page.get_by_text("More", exact=True).click()
        page.get_by_label("Name", exact=True).fill("formed")
        page.get_by_role("alert").filter(has_text="the run formed already exists").wait_for()


def test_stop_and_resume(browser: Any, page_url: str, page_folder: Path) -> None:
    run = page_folder / "search" / "long"
    with window(browser, page_url) as page:
        start(page, "long", "optimizer.patience=5000", Rounds=5000)
        page.wait_for_url("**/runs/long")
        settled(page, "running")
        page.get_by_text(re.compile("round ([2-9]|[1-9][0-9]+) of at most 5000")).first.wait_for()
        page.evaluate(
            """() => { window.states = []; new MutationObserver(() => {
                const now = document.querySelector('[data-state]').textContent.trim();
                if (now !== window.states.at(-1)) window.states.push(now);
            }).observe(document.body, {subtree: true, childList: true, characterData: true}); }"""
        )
        page.get_by_role("button", name="Stop").click()
        settled(page, "stopped")
        states = page.evaluate("window.states")
        assert [one for one in states if one != "running"] == ["stopping", "stopped"]
        done = len((read_state(run) or {})["rounds"])
        assert running_info(run) is None and done > 1
        page.get_by_role("button", name="Resume").click()
        settled(page, "running")
        page.wait_for_function(
            "done => Number(/after round (\\d+)|round (\\d+) of/.exec("
            "document.body.innerText)?.[2]) > done",
            arg=done,
        )
        page.get_by_role("button", name="Stop").click()
        settled(page, "stopped")
    assert len((read_state(run) or {})["rounds"]) > done


SOCKET = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
POLLING = "/_nicegui_ws/socket.io/?EIO=4&transport=polling"
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec_WebSocket_Version": "13",
    "Sec_WebSocket_Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}


def reply_to(url: str, path: str = "/", **headers: str) -> HTTPResponse:
    """The reply to a request with these headers."""
    connection = HTTPConnection(url.split("/")[2], timeout=60)
    connection.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    return connection.getresponse()


def asked(url: str, path: str = "/", **headers: str) -> int:
    return reply_to(url, path, **headers).status


def test_a_token_is_asked_for_on_pages_reports_and_the_websocket(page_url: ui_pages.Page) -> None:
    reply = reply_to(page_url, f"/runs/made?token={page_url.token}&x=1")
    cookie = reply.getheader("set-cookie", "")
    assert (reply.status, reply.getheader("location")) == (303, "/runs/made?x=1")
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    name, _, value = cookie.partition(";")[0].partition("=")
    assert (name, value) == (f"model_swarms_{page_url.split(':')[2].strip('/')}", page_url.token)
    wrong: list[dict[str, str]] = [
        {},
        {"Authorization": "Bearer x"},
        {"Authorization": value},
        {"Cookie": f"{name}=x"},
        {"Cookie": f"model_swarms_1={value}"},
    ]
    bearer = {"Authorization": f"Bearer {value}"}
    right = [{"Cookie": f"other=1; {name}={value}"}, bearer]
    paths: list[tuple[str, dict[str, str], int]] = [
        ("/", {}, 200),
        ("/start", {}, 200),
        ("/runs/made/report", {}, 200),
        (POLLING, {}, 200),
        (SOCKET, UPGRADE, 101),
    ]
    for path, more, good in paths:
        assert [asked(page_url, path, **more, **one) for one in wrong] == [403] * len(wrong), path
        assert [asked(page_url, path, **more, **one) for one in right] == [good] * 2, path
        assert asked(page_url, f"{path}{'&' if '?' in path else '?'}token=x", **more) == 403
        # Pages of other sites, and names of this machine that are not its own.
        known = more | bearer
        assert asked(page_url, path, **known, Origin=f"http://{page_url.split('/')[2]}") == good
        for odd in ({"Origin": "http://example.org"}, {"Origin": "null"}, {"Host": "example.org"}):
            assert asked(page_url, path, **known, **odd) == 403, (path, odd)
    assert asked(page_url, f"{SOCKET}&token={value}", **UPGRADE) == 101
    # What leads away from here is not led to.
    reply = reply_to(page_url, f"//example.org/?token={value}")
    assert reply.getheader("location") == "/example.org/"
    reply = reply_to(page_url, "/runs/broken/report", **bearer)
    assert reply.status == 404
    assert re.fullmatch(".*broken/.* is damaged or missing; .*\n", reply.read().decode())
    for path in ("/runs/..%2F..%2Fetc", "/runs/%2e%2e/report", "/runs/.page"):
        reply = reply_to(page_url, path, **bearer)
        assert reply.status == 404 or "is not a run name" in reply.read().decode()


def test_without_a_token_and_left_while_it_loads(tmp_path: Path) -> None:
    """`served` checks that nothing but "stopped" is on standard error."""
    with ui_pages.served(tmp_path, "--no-token") as url:
        assert url.token is None and asked(url) == 200
        assert asked(url, Origin="http://example.org") == 403
        host = url.removeprefix("http://").rstrip("/")
        for _ in range(8):
            with urllib.request.urlopen(f"{url.rstrip('/')}{POLLING}") as reply:
                session = json.loads(reply.read().decode().lstrip("0"))["sid"]
            with socket.create_connection(tuple(host.split(":"))) as left:  # type: ignore[arg-type]
                lines = f"POST {POLLING}&sid={session} HTTP/1.1\r\nHost: {host}\r\n"
                left.sendall(f"{lines}Content-Length: 100\r\n\r\n".encode())
        assert asked(url) == 200
    with ui_pages.served(tmp_path) as other:
        assert len(str(other.token)) == 48 and asked(other) == 403


@SCREENS
def test_tabs_of_a_run(browser: Any, page_url: str, size: str, scheme: str) -> None:
    with window(browser, page_url, size, scheme) as page:
        page.goto(f"{page_url}runs/made")
        page.get_by_text("All numbers and charts").click()
        for title in ("Best so far", "All 20 mixtures of each round"):
            chart = page.get_by_role("img", name=title, exact=True)
            chart.locator("canvas").wait_for()
            assert chart.bounding_box()["width"] > 250
            chart.scroll_into_view_if_needed()
            chart.hover()  # the tooltip's formatters run; an error fails the window
        ui_pages.fits(page, size)
        page.get_by_role("tab", name="Mixtures").click()
        page.locator("[aria-label^='Details of round']").first.click()
        dialog = page.locator(".q-dialog")
        dialog.get_by_text("Items, the lowest values first").click()
        dialog.get_by_text("answer").first.wait_for()
        ui_pages.fits(page, size)
        dialog.get_by_role("button", name="Close").click()
        text = page.request.get(f"{page_url}runs/made/positions.csv").text()
        assert len(text.splitlines()) == 1 + 20 * 10
        ui_pages.fits(page, size)
        page.get_by_role("tab", name="Items").click()
        page.get_by_label("Best found compared with").click()
        page.get_by_role("option").last.click()
        page.get_by_text("dev items, on which the best found was chosen").wait_for()
        item = page.locator("details.flip").first
        item.locator("summary").focus()
        page.keyboard.press("Enter")
        assert item.locator("pre").first.is_visible()
        page.goto(f"{page_url}runs/a%3Cscript%3Ealert(1)%3C")
        page.get_by_role("tab", name="Log").click()
        page.get_by_text("<img src=x onerror=alert(1)>").first.wait_for()


def test_an_unknown_address_has_a_page_and_keys_reach_the_controls(
    browser: Any, page_url: ui_pages.Page
) -> None:
    with window(browser, page_url, "telephone") as page:
        page.locator("tbody tr a").first.wait_for()
        reached: list[str] = []
        for _ in range(12):
            page.keyboard.press("Tab")
            name = "(document.activeElement.ariaLabel || document.activeElement.innerText || '')"
            reached.append(page.evaluate(f"{name}.trim()"))
        assert reached[0] == "Skip to the page"
        assert {"Light or dark", "Menu", "Filter"} < set(reached), reached
        assert any("Start a search" in one for one in reached)
    assert asked(page_url, "/nothing/here", Authorization=f"Bearer {page_url.token}") == 404
    context = browser.new_context(viewport=SIZES["telephone"])
    page = context.new_page()
    page.goto(f"{page_url}start?token={page_url.token}")
    assert page.goto(f"{page_url}nothing/here").status == 404
    page.get_by_text("There is no page at /nothing/here.").wait_for()
    ui_pages.fits(page, "telephone")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.locator("#main").get_by_role("link", name="Runs").click()
    page.wait_for_url(page_url)
    context.close()


@SCREENS
def test_runs_are_filtered_sorted_grouped_and_deleted(
    browser: Any, page_url: str, page_folder: Path, size: str, scheme: str
) -> None:
    run = run_folders.folder(page_folder / "search" / f"doomed_{size}", particles=2, iterations=1)
    with window(browser, page_url, size, scheme) as page:
        delete = page.locator("#main").get_by_role("button", name="Delete")

        def select(words: str) -> None:
            page.locator("tbody tr", has_text=words).locator(".q-checkbox").click()

        page.get_by_label("Filter").fill("real")
        page.wait_for_function("document.querySelectorAll('tbody tr a').length === 2")
        page.locator("th", has_text="Run").click()
        page.wait_for_function("document.querySelector('tbody tr a').innerText === 'real_1'")
        page.get_by_label("Filter").fill("sweep")
        page.get_by_role("button", name="sweep (1 trial)").wait_for()
        page.get_by_role("link", name="sweep/trial_00").wait_for()
        select("sweep (1 trial)")
        page.locator("tbody tr.selected").first.wait_for()
        assert delete.is_disabled()
        select("sweep (1 trial)")
        page.get_by_label("Filter").fill(run.name)
        select(run.name)
        delete.click()
        warning = page.get_by_text("This cannot be undone.")
        warning.wait_for()
        page.get_by_role("button", name="Cancel").click()
        warning.wait_for(state="detached")
        assert run.is_dir()
        delete.click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        page.locator("tbody tr", has_text=run.name).wait_for(state="detached")
        assert not run.exists()
