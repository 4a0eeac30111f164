"""The C and C++ compilers that CC and CXX name, else those of the system.

Each is a command, as in ``CC="ccache gcc"``, and empty where there is no such program.
"""

import os
import shlex
import shutil


def named(variable: str, *candidates: str) -> list[str]:
    """The command that an environment variable names, or the first of the candidates."""
    words = shlex.split(os.environ.get(variable, ""))
    if words:
        return words if shutil.which(words[0]) else []
    return [one for one in candidates if shutil.which(one)][:1]


CC = named("CC", "cc", "gcc")
CXX = named("CXX", "c++", "g++")
