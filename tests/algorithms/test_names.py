"""Names of the package mean what their files hold: pages of the documentation are built from them."""

import inspect
from pathlib import Path
from types import ModuleType

from docs.algorithm_pages import pages, render
from tether import algorithms

FILES = Path(algorithms.__file__).parent


def test_a_name_of_a_file_is_its_module():
    """A loop variable at the top of the package once took the place of a module, and a page described a function."""
    for file in FILES.glob("[a-z]*.py"):
        item = getattr(algorithms, file.stem, None)
        is_exported_function = file.stem in algorithms.__all__ and callable(item)
        assert item is None or isinstance(item, ModuleType) or is_exported_function, file.name


def test_a_page_begins_with_what_its_title_names():
    for page in pages():
        first = page.objects[0]
        if isinstance(first, ModuleType):
            name, text = Path(page.path).stem, inspect.getdoc(first)
            assert name.startswith(first.__name__.rpartition(".")[2]), page.path
            assert text.partition("\n")[0].strip(".") in render(page), page.path
        else:
            assert page.title == first.__name__ or page.title in inspect.getsource(inspect.unwrap(first)), page.path
