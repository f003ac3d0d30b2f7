"""What is built for others: the README of a package index, and the files of the source archive."""

import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
RELATIVE = re.compile(r"\]\((?!https?://)[\w./#-]+\)")


def test_links_of_the_readme_lead_somewhere_on_an_index() -> None:
    assert RELATIVE.search(README)
    plain = SETUP["index_readme"](README, None)
    assert not RELATIVE.search(plain)
    assert "docs/assets" not in plain.partition("```")[0]  # the picture
    assert plain.count("```") == README.count("```")
    published = SETUP["index_readme"](
        "[all](docs/index.md#start), ![curve](docs/a.png), [x](https://x.org)", "https://r"
    )
    assert published == (
        "[all](https://r/blob/main/docs/index.md#start), ![curve](https://r/raw/main/docs/a.png), [x](https://x.org)"
    )


def test_the_source_archive_has_what_the_tests_read() -> None:
    listed = (ROOT / "MANIFEST.in").read_text().split()
    for name in ("tests", "docs", "recipes", "scripts", "benchmarks", "constraints.txt", "mkdocs.yml", "CHANGELOG.md"):
        assert name in listed, name


@pytest.mark.slow
def test_the_wheel_has_recipes_and_tested_versions(tmp_path: Path) -> None:
    command = ["egg_info", "--egg-base", tmp_path, "build", "--build-base", tmp_path / "build"]
    command += ["bdist_wheel", "--bdist-dir", tmp_path / "wheel", "--dist-dir", tmp_path]
    subprocess.run([sys.executable, "setup.py", "--quiet", *command], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = [path for path in (ROOT / "recipes").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(recipes) > 10
    assert {"tether/constraints.txt", *(f"tether/{path.relative_to(ROOT)}" for path in recipes)} <= names


def test_the_metadata_names_the_supported_versions_of_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    minors = [int(text.rpartition(".")[2]) for text in project["classifiers"] if re.search(r"Python :: 3\.\d+$", text)]
    assert minors
    assert project["requires-python"] == f">=3.{min(minors)}"


def test_no_page_installs_from_an_index_what_is_on_none() -> None:
    """Anybody could register the name there. With --no-index it is that of a wheel."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.*")]
    from_index = re.compile(r"^(?!.*--no-index).*pip install (?:[^`\n]*['\" ])?tether(?=[\['\" ]|$)", re.MULTILINE)
    assert all(from_index.search(line) for line in ("pip install -U 'tether[lora]'", "pip install tether"))
    assert not from_index.search("pip install '/dist/tether-0.1.0-py3-none-any.whl[lora]'")
    texts = {page: page.read_text(encoding="utf-8") for page in pages if page.suffix in (".md", ".yaml", ".sh")}
    assert [str(page) for page, text in texts.items() if from_index.search(text)] == []
