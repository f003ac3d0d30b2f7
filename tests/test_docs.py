"""The documentation says what is true: its examples run, its keys, files and links exist, its tables are the code's."""

import inspect
import re
import runpy
import shlex
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tether.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from tether.commands.cli import app
from tether.config.keys import keys, sections
from tether.config.loading.sft_names import full_name
from tether.config.loading.typos import MISSPELLINGS
from tether.config.support.patterns import look_up
from tether.config.support.verl_keys import renamed, unread
from tether.integrations.rlinf.importer import TABLES
from tether.metrics.keys import METRICS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").glob("*/README.md")),
]
TOP = "|".join(sorted({path.split(".")[0] for path in keys()}))
ALGORITHM_PAGES = [page for page in PAGES if "algorithms" in page.parts and page.name != "index.md"]
FOLDERS = "benchmarks|docs|recipes|scripts|src|tests"


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def on_all_pages(faults: Callable[[Path], Iterable[str]]) -> list[str]:
    """What is wrong, with the page that it stands on."""
    return [f"{page.relative_to(ROOT)}: {fault}" for page in PAGES for fault in sorted(faults(page))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)


@cache
def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


@cache
def is_key(name: str) -> bool:
    name = full_name(renamed(name))
    owners = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
    in_mapping = any(owner in keys() and keys()[owner].is_mapping for owner in owners)
    return name in keys() or name in sections() or in_mapping or unread(name) is not None


def is_rlinf_key(name: str) -> bool:
    return any(look_up(table, name) is not None for table in TABLES.values())


def test_there_are_pages() -> None:
    assert len(PAGES) > 12


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: str(page.relative_to(ROOT))
)
def test_python_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The examples of a page are one module, and run in an empty folder.

    One that begins with the name of a file is that file, too, and a `run.yaml` is sound.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # an example may import the file of another one
    # "__main__" parts reach out to the network; they are compiled, not run.
    module: dict[str, object] = {"__name__": "example"}
    for text in [*blocks(page, "python"), *blocks(page, "yaml")]:
        if file := re.match(r"# (\w+\.(?:py|yaml))\n", text):
            Path(file[1]).write_text(text)
    for number, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page.name}, example {number + 1}", "exec"), module)
    if Path("run.yaml").exists():  # with the data that the examples wrote
        monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "empty"))
        result = CliRunner().invoke(app, ["config", "check", "run.yaml"])
        wrong = str(result.exception).splitlines() if result.exit_code else []
        assert wrong == []


def failing_commands(page: Path) -> Iterable[str]:
    for line in "".join(blocks(page, "bash")).splitlines():
        command = shlex.split(line)
        if command[:2] != ["tether", "config"]:
            yield f"{line}: mark what is not run here as sh"
            continue
        files = ["--no-files"] if command[2] == "check" else []  # the pages name files that are the reader's
        result = CliRunner().invoke(app, [*command[1:], *files])
        if result.exit_code:
            yield f"{line}: {result.exception}"


def test_config_commands_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert on_all_pages(failing_commands) == []


def test_commands_exist() -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    groups = {group.typer_instance.info.name for group in app.registered_groups if group.typer_instance}

    def unknown(page: Path) -> set[str]:
        lines = "".join(blocks(page, "sh")).splitlines() + code_spans(page)
        return {match[1] for line in lines if (match := re.match(r"tether (\w+)", line))} - commands - groups

    assert on_all_pages(unknown) == []


def unknown_keys(page: Path) -> Iterable[str]:
    spans = [span.split("=")[0] for span in code_spans(page)]
    in_prose = {span for span in spans if re.fullmatch(rf"({TOP})(\.\w+)+", span)}
    shell = "".join(blocks(page, "sh") + blocks(page, "bash"))
    in_commands = set(re.findall(rf"(?<![\w./])((?:{TOP})(?:\.\w+)+)=", shell))
    shown_as_wrong = {name for name in in_prose if any(name.startswith(wrong) for wrong in MISSPELLINGS)}
    foreign = set(filter(is_rlinf_key, in_prose | in_commands)) if page.name == "coming-from-rlinf.md" else set()
    if page.name == "verl-commands.md":  # its table of refused commands names keys that are unknown to verl, too
        foreign = set(re.findall(r"`([\w.]+)`.*\| unknown key \|", page.read_text(encoding="utf-8")))
    return {name for name in (in_prose | in_commands) - foreign - shown_as_wrong if not is_key(name)}


def test_keys_exist() -> None:
    assert on_all_pages(unknown_keys) == []


def test_metrics_exist() -> None:
    groups = "|".join(sorted({key.split("/")[0] for key in METRICS}))

    def unknown(page: Path) -> set[str]:
        return {span for span in code_spans(page) if re.fullmatch(rf"({groups})(/[\w<>@]+)+", span)} - set(METRICS)

    assert on_all_pages(unknown) == []


@cache
def anchors(page: Path) -> set[str]:
    """The names of its headings in links, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in re.findall(r"\]\(([^)]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            dead.append(link)
    return dead


def test_links_lead_somewhere() -> None:
    assert on_all_pages(dead_links) == []


def missing_files(page: Path) -> set[str]:
    named = {span for span in code_spans(page) if re.fullmatch(rf"({FOLDERS})/[\w./-]*", span)}
    return {name for name in named if not (ROOT / name).exists()}


def test_named_files_exist() -> None:
    assert on_all_pages(missing_files) == []


def test_what_is_wrong_on_a_page_is_found(tmp_path: Path) -> None:
    """The negative control of the lists above."""
    page = tmp_path / "page.md"
    page.write_text(
        "# A b\n`algorithm.gama` `tests/nothing.py` [1](nowhere.md) [2](#a-b) [3](#c)\n"
        "```bash\ntether config explain x\n```\n"
    )
    assert unknown_keys(page) == {"algorithm.gama"}
    assert missing_files(page) == {"tests/nothing.py"}
    assert dead_links(page) == ["nowhere.md", "#c"]
    assert len([*failing_commands(page)]) == 1


def test_every_page_is_in_the_index_in_the_navigation_and_short() -> None:
    navigation = re.findall(r"^ *- (\S+\.md)$", text_of(ROOT / "mkdocs.yml"), re.MULTILINE)
    index = text_of(ROOT / "docs/index.md")
    pages = {str(page.relative_to(ROOT / "docs")): page for page in PAGES if page.is_relative_to(ROOT / "docs")}
    listed = {name for name in pages if not re.match("reference/algorithms/.*/", name)}  # those are in its index
    assert sorted(navigation) == sorted(listed)
    for name in sorted(name for name in listed if name != "index.md" and "algorithms/" not in name):
        assert f"({name})" in index
        # Without its generated tables, and the files that it has the reader write.
        text = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", text_of(pages[name]), flags=re.DOTALL)
        text = re.sub(r"^```(python|yaml)\n# \w+\.(py|yaml)\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        assert name == "evidence/oracles.md" or len(text.splitlines()) <= 120, name


@pytest.mark.parametrize(
    ("page", "naming"), [("docs/index.md", "`recipes/{}`"), ("README.md", "(recipes/{}/README.md)")]
)
def test_every_recipe_is_listed(page: str, naming: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    folders = sorted(path.name for path in (ROOT / "recipes").iterdir() if path.is_dir())
    assert [name for name in folders if naming.format(name) not in text] == []


@pytest.fixture(scope="module")
def generated() -> dict[Path, str]:
    """The text of each page that is made from the code."""
    return runpy.run_path(str(ROOT / "docs/build.py"))["pages"]()


def test_generated_tables_are_the_codes(generated: dict[Path, str]) -> None:
    """Where one is not: run ``python docs/build.py``."""
    assert [path.name for path, text in generated.items() if text_of(path) != text] == []


def test_every_algorithm_has_its_page_and_no_other_is_left(generated: dict[Path, str]) -> None:
    written = {path for path in generated if "algorithms" in path.parts}
    assert written == set((ROOT / "docs/reference/algorithms").rglob("*.md"))
    titles = {path.stem for path in written}
    assert set(ADVANTAGE_ESTIMATORS) | set(POLICY_LOSSES) <= titles


def missing_parts(page: Path) -> Iterable[str]:
    """What a user needs and a page of an algorithm leaves out."""
    text = text_of(page)
    yield from (label for label in ("Assumes", "Use it", "Watch", "Keys") if f"- **{label}**: " not in text)
    if not re.search(r"\d{4}\.\d{5}|\b(19|20)\d\d\b|verl|RLinf", text):
        yield "no paper and no origin"
    if " = " not in text:
        yield "no formula"
    if not re.search(r"^```text\n(\w+(?:\[\"\w+\"\])?\(.*?\).*?)\n```", text, re.DOTALL | re.MULTILINE):
        yield "no call"


def test_every_algorithm_says_what_a_user_needs(tmp_path: Path) -> None:
    """Complete the docstring, not the page."""
    assert [f"{page.stem}: {part}" for page in ALGORITHM_PAGES for part in missing_parts(page)] == []
    (empty := tmp_path / "empty.md").write_text("")
    assert len([*missing_parts(empty)]) == 7


def test_the_call_on_a_page_names_every_argument() -> None:
    registries = {"advantages": ("ADVANTAGE_ESTIMATORS", ADVANTAGE_ESTIMATORS),
                  "policy_losses": ("POLICY_LOSSES", POLICY_LOSSES)}  # fmt: skip
    wrong = []
    for folder, (registry, entries) in registries.items():
        for name, function in entries.items():
            text = text_of(ROOT / f"docs/reference/algorithms/{folder}/{name}.md")
            call = text[text.index("```text") : text.index("```", text.index("```text") + 3)]
            named = re.findall(r"^    (\w+): ", call, re.MULTILINE)
            arguments = list(inspect.signature(function).parameters)
            if call.splitlines()[1] != f'{registry}["{name}"](' or named != arguments:
                wrong.append(f"{folder}/{name}: {call.splitlines()[1]} {named}, and the code has {arguments}")
    assert wrong == []


def test_every_metric_has_its_row() -> None:
    listed = set(code_spans(ROOT / "docs/reference/metrics.md"))
    assert set(METRICS) <= listed
