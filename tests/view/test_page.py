"""The page in a headless Chromium: Debian's, driven by Playwright. Both are looked for, and the tests skip without."""

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runs.golden import Golden
from tests.runs.loops import Text
from tests.view.hostile import KINDS, PAYLOADS, write_hostile
from tests.view.planted import Row, control_config, healthy, record_step, text_config, write_text
from tether.metrics.loggers.jsonl import JsonlLogger
from tether.metrics.loggers.protocol import RunInfo
from tether.metrics.records import RECORDS_FILE, RecordFile, heads, pack, read_record, unpack
from tether.view.export import write_page
from tether.view.queries import group, groups, prompt_history
from tether.view.run import RunFolder, find_runs
from tether.view.server import make_app

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
uvicorn = pytest.importorskip("uvicorn")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a page of runs; at the end no page has reported an error."""
    servers, contexts, problems = [], [], list[str]()

    def open_page(
        folder: Path, address: str = "", width: int = 1200, scheme: str = "light", reward: str | None = None
    ) -> Any:
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server = uvicorn.Server(uvicorn.Config(make_app(find_runs([folder]), "token", reward), log_level="warning"))
        thread = threading.Thread(target=lambda: server.run([listening]), daemon=True)
        thread.start()
        servers.append((server, thread))
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(f"http://127.0.0.1:{listening.getsockname()[1]}/token/{address}")
        drawn(page)
        return page

    open_page.problems = problems  # type: ignore[attr-defined]
    yield open_page
    for context in contexts:
        context.close()
    for server, thread in servers:
        server.should_exit = True
        thread.join(10)
    assert problems == []


def until(page: Any, condition: str) -> None:
    """Wait until a condition holds in the page, whose policy refuses Playwright's own way of asking."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"not within 10 seconds: {condition}")


def drawn(page: Any) -> None:
    page.wait_for_selector("main[data-drawn], #error")
    until(page, "document.querySelector('#error') !== null || main.dataset.drawn.startsWith(location.hash)")
    assert page.locator("#error").count() == 0, page.locator("#error").inner_text()


def go(page: Any, address: str) -> None:
    page.evaluate("address => { location.hash = address }", address)
    drawn(page)


def test_a_sample_shows_the_stored_values_and_follows_links_and_keys(opened: Callable[..., Any], planted: Path) -> None:
    run = RunFolder(planted / "never")
    first, second = sorted(row["row"] for row in run.record("tokens", 40)["rows"])
    page = opened(planted / "never", f"#step=40&sample={first}&token=3&by=ratio")
    raw = next(row for row in run.record("tokens", 40)["rows"] if row["row"] == first)
    for name in ("advantages", "values", "entropy"):
        go(page, f"#step=40&sample={first}&token=3&by={name}")
        shown = page.evaluate("[...document.querySelectorAll('#strip span')].map(token => Number(token.dataset.value))")
        assert shown == unpack(raw["values"][name]).tolist()
    assert page.locator("#strip .masked").count() == 3
    assert [name.split()[0] for name in page.locator("#strip-box .legend span").all_inner_texts()][:2] == [
        "value", "return"
    ]  # fmt: skip
    go(page, f"#step=40&sample={first}&token=3&by=ratio")
    new, old = (unpack(raw["values"][f"{name}_log_probs"]) for name in ("new", "old"))
    outside = np.abs(np.exp(new.astype(np.float64) - old) - 1) > 0.2
    assert page.locator("#strip .clipped").count() == (outside & unpack(raw["mask"])).sum() > 0
    history = prompt_history(run, int(run.columns(40)["index"][first]))["training"]
    assert f"The same prompt through the run: {len(history)} samples" in page.locator("main").inner_text()
    removed = (
        "[...[...document.querySelectorAll('main .text')].at(-1).childNodes]"
        ".filter(node => node.tagName !== {}).map(node => node.textContent).join('')"
    )
    assert page.evaluate(removed.format("'INS'")) == history[0]["response"]
    assert page.evaluate(removed.format("'DEL'")) == history[-1]["response"]
    assert page.locator("#strip .here").get_attribute("data-token") == "3"
    page.keyboard.press("j")
    until(page, "document.querySelector('#strip .here')?.dataset.token === '4'")
    page.reload()
    drawn(page)
    assert page.locator("#strip .here").get_attribute("data-token") == "4"
    page.keyboard.press("k")
    until(page, "document.querySelector('#strip .here')?.dataset.token === '3'")
    page.locator("#strip span").nth(7).click()
    until(page, "location.hash.includes('token=7')")
    page.keyboard.press("l")
    until(page, f"location.hash.includes('sample={second}')")
    page.keyboard.press("h")
    until(page, f"location.hash.includes('sample={first}')")
    page.keyboard.press("u")
    until(page, "location.hash.includes('view=step')")
    page.hover("main h1")
    go(page, f"#step=40&sample={first}")
    page.locator("#strip span").nth(2).hover()
    assert f"id {unpack(raw['response_ids'])[2]}" in page.locator("#tip").inner_text()
    go(page, f"#step=40&sample={first}&token=3")
    assert "this run has none; trainer.save_freq saves them" in page.locator("#alternatives").inner_text()
    assert page.locator("#exact .text").evaluate("one => one.textContent") == raw["prompt"] + raw["response"]


def test_roles_thoughts_and_calls_are_told_apart(opened: Callable[..., Any], tmp_path: Path) -> None:
    """Of the exact string, as the template of the model wrote it."""
    folder = write_text(tmp_path / "run", steps=1)
    records = folder / RECORDS_FILE
    prompt = "<|im_start|>user\nAdd 2 and 3.<|im_end|>\n<|im_start|>assistant\n"
    response = (
        '<think>\nThe tool knows.\n</think>\n\n<tool_call>\n{"name": "add"}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 5.<|im_end|>"
    )
    columns, tokens, texts = (read_record(records, head) for head in heads(records))
    for row in tokens["rows"]:
        row |= {"prompt": prompt, "response": response}
        row["values"]["policy_version"] = pack(np.arange(len(row["pieces"]), dtype=np.int32) // 10)
        texts["rows"][row["row"]] |= {"error": "KeyError: 'answer'", "traceback": "in score, line 3"}
    records.unlink()
    with RecordFile(folder, 2_000_000, 0).recording(1) as add:
        for kind, record in (("columns", columns), ("tokens", tokens), ("texts", texts)):
            add(kind, {name: value for name, value in record.items() if name not in ("bytes", "step", "kind")})
    page = opened(folder, f"#step=1&sample={tokens['rows'][0]['row']}")
    assert page.locator(".turn > b").all_inner_texts() == ["user", "assistant", "tool", "assistant"]
    turns = page.locator(".turn")
    assert turns.nth(1).locator("details .text").evaluate("one => one.textContent").startswith("<think>\nThe tool")
    assert turns.nth(1).locator("[data-kind='tool call']").inner_text().startswith("tool call")
    assert "5" in turns.nth(2).locator("[data-kind='tool result']").inner_text()
    assert turns.nth(3).locator("[data-kind=text]").inner_text() == "It is 5."
    assert page.locator("main > .bad").inner_text() == "KeyError: 'answer'"
    assert page.locator("main > details .text").first.evaluate("one => one.textContent") == "in score, line 3"
    assert "policy version" in page.locator("select[aria-label='Colour by'] option").all_inner_texts()


def test_what_a_model_writes_is_shown_as_text(opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened(write_hostile(tmp_path / "hostile"), "#step=1")
    escaped = json.loads(json.dumps(PAYLOADS[:100]))
    texts = page.evaluate(
        "[...document.querySelectorAll('main table')][0].querySelectorAll('tbody tr').length === 100 &&"
        "[...document.querySelectorAll('main tbody tr')].slice(0, 100).map(row =>"
        " JSON.stringify(row.children[3].textContent))"
    )
    assert [json.loads(text) for text in texts] == escaped
    for row in range(len(KINDS)):
        go(page, f"#step=1&sample={row}")
        pieces = page.evaluate(
            "[...document.querySelectorAll('#strip span')].map(one => JSON.stringify(one.textContent))"
        )
        assert [json.loads(piece) for piece in pieces] == [PAYLOADS[row], PAYLOADS[row + 1]]
        assert page.locator("main img, main script, main iframe, main style, main a[href^=javascript]").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    go(page, "#view=trend")
    assert page.evaluate("window.harmed") is None


def test_a_running_run_is_followed(opened: Callable[..., Any], tmp_path: Path) -> None:
    page = opened(write_text(tmp_path / "run", steps=5), "#view=trend")
    assert page.locator("#state").inner_text() == "step 5"
    assert page.locator("svg .dropped-branch").count() == page.locator("svg .discarded").count() == 0
    logger = JsonlLogger(RunInfo(tmp_path / "run", "planted", "run", text_config(), 9, resumed_step=3))
    for step in range(4, 7):
        logger.log(step, healthy(step, np.random.default_rng(0)) | {"my/metric": 42.0})
    rows = [Row(prompt, 1.0) for prompt in range(4)]
    record_step(RecordFile(tmp_path / "run", 1_000_000, 3), 6, rows, np.random.default_rng(0))
    until(page, "document.querySelector('#state').textContent === 'step 6'")
    until(page, "document.querySelector('svg .dropped-branch') !== null")  # of the steps 4 and 5, done twice
    assert page.locator("svg .discarded").count() >= 6
    page.fill("input[type=search]", "my/metric")
    assert page.locator("#found .card").count() == 1
    logger.close()


def test_a_chart_that_crosses_zero_marks_it_and_a_run_without_success_has_no_tab_of_tasks(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    logger = JsonlLogger(RunInfo(tmp_path, "planted", "crawler", control_config(), 3))
    for step, explained in enumerate((-1.0, 0.0, 3.0), start=1):
        logger.log(step, {"critic/vf_explained_var": explained, "env/return": 1.0 + step, "timing_s/step": 1.0})
    logger.close()
    page = opened(tmp_path)
    assert page.locator("#tabs a").all_inner_texts() == ["Trend", "Episodes"]
    marked = page.locator(".chart:has(.zero)")
    assert [one.split()[0] for one in marked.all_inner_texts()] == ["critic/vf_explained_var"]
    of_second_step = float(marked.locator("circle").nth(1).get_attribute("cy"))
    assert float(marked.locator(".zero").get_attribute("y1")) == pytest.approx(of_second_step)


def test_a_fall_is_found_from_the_first_page(opened: Callable[..., Any], planted: Path) -> None:
    page = opened(planted / "robot")
    assert page.locator("#tabs a").all_inner_texts() == ["Trend", "Episodes", "Tasks"]
    assert page.locator("#nothing").inner_text() == "Nothing."
    assert "episode 0 of step 30" in page.locator("#film-of").inner_text()
    assert "No film" not in page.locator("main").inner_text()
    assert "actor/entropy" in page.locator(".panel h3").nth(2).get_attribute("title")
    page.locator("#advice a", has_text="episode 0 of step 30").click()
    until(page, "document.querySelector('#cursor')?.textContent.startsWith('step37')")
    go(page, "#view=step&step=20")
    assert page.locator("tbody tr").count() == 4
    assert page.locator("tbody tr[tabindex]").count() == 2, "only recorded ones open"
    page.locator("th button", has_text="return").click()
    until(page, "location.hash.includes('sort=-return')")
    until(page, "document.querySelector('th[aria-sort=descending]') !== null")
    returns = page.evaluate(
        "[...document.querySelectorAll('tbody tr')].map(row => Number(row.children[4].textContent))"
    )
    assert returns == sorted(returns, reverse=True)
    assert all(page.evaluate("[...document.querySelectorAll('th')].map(one => one.title)"))
    names = page.locator("th").all_inner_texts()
    cells = page.locator("tbody tr").first.locator("td").all_inner_texts()
    shown = dict(zip(names, cells, strict=True))
    assert (shown["success"], shown["seed"], shown["task"]) == (
        ("no", "20", "walk") if int(shown["episode"]) % 2 == 0 else ("yes", "-", "stand up")
    )
    go(page, "#view=tasks")
    assert page.locator("#tasks h3").all_inner_texts() == ["walk", "stand up"]
    assert "0 % lately; 60 episodes in all" in page.locator("#tasks").inner_text()
    go(page, "#step=20&sample=0")
    facts = page.locator("main .facts").first.inner_text()
    assert all(words in facts for words in ("task", "walk", "success", "seed", "20"))


def test_several_runs_are_compared_by_any_metric(opened: Callable[..., Any], planted: Path) -> None:
    page = opened(planted)
    chosen = (
        "document.querySelector('select[aria-label=Metric]').value === document.querySelector('#compared').dataset.key"
    )
    until(page, chosen)
    assert "5 runs have seed 1 (a_1, critic, fell, hacked, never)" in page.locator(".advice").inner_text()
    page.locator("select[aria-label=Metric]").select_option("env/return")
    until(page, "document.querySelector('#compared').dataset.key === 'env/return'")
    assert page.evaluate(chosen)
    assert page.locator("#compared .legend span").all_inner_texts()[0].startswith("robot")
    assert "Without this metric by step: lr=1e-05" in page.locator("#compared").inner_text()


def test_prompts_and_distributions_of_a_step(opened: Any, planted: Path) -> None:
    page = opened(planted / "never", "#view=prompts")
    assert page.locator("#never").inner_text().startswith("2 were never solved: 3, 6. Solved means: acc above 0.5")
    assert "prompts never solved" in page.locator("#advice").inner_text()
    go(page, "#view=step&step=40")
    columns = RunFolder(planted / "never").columns(40)
    for name, count in (("reward", 2), ("length", None), ("ratio", 24), ("advantage", None)):
        counts = list(map(int, page.locator(f".histogram[data-name={name}]").get_attribute("data-counts").split()))
        assert sum(counts) == len(columns[name]) == 32
        assert count is None or len(counts) == count
        if name == "reward":
            assert counts == [(columns["reward"] == 0).sum(), (columns["reward"] == 1).sum()]
    assert page.locator("#scatter circle").count() == 32
    listed = groups(RunFolder(planted / "never"), 40)
    teaches_nothing = sum(one["without_variance"] and not one["gradient_share"] for one in listed)
    assert page.get_by_text("none: teaches nothing", exact=True).count() == teaches_nothing > 0
    by_move = sorted((one for one in listed if one["moved"]), key=lambda one: -one["moved"])
    moved = page.locator("h2", has_text="What moved").locator("xpath=following::table[1]").locator("tbody tr")
    assert [int(text.split("\t")[0]) for text in moved.all_inner_texts()] == [one["group"] for one in by_move]
    moved.first.click()
    until(page, f"location.hash.includes('group={by_move[0]['group']}')")
    until(page, "document.querySelectorAll('.pair .card').length === 4")
    shown = page.locator(".pair .text").all_inner_texts()
    assert shown == [
        row["response"].rstrip() for row in group(RunFolder(planted / "never"), 40, by_move[0]["group"])["rows"]
    ]
    go(page, "#view=step&step=40")
    page.locator("#scatter circle").nth(5).dispatch_event("click")
    until(page, "location.hash.includes('sample=5')")
    go(page, "#view=step&step=40")
    page.locator("input[aria-label^=Filter]").fill("lenght>200")
    page.locator("input[aria-label^=Filter]").press("Enter")
    until(page, "document.querySelector('#problem')?.textContent.includes('Did you mean length?')")
    assert page.locator("input[aria-label^=Filter]").input_value() == "lenght>200"
    assert page.locator("tbody").first.locator("tr").count() == 32
    page.locator("details summary").first.click()
    page.evaluate("dispatchEvent(new Event('hashchange'))")
    page.wait_for_timeout(300)
    assert page.locator("details").first.evaluate("one => one.open"), "what was unfolded stays so"
    assert {"400 (Bad Request)" in problem for problem in opened.problems} == {True}  # the answers to that filter
    opened.problems.clear()


@pytest.mark.slow
def test_every_page_of_every_kind_of_run_is_drawn(opened: Callable[..., Any], golden: Golden, planted: Path) -> None:
    """Wide and narrow, light and dark, without a page that is wider than the screen."""
    text = ["", "#view=step", "#view=samples", "#view=prompts", "#view=validation", "#view=group&step=2&group=0"]
    control = ["", "#view=step", "#view=tasks"]
    run = RunFolder(golden.folder)
    of_golden = text if run.kind == "text" else control
    for folder, addresses in ((golden.folder, of_golden), (planted / "fell", text), (planted / "robot", control)):
        for width, scheme in ((400, "dark"), (1600, "light")):
            page = opened(folder, addresses[0], width, scheme)
            assert page.locator(".panel").count() == 6
            for address in addresses:
                go(page, address or "#view=trend")
                assert page.evaluate("document.documentElement.scrollWidth") <= width, (folder.name, address)
    page = opened(planted / "compared")
    assert "lr=3e-05, 4 seeds is better" in page.locator(".verdict").inner_text()


@pytest.mark.slow
def test_a_checkpoint_is_asked_for_alternatives(opened: Callable[..., Any], golden: Golden) -> None:
    if not isinstance(golden.loop, Text):
        pytest.skip("a run of a language model")
    row = RunFolder(golden.folder).record("tokens", 3)["rows"][0]["row"]
    page = opened(golden.folder, f"#step=3&sample={row}&token=1")
    page.locator("#alternatives button").click()
    page.wait_for_selector("#alternatives tbody tr", timeout=120_000)
    assert "Recomputed from the checkpoint of step 2" in page.locator("#alternatives").inner_text()
    assert page.locator("#alternatives tbody tr").count() == 8
    assert page.locator("#alternatives th").all_inner_texts() == ["rank", "text", "id", "probability", "reference"]
    page.keyboard.press("k")
    until(page, "document.querySelector('#strip .here')?.dataset.token === '0'")
    until(page, "document.querySelectorAll('#alternatives tbody tr').length === 8")  # without another process


@pytest.mark.slow
def test_a_response_is_scored_again_beside_its_recorded_score(
    opened: Callable[..., Any], golden: Golden, tmp_path: Path
) -> None:
    if not isinstance(golden.loop, Text):
        pytest.skip("a run of a language model")
    (tmp_path / "new.py").write_text("def compute_score(**row):\n    return {'score': 42.0, 'reason': '<b>new</b>'}\n")
    page = opened(golden.folder, "#step=3&sample=1", reward=f"{tmp_path / 'new.py'}:compute_score")
    page.locator("button", has_text="score it again by the reward of the run").click()
    page.wait_for_selector("#rescored .bad", timeout=120_000)
    assert "object:letters: was an object of the program" in page.locator("#rescored").inner_text()
    page.locator("button", has_text="new.py:compute_score").click()
    page.wait_for_selector("#rescored tbody tr", timeout=120_000)
    recorded = RunFolder(golden.folder).columns(3)["reward"][1]
    cells = page.locator("#rescored tbody tr").first.locator("td").all_inner_texts()
    assert (cells[0], float(cells[1]), cells[2]) == ("score", pytest.approx(recorded, rel=1e-5), "42")
    assert "The score is another one now" in page.locator("#rescored").inner_text()
    assert "<b>new</b>" in page.locator("#rescored").inner_text()
    page.evaluate("dispatchEvent(new Event('hashchange'))")
    until(page, "document.querySelectorAll('#rescored tbody tr').length > 2")  # without another process
    assert {"400 (Bad Request)" in problem for problem in opened.problems} == {True}  # the answer about the object
    opened.problems.clear()


@pytest.mark.slow
def test_an_episode_has_one_cursor_for_film_and_curves(opened: Callable[..., Any], planted: Path) -> None:
    page = opened(planted / "robot", "#step=20&sample=0")
    length = int(page.locator("main input[type=range]").get_attribute("max")) + 1
    assert int(page.locator("#film").get_attribute("data-frames")) == length + 1
    assert "step 37 of the episode (counted from 0, of 45)" in page.locator("#drop").inner_text()
    until(page, "document.querySelector('#cursor').textContent.startsWith('step37 of 0-44 (counted from 0)')")
    shown = "document.querySelector('main .legend output').textContent"
    values = unpack(RunFolder(planted / "robot").record("episodes", 20)["rows"][0]["values"]["values"])
    until(page, f"Number({shown}) === {float(f'{values[37]:.3g}')}")
    # From the step that is shown, and not from the first one.
    page.locator("h1").click()
    page.keyboard.press("j")
    until(page, "location.hash.includes('token=38')")
    until(page, "document.querySelector('#cursor')?.textContent.startsWith('step38')")
    until(page, f"Number({shown}) === {float(f'{values[38]:.3g}')}")
    page.keyboard.press("k")
    until(page, "location.hash.includes('token=37')")
    until(page, "document.querySelector('#cursor')?.textContent.startsWith('step37')")
    labels = page.evaluate("[...document.querySelectorAll('main .legend span')].map(one => one.textContent)")
    names = page.evaluate("[...document.querySelectorAll('#cursor b')].map(one => one.textContent)")
    for name in ("value", "return", "reward", "reward after shaping", "TD error", "advantage"):
        assert name in names
        assert any(label.startswith(f"{name}  ") for label in labels)
    lines = page.evaluate("[...document.querySelectorAll('svg .mark')].map(line => Number(line.getAttribute('x1')))")
    assert lines[2] < lines[0] == lines[1], "the TD error shows the drop one step earlier"
    assert "TD error of step 36 is reward + value of step 37" in page.locator("main").inner_text()
    positions = page.evaluate("[...document.querySelectorAll('svg .cursor')].map(line => line.getAttribute('x1'))")
    assert len(set(positions)) == 1
    page.locator("main input[type=range]").fill("12")
    until(page, "location.hash.includes('token=12')")
    assert page.locator("#cursor").inner_text().startswith("step")


@pytest.mark.slow
def test_an_exported_page_opens_from_the_disk(browser: Any, planted: Path, tmp_path: Path) -> None:
    write_page([RunFolder(planted / "fell")], tmp_path / "page.html")
    context = browser.new_context(offline=True)
    page = context.new_page()
    requests = list[str]()
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "page.html").as_uri())
    drawn(page)
    assert page.locator(".panel").count() == 6
    row = RunFolder(planted / "fell").record("tokens", 100)["rows"][0]["row"]
    go(page, f"#step=100&sample={row}")
    assert page.locator("#strip span").count() > 10
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    context.close()
