"""What stands in the documents, and which files there are."""

import re
import subprocess
from pathlib import Path

import pytest
from processes import ROOT


def project_files(folder: str = ".") -> list[Path]:
    """Every file that belongs to the project: what git would have in a commit."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z", folder]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def blocks(path: Path, language: str = "python") -> list[str]:
    """The fenced blocks of a document in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), flags=re.M | re.S)
