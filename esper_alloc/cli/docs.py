"""``python -m esper_alloc docs``: the documents, for those who have only the package."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from .complaint import complain


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "docs",
        help="print a page of the documents",
        description="Prints a page of the documents as it is written, in Markdown.",
        epilog="Exit code 0: printed; 2: there is no such page.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "page",
        nargs="?",
        default="index",
        metavar="PAGE",
        help="its name, such as `uses`, or a link to it; without one, the list of the pages",
    )
    parser.set_defaults(run=run)


def pages() -> dict[str, Path]:
    """The files of the documents, by name: setup.py copies them into the package."""
    package = Path(__file__).resolve().parents[1]
    installed, clone = package / "docs", package.parent
    folders = [installed] if installed.is_dir() else [clone / "docs", clone]
    return {path.stem.lower(): path for folder in folders for path in folder.glob("*.md")}


def run(args: argparse.Namespace) -> int:
    found = pages()
    path = found.get(Path(args.page.partition("#")[0]).stem.lower())
    if path is None:
        texts = {name: file.read_text(encoding="utf-8") for name, file in found.items()}
        telling = [name for name in sorted(found) if f"`{args.page}`" in texts[name]]
        telling.sort(key=lambda name: -texts[name].count(f"`{args.page}`"))
        near = [*difflib.get_close_matches(args.page.lower(), found, 1), *telling]
        meant = f"; did you mean {near[0]}?" if near else "."
        hint = f"{meant} There are: {', '.join(sorted(found))}"
        return complain("docs", f"there is no page {args.page!r}{hint}", 2)
    print(path.read_text(encoding="utf-8"), end="")
    if path.stem == "index" and sys.stderr is not None:
        hint = "`esper-alloc docs NAME` prints a page, such as `uses` for `uses.md`."
        print(hint, file=sys.stderr)
    return 0
