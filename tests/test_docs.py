"""The documentation says what is true: its examples run, its keys, files and links exist, its tables are the code's."""

import inspect
import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tether.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from tether.commands.cli import app
from tether.config.importers.rlinf.importer import TABLES
from tether.config.keys import keys, sections
from tether.config.loading.typos import MISSPELLINGS
from tether.config.support.patterns import look_up
from tether.config.support.verl_keys import renamed, unread
from tether.metrics.keys import METRICS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").glob("*/README.md"))]
TOP = "|".join(sorted({path.split(".")[0] for path in keys()}))
ALGORITHM_PAGES = [page for page in PAGES if "algorithms" in page.parts and page.name != "index.md"]
FOLDERS = "benchmarks|docs|recipes|scripts|tests|tether"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def is_key(name: str) -> bool:
    name = renamed(name)
    owners = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
    in_mapping = any(owner in keys() and keys()[owner].is_mapping for owner in owners)
    return name in keys() or name in sections() or in_mapping or unread(name) is not None


def is_rlinf_key(name: str) -> bool:
    return any(look_up(table, name) is not None for table in TABLES.values())


def test_there_are_pages() -> None:
    assert len(PAGES) > 12


@each_page
def test_python_examples_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The examples of a page are one module, in a folder with the recipes, where they may write.

    One that begins with the name of a file is that file, too.
    """
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    # "__main__" parts reach out to the network; they are compiled, not run.
    module: dict[str, object] = {"__name__": "example"}
    for number, code in enumerate(blocks(page, "python")):
        if file := re.match(r"# (\w+\.py)\n", code):
            Path(file[1]).write_text(code)
        exec(compile(code, f"{page.name}, example {number + 1}", "exec"), module)


@each_page
def test_config_commands_work(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for line in "".join(blocks(page, "bash")).splitlines():
        command = shlex.split(line)
        assert command[:2] == ["tether", "config"], f"{line}: mark what is not run here as sh"
        files = ["--no-files"] if command[2] == "check" else []  # the pages name files that are the reader's
        result = CliRunner().invoke(app, [*command[1:], *files])
        assert result.exit_code == 0, f"{line}: {result.exception}"


@each_page
def test_commands_exist(page: Path) -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    groups = {group.typer_instance.info.name for group in app.registered_groups if group.typer_instance}
    lines = "".join(blocks(page, "sh")).splitlines() + code_spans(page)
    used = {match[1] for line in lines if (match := re.match(r"tether (\w+)", line))}
    assert used <= commands | groups


@each_page
def test_keys_exist(page: Path) -> None:
    spans = [span.split("=")[0] for span in code_spans(page)]
    in_prose = {span for span in spans if re.fullmatch(rf"({TOP})(\.\w+)+", span)}
    shell = "".join(blocks(page, "sh") + blocks(page, "bash"))
    in_commands = set(re.findall(rf"(?<![\w./])((?:{TOP})(?:\.\w+)+)=", shell))
    shown_as_wrong = {name for name in in_prose if any(name.startswith(wrong) for wrong in MISSPELLINGS)}
    foreign = set(filter(is_rlinf_key, in_prose | in_commands)) if page.name == "coming-from-rlinf.md" else set()
    named = sorted((in_prose | in_commands) - foreign - shown_as_wrong)
    assert [name for name in named if not is_key(name)] == []


@each_page
def test_metrics_exist(page: Path) -> None:
    groups = "|".join(sorted({key.split("/")[0] for key in METRICS}))
    named = {span for span in code_spans(page) if re.fullmatch(rf"({groups})(/[\w<>@]+)+", span)}
    assert named <= set(METRICS)


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", prose(page))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@each_page
def test_named_files_exist(page: Path) -> None:
    named = {span for span in code_spans(page) if re.fullmatch(rf"({FOLDERS})/[\w./-]*", span)}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_page_is_in_the_index_and_short() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index
        text = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert page.name == "oracles.md" or len(text.splitlines()) <= 120  # without its generated tables


@pytest.mark.parametrize(
    ("page", "naming"), [("docs/index.md", "`recipes/{}`"), ("README.md", "(recipes/{}/README.md)")]
)
def test_every_recipe_is_listed(page: str, naming: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    folders = sorted(path.name for path in (ROOT / "recipes").iterdir() if path.is_dir())
    assert [name for name in folders if naming.format(name) not in text] == []


def test_generated_tables_are_the_codes() -> None:
    for path, text in runpy.run_path(str(ROOT / "docs/build.py"))["pages"]().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is behind the code: run python docs/build.py"


def test_every_algorithm_has_its_page_and_no_other_is_left() -> None:
    written = {path for path in runpy.run_path(str(ROOT / "docs/build.py"))["pages"]() if path.parent.name != "docs"}
    assert written == set((ROOT / "docs/algorithms").rglob("*.md"))
    titles = {path.stem for path in written}
    assert set(ADVANTAGE_ESTIMATORS) | set(POLICY_LOSSES) <= titles


@pytest.mark.parametrize("page", ALGORITHM_PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs/algorithms")))
def test_every_algorithm_says_what_a_user_needs(page: Path) -> None:
    """Complete the docstring, not the page."""
    text = page.read_text(encoding="utf-8")
    missing = [label for label in ("Assumes", "Use it", "Watch", "Keys") if f"- **{label}**: " not in text]
    assert missing == []
    assert re.search(r"\d{4}\.\d{5}|\b(19|20)\d\d\b|verl|RLinf", text), "no paper and no origin"
    assert " = " in text, "no formula"
    calls = re.findall(r"^```text\n(\w+(?:\[\"\w+\"\])?\(.*?\).*?)\n```", text, re.DOTALL | re.MULTILINE)
    assert calls, "no call"


@pytest.mark.parametrize("name", [*ADVANTAGE_ESTIMATORS, *(f"{name} loss" for name in POLICY_LOSSES)])
def test_the_call_on_a_page_names_every_argument(name: str) -> None:
    registry, folder = (
        (POLICY_LOSSES, "policy_losses") if name.endswith(" loss") else (ADVANTAGE_ESTIMATORS, "advantages")
    )
    name = name.removesuffix(" loss")
    text = (ROOT / f"docs/algorithms/{folder}/{name}.md").read_text(encoding="utf-8")
    call = text[text.index("```text") : text.index("```", text.index("```text") + 3)]
    assert (
        call.splitlines()[1] == f'{"POLICY_LOSSES" if folder == "policy_losses" else "ADVANTAGE_ESTIMATORS"}["{name}"]('
    )
    named = re.findall(r"^    (\w+): ", call, re.MULTILINE)
    assert named == list(inspect.signature(registry[name]).parameters)


def test_every_metric_has_its_row() -> None:
    listed = set(code_spans(ROOT / "docs/metrics.md"))
    assert set(METRICS) <= listed
