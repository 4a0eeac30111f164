"""The documents as a site (mkdocs.yml). mkdocs warns of broken links and anchors, and of docstrings
that do not fit their function: warnings are errors here."""

import importlib.util
import json
import os
import re
import subprocess
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from processes import ROOT, browser, output_of

CHROMIUM = browser()


def need_mkdocs() -> None:
    """Skips the test, or in CI fails it, where the pinned packages are not installed."""
    text = (ROOT / "tools" / "environment.py").read_text()
    pinned = re.findall(r'"(mkdocs[\w-]+)==([\d.]+)"', text)
    assert len(pinned) == 2
    for name, version in pinned:
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "none"
        if found != version:
            why = f"{name} {version} is not installed, but {found}"
            if os.environ.get("CI") == "true":
                pytest.fail(why, pytrace=False)
            pytest.skip(why)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site."""
    need_mkdocs()
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    output_of("-m", "mkdocs", "build", "--strict", "--site-dir", folder, cwd=ROOT, env=env)
    return folder


@pytest.mark.slow
def test_every_document_is_a_page(site: Path) -> None:
    for path in (ROOT / "docs").glob("*.md"):
        assert (site / path.with_suffix(".html").name).is_file()
    for name in ("readme", "contributing", "security", "changelog"):
        assert (site / "project" / f"{name}.html").is_file()


@pytest.mark.slow
def test_what_documents_link_to_outside_of_docs_is_shown(site: Path) -> None:
    example = (site / "project" / "examples" / "prefetch.py.html").read_text()
    assert "record_use" in example
    folder = (site / "project" / "examples" / "cpp_extension.html").read_text()
    assert "download.cpp" in folder and "run.py" in folder
    assert (site / "project" / "benchmarks" / "results" / "pipeline.svg").is_file()


@pytest.mark.slow
def test_the_reference_has_every_public_name(site: Path) -> None:
    import esper_alloc

    anchors = {
        anchor
        for page in ("reference", "reference-helpers")
        for anchor in re.findall(r'<h3 id="([^"]+)"', (site / f"{page}.html").read_text())
    }
    for name in set(esper_alloc.__all__) - {"__version__"}:
        assert f"esper_alloc.{name}" in anchors, f"docs/reference.md does not list {name}"


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """So that the site can be read without a network, and nobody is told who reads it."""
    for path in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:link|script|img)[^>]+(?:href|src)=.?https?://[^>]*", path.read_text()
        )
        assert [one for one in loaded if "canonical" not in one] == []


@pytest.mark.slow
def test_search_finds_pages_and_no_sources(site: Path) -> None:
    index = (site / "search" / "search_index.js").read_text()  # for a site opened from a folder
    found = json.loads(index.removeprefix("var __index = "))["docs"]
    pages = {one["location"].partition("#")[0] for one in found}
    assert {"reference.html", "results-jobs.html", "project/readme.html"} <= pages
    assert {one for one in pages if one.count("/") > 1} == set()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_search_works_in_a_folder(site: Path) -> None:
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         "--virtual-time-budget=60000", f"{(site / 'index.html').as_uri()}?q=record_use"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert re.search(r"\d+ matching documents", done.stdout), done.stderr


def docstrings() -> ModuleType:
    need_mkdocs()
    found = importlib.util.spec_from_file_location("docstrings", ROOT / "tools" / "docstrings.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_docstrings_become_markdown() -> None:
    written = (
        "Marks, see :func:`enable`.\n\nLike this::\n\n    with using(x):\n        x.sum()\n\n"
        "::\n\n    y\n\nArgs:\n    x: what\n"
    )
    assert docstrings().markdown(written) == (
        "Marks, see `enable`.\n\nLike this:\n\n```python\nwith using(x):\n    x.sum()\n```\n\n"
        "```python\ny\n```\n\nArgs:\n    x: what"
    )
