"""The places in a program that allocate: each site's category and line of code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Category, folder and words: a frame fits if its file is in the folder, and its function's name
#: contains one of the words. The innermost frame that fits a rule decides, by its first.
RULES = (
    ("optimizer", "/torch/optim/", ("",)),
    ("backward", "/torch/autograd/", ("backward", "Backward")),
    ("data", "/torch/utils/data/", ("",)),
    ("weights", "/torch/nn/", ("__init__", "_apply")),
    ("forward", "/torch/nn/", ("",)),
)
#: Functions that _apply() calls.
_INSIDE_APPLY = ("convert", "<lambda>")
CATEGORIES = ("weights", "forward", "backward", "optimizer", "data", "other")

#: For people: categories, lines, and the words that the page uses.
RULES_IN_WORDS = (
    "Categories come from the Python stack; its innermost frame that fits a rule decides. "
    "Optimizer: a file in torch/optim. Backward: a function of torch/autograd with “backward” in "
    "its name, a node of autograd's, or, in a file of the black box, no stack on another thread "
    "than the program's main one. Data: a file in torch/utils/data. Weights: __init__ or _apply "
    "(as of model.to) in torch/nn. Forward: another function in torch/nn. Other: none of these.",
    "The line of code is the innermost frame outside PyTorch's own folder, or else the innermost.",
    "Live: in use by the program. Reserved: taken from the device, in segments. Pending: freed by "
    "the program, but another stream may still use it, so that nobody gets it yet. Held back: the "
    "program waited until pending memory could be used again, rather than reserve more. Pool: "
    "segments that serve only some of the program's requests, such as a CUDA graph's. Lowest live: "
    "where one point of the timeline stands for several moments, its height is the highest of "
    "them, and this line the lowest.",
)

#: What the black box has for a file where a thread runs a node of autograd's and no Python.
AUTOGRAD = "autograd"
NO_STACK = "(no Python stack)"
NO_STACK_ELSEWHERE = "(no Python stack, on another thread: mostly autograd's)"


def category_of(frames: Iterable[str]) -> str:
    """The category of a stack: frames such as ``"model.py:12 (Model.forward)"``, the innermost
    first."""
    for frame in frames:
        file, _, function = frame.partition(" (")
        if file == AUTOGRAD:
            return "backward"
        if function.rstrip(")").endswith(_INSIDE_APPLY):
            continue
        for category, folder, words in RULES:
            if folder in file and any(word in function for word in words):
                return category
    return "other"


def line_of(frames: Sequence[str]) -> str:
    """The line of code of a stack, as its frame."""
    own = (frame for frame in frames if "-packages/torch/" not in frame.partition(" (")[0])
    return next(own, frames[0])


class Places:
    """All sites of a recording, and one more: no stack on another thread.

    stacks: the frames of each site. lines: the names of lines. line: for each site the index into
    lines. category: for each site the index into CATEGORIES.
    """

    def __init__(self, sites: Sequence[tuple[str, ...]]) -> None:
        self.elsewhere = len(sites)
        self.stacks = [(NO_STACK,), *sites[1:], (NO_STACK_ELSEWHERE,)]
        numbers: dict[str, int] = {}
        self.line = [numbers.setdefault(line_of(one), len(numbers)) for one in self.stacks]
        self.lines = list(numbers)
        self.category = [CATEGORIES.index(category_of(one)) for one in self.stacks]
        self.category[self.elsewhere] = CATEGORIES.index("backward")
