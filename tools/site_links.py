"""mkdocs hook: links that leave docs/ lead to pages of the site (mkdocs.yml).

The documents are read in the repository, too, so they link to examples, result files and
CONTRIBUTING.md where those are. Whatever they link to outside of docs/ becomes a page: Markdown
as it is, other text in a block of code, a folder as all its files; pictures are copied.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[#)])")
PICTURES = (".svg", ".png")
LANGUAGES = {".py": "python", ".json": "json", ".c": "c", ".h": "c", ".cpp": "cpp", ".cu": "cpp"}


def place_of(path: Path, config: MkDocsConfig) -> str:
    """Where the site has a file of the repository."""
    docs = Path(config.docs_dir)
    if path.is_relative_to(docs):
        return path.relative_to(docs).as_posix()
    name = path.relative_to(docs.parent).as_posix()
    if path.suffix in PICTURES:
        return f"project/{name}"
    if path.suffix == ".md":
        return f"project/{name.lower()}"
    return f"project/{name}.md"


def origin(file: File, config: MkDocsConfig) -> Path:
    """The file of the repository that a page is made of."""
    path: Path | None = getattr(file, "origin", None)
    return path or Path(config.docs_dir, file.src_uri)


def linked(text: str, path: Path, config: MkDocsConfig) -> dict[str, Path]:
    """What a document links to that is there, by the links' texts."""
    root = Path(config.docs_dir).parent
    found = {}
    for target in set(LINK.findall(text)):
        resolved = (path.parent / target).resolve()
        if resolved.is_relative_to(root) and resolved.exists():
            found[target] = resolved
    return found


def code(path: Path, root: Path) -> str:
    """A page that shows a file, or the files of a folder."""
    files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
    text = [f"# {path.relative_to(root)}\n"]
    for file in files:
        if path.is_dir():
            text.append(f"## {file.name}\n")
        text.append(f"````{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n````\n")
    return "\n".join(text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.docs_dir).parent
    todo = [Path(config.docs_dir, file.src_uri) for file in files.documentation_pages()]
    while todo:
        document = todo.pop()
        for path in linked(document.read_text(), document, config).values():
            place = place_of(path, config)
            if files.get_file_from_path(place):
                continue
            if path.suffix in PICTURES:
                made = File.generated(config, place, abs_src_path=str(path))
            else:
                content = path.read_text() if path.suffix == ".md" else code(path, root)
                made = File.generated(config, place, content=content)
                made.inclusion = InclusionLevel.NOT_IN_NAV
            if path.suffix == ".md":
                todo.append(path)
            made.origin = path  # type: ignore[attr-defined]
            files.append(made)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    section = page.ancestors[-1].title if page.parent else None
    if section is None:  # a source
        page.meta["search"] = {"exclude": True}
    elif section == "Internals":
        page.meta["search"] = {"boost": 0.5}
    path = origin(page.file, config)
    if path.suffix != ".md":
        return markdown  # code: what looks like a link is none
    targets = linked(markdown, path, config)
    here = posixpath.dirname(page.file.src_uri)

    def rewritten(match: re.Match[str]) -> str:
        target = targets.get(match[1])
        return posixpath.relpath(place_of(target, config), here or ".") if target else match[1]

    return LINK.sub(rewritten, markdown)
