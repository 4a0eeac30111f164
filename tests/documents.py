"""What stands in the documents."""

import re
from pathlib import Path


def blocks(path: Path, language: str = "python") -> list[str]:
    """The fenced blocks of a document in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), flags=re.M | re.S)
