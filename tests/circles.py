"""Circles among files that call, include or import each other."""

from collections.abc import Iterable


def circle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """Files that reach each other, in order; empty: there are none."""
    reached: dict[str, list[str]] = {}
    for start, end in edges:
        reached.setdefault(start, []).append(end)
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for end in sorted(reached.get(name, [])):
            if found := visit(end, [*path, name]):
                return found
        done.add(name)
        return []

    for name in sorted(reached):
        if found := visit(name, []):
            return found
    return []
