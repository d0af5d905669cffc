"""The page's runs: their table, one of them, several side by side, and the form that starts one."""

import json
import re
import shutil
import socket
import urllib.request
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run_folders
import ui_pages
from headless_browser import SIZES
from run_folders import write_state
from ui_pages import window

from swarm.runs.folder import read_state
from swarm.runs.lock import running_info


def settled(page: Any, state: str) -> None:
    """Wait until a run's page tells this state."""
    page.wait_for_function(
        "state => document.querySelector('[data-state]')?.textContent.trim() === state",
        arg=state,
    )


def test_each_page_opens(browser: Any, page_url: str) -> None:
    pages = {
        "": ", p = ",
        "start": "python -m swarm.search",
        "runs/made": "Best found:",
        "runs/nothing": "no such run",
        "runs/a%3Cscript%3Ealert(1)%3C": "<img src=x onerror=alert(1)>",
        "runs/sweep%2Ftrial_00": "Best found:",
        "runs/sweep%2Ftrial_00/report": "Start and end",
        "runs/broken": "is damaged or missing",
        "runs/made/report": "Start and end",
    }
    papers = {"dark": "rgb(20, 23, 27)", "light": "rgb(252, 252, 251)"}
    with window(browser, page_url, "telephone", "dark") as page:
        for path, words in pages.items():
            page.set_viewport_size(SIZES["telephone"])
            page.emulate_media(color_scheme="dark")
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


def test_runs_are_filtered_and_sorted(browser: Any, page_url: str) -> None:
    with window(browser, page_url) as page:
        names = page.locator("tbody tr a")
        page.wait_for_function("document.querySelectorAll('tbody tr a').length >= 4")
        page.get_by_label("Filter").fill("real")
        page.wait_for_function("document.querySelectorAll('tbody tr a').length === 2")
        page.locator("th", has_text="Run").click()
        page.wait_for_function("document.querySelector('tbody tr a').innerText === 'real_1'")
        assert [one.strip() for one in names.all_inner_texts()] == ["real_1", "real_2"]


def choose(page: Any, label: str, option: str) -> None:
    """Choose an option of a field of the form."""
    page.get_by_label(label, exact=True).click()
    if label == "Task":
        page.get_by_label(label, exact=True).fill(option)
    page.locator(".q-menu .q-item", has_text=re.compile(f"^{option}$")).click()


@pytest.mark.parametrize(("size", "scheme"), [("desk", "light"), ("telephone", "dark")])
def test_the_form_shows_defaults_and_the_cost(
    browser: Any, page_url: str, page_folder: Path, size: str, scheme: str
) -> None:
    with window(browser, page_url, size, scheme) as page:
        page.goto(f"{page_url}start")
        assert page.get_by_label("Seed", exact=True).input_value() == ""
        assert page.get_by_label("Pool folder").input_value() == page_pool(page)
        choose(page, "Task", "mmlu")
        page.get_by_label("Further keys, one key=value per line").fill("task.scoring=logits")
        page.get_by_label("Task file").fill("tiny.json")
        page.get_by_label("Seed", exact=True).fill("7")
        page.get_by_text("task.file=tiny.json").filter(has_text="seed=7").wait_for()
        page.locator("[data-cost]", has_text="dry run: ").wait_for()
        page.get_by_text("What it would do").click()
        page.locator("[data-plan]", has_text="nothing is started").wait_for()
        with page.context.expect_page() as opened:
            page.get_by_role("button", name="Inspect").click()
        pool = opened.value
        pool.get_by_text("A search takes this folder as it is: 4 experts.").wait_for()
        pool.get_by_text("down_proj x2").first.wait_for()
        pool.get_by_role("img", name="Cosines of the updates").locator("canvas").first.wait_for()
        ui_pages.fits(pool, size)
        pool.get_by_label("Pool folder").fill("no/such")
        pool.get_by_role("button", name="Inspect").click()
        pool.get_by_text("no such folder").wait_for()
        pool.close()
        page.get_by_label("Pool folder").fill("no/such/pool")
        page.get_by_role("alert").filter(has_text="no/such/pool").wait_for()
        ui_pages.fits(page, size)
        page.get_by_label("GPUs", exact=True).fill("all")
        page.get_by_role("alert").filter(has_text="not a list of numbers").wait_for()


def page_pool(page: Any) -> str:
    """The pool in the command that the form shows."""
    command = page.get_by_text("python -m swarm.search").inner_text()
    found = re.search(r"pool\.folder=(\S+)", command)
    assert found is not None, command
    return found[1]


def fill(page: Any, name: str, keys: str, **numbers: int) -> None:
    """Fill in the form for a search on the tiny model."""
    choose(page, "Task", "mmlu")
    for label, number in numbers.items():
        page.get_by_label(label, exact=True).fill(str(number))
    lines = page.get_by_label("Further keys, one key=value per line")
    lines.fill(lines.input_value() + f"\ntask.file=tiny.json\ntask.scoring=logits\n{keys}")
    page.get_by_label("Name", exact=True).fill(name)


def test_a_search_from_the_form_ends(browser: Any, page_url: str, page_folder: Path) -> None:
    with window(browser, page_url) as page:
        page.goto(page_url + "start")
        fill(
            page,
            "formed",
            "ensemble=2\nnoise_floor=false\noptimizer.inertia=x",
            Iterations=2,
            Particles=5,
        )
        page.get_by_text("optimizer.particles=5").wait_for()
        page.get_by_role("button", name="Start", exact=True).click()
        alert = page.get_by_role("alert").filter(has_text="optimizer.inertia")
        alert.wait_for()
        assert page.url.endswith("/start") and not (page_folder / "search" / "formed").exists()
        lines = page.get_by_label("Further keys, one key=value per line")
        lines.fill(lines.input_value().replace("\noptimizer.inertia=x", ""))
        page.get_by_role("button", name="Start", exact=True).click()
        page.wait_for_url("**/runs/formed")
        settled(page, "finished")
        page.get_by_text("Best found:").first.wait_for()
        page.locator("table", has_text="best initial expert (").first.wait_for()
        assert "name=formed" in page.get_by_text("python -m swarm.search").inner_text()
        link = page.get_by_role("button", name="Chat with the best")
        assert link.is_visible() and not page.get_by_role("button", name="Resume").is_visible()
        page.goto(page_url + "start")
        page.get_by_label("Name", exact=True).fill("formed")
        page.get_by_role("alert").filter(has_text="the run formed already exists").wait_for()


def test_stop_and_resume(browser: Any, page_url: str, page_folder: Path) -> None:
    run = page_folder / "search" / "long"
    with window(browser, page_url) as page:
        page.goto(page_url + "start")
        fill(page, "long", "optimizer.patience=5000", Iterations=5000, Particles=6)
        page.get_by_role("button", name="Start", exact=True).click()
        page.wait_for_url("**/runs/long")
        settled(page, "running")
        page.get_by_text(
            re.compile("iteration ([2-9]|[1-9][0-9]+) of at most 5000")
        ).first.wait_for()
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
            "done => Number(/after iteration (\\d+)|iteration (\\d+) of/.exec("
            "document.body.innerText)?.[2]) > done",
            arg=done,
        )
        page.get_by_role("button", name="Stop").click()
        settled(page, "stopped")
    assert len((read_state(run) or {})["rounds"]) > done


def asked(url: str, path: str = "/", **headers: str) -> int:
    """The status that a request with these headers gets."""
    connection = HTTPConnection(url.split("/")[2], timeout=60)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.putrequest("GET", path, skip_host="Host" in named)
    for name, value in named.items():
        connection.putheader(name, value)
    connection.endheaders()
    return connection.getresponse().status


def cookies(url: ui_pages.Page) -> dict[str, str]:
    """The header of a browser that has opened the address."""
    connection = HTTPConnection(url.split("/")[2], timeout=60)
    connection.request("GET", f"/runs/made?token={url.token}&x=1")
    reply = connection.getresponse()
    cookie = reply.getheader("set-cookie", "")
    assert (reply.status, reply.getheader("location")) == (303, "/runs/made?x=1")
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    return {"Cookie": f"other=1; {cookie.partition(';')[0]}"}


def test_a_token_is_asked_for_on_pages_reports_and_the_websocket(page_url: ui_pages.Page) -> None:
    socket = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    polling = "/_nicegui_ws/socket.io/?EIO=4&transport=polling"
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec_WebSocket_Version": "13",
        "Sec_WebSocket_Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    name = cookies(page_url)["Cookie"].split("; ")[1].partition("=")[0]
    assert name == f"model_swarms_{page_url.split(':')[2].strip('/')}"
    wrong: list[dict[str, str]] = [
        {},
        {"Authorization": "Bearer x"},
        {"Authorization": str(page_url.token)},
        {"Cookie": f"{name}=x"},
        {"Cookie": f"model_swarms_1={page_url.token}"},
    ]
    right = [cookies(page_url), {"Authorization": f"Bearer {page_url.token}"}]
    paths: list[tuple[str, dict[str, str], int]] = [
        ("/", {}, 200),
        ("/start", {}, 200),
        ("/runs/made/report", {}, 200),
        (polling, {}, 200),
        (socket, upgrade, 101),
    ]
    for path, more, good in paths:
        assert [asked(page_url, path, **more, **one) for one in wrong] == [403] * len(wrong), path
        assert [asked(page_url, path, **more, **one) for one in right] == [good] * 2, path
        assert asked(page_url, f"{path}{'&' if '?' in path else '?'}token=x", **more) == 403
    assert asked(page_url, f"{socket}&token={page_url.token}", **upgrade) == 101
    # What leads away from here is not led to.
    connection = HTTPConnection(page_url.split("/")[2], timeout=60)
    connection.request("GET", f"//example.org/?token={page_url.token}")
    assert connection.getresponse().getheader("location") == "/example.org/"


def test_a_browser_without_the_token_sees_nothing(browser: Any, page_url: ui_pages.Page) -> None:
    context = browser.new_context()
    page = context.new_page()
    reply = page.goto(f"{page_url}start")
    assert reply.status == 403 and "a token is needed" in page.content()
    assert str(page_url.token) not in page.content()
    page.goto(f"{page_url}start?token={page_url.token}")
    page.get_by_role("button", name="Start", exact=True).wait_for()
    assert page.url == f"{page_url}start"
    assert page.evaluate("document.cookie") == ""
    context.close()


def test_without_a_token_that_is_said(tmp_path: Path) -> None:
    with ui_pages.served(tmp_path, "--no-token") as open_to_all:
        assert open_to_all.token is None and asked(open_to_all) == 200
        assert asked(open_to_all, Origin="http://example.org") == 403
    with ui_pages.served(tmp_path) as one, ui_pages.served(tmp_path) as two:
        assert one.token != two.token and len(str(one.token)) == 48
        assert asked(one) == asked(two) == 403


def test_a_page_that_is_left_while_it_loads_is_no_error(tmp_path: Path) -> None:
    """`served` checks that nothing but "stopped" is on standard error."""
    path = "/_nicegui_ws/socket.io/?EIO=4&transport=polling"
    with ui_pages.served(tmp_path, "--no-token") as url:
        host = url.removeprefix("http://").rstrip("/")
        address, _, port = host.partition(":")
        for _ in range(8):
            with urllib.request.urlopen(f"{url.rstrip('/')}{path}") as reply:
                session = json.loads(reply.read().decode().lstrip("0"))["sid"]
            with socket.create_connection((address, int(port))) as left:
                lines = f"POST {path}&sid={session} HTTP/1.1\r\nHost: {host}\r\n"
                left.sendall(f"{lines}Content-Length: 100\r\n\r\n".encode())
        assert asked(url) == 200


def test_others_are_kept_out(page_url: ui_pages.Page) -> None:
    here = page_url.split("/")[2]
    websocket = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec_WebSocket_Version": "13",
        "Sec_WebSocket_Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    bearer = {"Authorization": f"Bearer {page_url.token}"}
    for path, more, good in (("/", bearer, 200), (websocket, bearer | upgrade, 101)):
        assert asked(page_url, path, **more) == good
        assert asked(page_url, path, **more, Origin=f"http://{here}") == good
        assert asked(page_url, path, **more, Origin="http://example.org") == 403
        assert asked(page_url, path, **more, Origin="null") == 403
        assert asked(page_url, path, **more, Host="example.org") == 403


@pytest.mark.parametrize("path", ["/runs/..%2F..%2Fetc", "/runs/%2e%2e/report", "/runs/.page"])
def test_a_name_is_a_folder_of_runs(page_url: ui_pages.Page, path: str) -> None:
    connection = HTTPConnection(page_url.split("/")[2], timeout=60)
    connection.request("GET", path, headers={"Authorization": f"Bearer {page_url.token}"})
    reply = connection.getresponse()
    assert reply.status == 404 or "is not a run name" in reply.read().decode()


def test_a_broken_run_has_no_report(page_url: ui_pages.Page) -> None:
    connection = HTTPConnection(page_url.split("/")[2], timeout=60)
    bearer = {"Authorization": f"Bearer {page_url.token}"}
    connection.request("GET", "/runs/broken/report", headers=bearer)
    reply = connection.getresponse()
    assert reply.status == 404
    assert re.fullmatch(".*broken/.* is damaged or missing; .*\n", reply.read().decode())


def test_a_run_with_several_objectives_shows_its_front(
    browser: Any, page_url: str, page_folder: Path
) -> None:
    folder = run_folders.folder(page_folder / "search" / "several", parts=("one", "two"))
    state = read_state(folder)
    draw = np.random.default_rng(0)
    for entry in state["rounds"]:
        entry["objectives"] = draw.random((len(entry["positions"]), 2)).round(3).tolist()
    write_state(folder, {**state, "objectives": {"one": 15, "two": 15}})
    try:
        with window(browser, page_url) as page:
            page.goto(f"{page_url}runs/several")
            page.wait_for_function(
                "words => document.body.innerText.includes(words)", arg="two, dev, n = 15"
            )
            chart = page.locator("[aria-label='Front of the objectives'] canvas")
            assert chart.bounding_box()["width"] > 100
            ui_pages.fits(page, "desk")
            page.goto(f"{page_url}runs/made")
            page.wait_for_selector("canvas")
            assert not page.get_by_text("Points of the front").is_visible()
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(("size", "scheme"), [("desk", "light"), ("telephone", "dark")])
def test_charts_items_and_zoom_of_a_run(
    browser: Any, page_url: str, size: str, scheme: str
) -> None:
    with window(browser, page_url, size, scheme) as page:
        page.goto(f"{page_url}runs/made")
        for title in ("Best so far, and every particle", "Coefficients of the best so far"):
            chart = page.get_by_role("img", name=title)
            chart.locator("canvas").wait_for()
            assert chart.bounding_box()["width"] > 250
            chart.scroll_into_view_if_needed()
            chart.hover()  # the tooltip's formatters run; an error fails the window
        ui_pages.fits(page, size)
        assert not page.get_by_role("img", name="Coefficients of the best by module").is_visible()
        page.locator("[aria-label^='Details of iteration']").first.click()
        dialog = page.locator(".q-dialog")
        dialog.get_by_text("Items, the lowest values first").click()
        dialog.get_by_text("answer").first.wait_for()
        ui_pages.fits(page, size)
        dialog.get_by_role("button", name="Close").click()
        text = page.request.get(f"{page_url}runs/made/positions.csv").text()
        assert len(text.splitlines()) == 1 + 20 * 10
        page.get_by_label("Best found compared with").click()
        page.get_by_role("option").last.click()
        page.get_by_text("dev items, on which the best found was chosen").wait_for()
        zoomed = """() => {
          const host = document.querySelector('[aria-label^="Best so far"]');
          const chart = getElement(Number(host.id.slice(1))).chart;
          chart.dispatchAction({type: 'dataZoom', start: 50, end: 100});
          return chart.getOption().dataZoom[0].start;
        }"""
        assert page.evaluate(zoomed) == 50
        item = page.locator("details.flip").first
        item.locator("summary").focus()
        page.keyboard.press("Enter")
        assert item.locator("pre").first.is_visible()


def test_an_unknown_address_has_a_page_and_keys_reach_the_controls(
    browser: Any, page_url: ui_pages.Page
) -> None:
    with window(browser, page_url) as page:
        names = page.locator("tbody tr a")
        names.first.wait_for()
        reached: list[str] = []
        for _ in range(40):
            page.keyboard.press("Tab")
            reached.append(
                page.evaluate(
                    "(document.activeElement.ariaLabel || document.activeElement.innerText || '')"
                    ".trim()"
                )
            )
        assert reached[0] == "Skip to the page"
        for wanted in ("Runs", "Start", "Light or dark", "Filter"):
            assert wanted in reached, (wanted, reached)
        assert any("Start a search" in one for one in reached)
        assert any(one in names.all_inner_texts() for one in reached)
    bearer = {"Authorization": f"Bearer {page_url.token}"}
    assert asked(page_url, "/nothing/here", **bearer) == 404
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


@pytest.mark.parametrize(("size", "scheme"), [("desk", "dark"), ("telephone", "light")])
def test_runs_are_grouped_and_deleted(
    browser: Any, page_url: str, page_folder: Path, size: str, scheme: str
) -> None:
    run = run_folders.folder(page_folder / "search" / f"doomed_{size}", particles=2, iterations=1)
    with window(browser, page_url, size, scheme) as page:

        def choose_row(words: str) -> Any:
            row = page.locator("tbody tr", has_text=words)
            row.locator(".q-checkbox").click()
            return row

        page.get_by_label("Filter").fill("sweep")
        page.get_by_role("button", name="sweep (1 trial)").wait_for()
        page.get_by_role("link", name="sweep/trial_00").wait_for()
        group = page.locator("tbody tr", has_text="sweep (1 trial)").locator(".q-checkbox")
        group.click()
        page.locator("tbody tr.selected").first.wait_for()
        assert page.locator("#main").get_by_role("button", name="Delete").is_disabled()
        group.click()
        page.get_by_label("Filter").fill(run.name)
        row = choose_row(run.name)
        page.locator("#main").get_by_role("button", name="Delete").click()
        warning = page.get_by_text("This cannot be undone.")
        warning.wait_for()
        page.get_by_role("button", name="Cancel").click()
        warning.wait_for(state="detached")
        assert run.is_dir()
        page.locator("#main").get_by_role("button", name="Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        row.wait_for(state="detached")
        assert not run.exists()
