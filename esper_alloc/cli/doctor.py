"""``python -m esper_alloc doctor``: what is here, and what is wrong with it.

Three steps, so that each can be tested alone: `gather` collects facts and
judges nothing, `diagnose` turns facts into findings and touches nothing,
`render` writes both down.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from .diagnosis.facts import Facts, gather
from .diagnosis.findings import Finding, diagnose
from .diagnosis.words import fact_lines


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="say what esper_alloc found on this machine and what is wrong",
        description="Says what esper_alloc found on this machine, which of its paths will be "
        "used, and what is wrong, with the remedy. Imports torch and, where there is a GPU, "
        "allocates 1 MiB on it in a process of its own.",
        epilog="Exit code 0: esper_alloc works here; 1: something stops it.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    facts = gather()
    findings = diagnose(facts)
    if args.json:
        print(
            json.dumps({**facts, "findings": [asdict(finding) for finding in findings]}, indent=2)
        )
    else:
        print(render(facts, findings))
    return 1 if any(finding.level == "problem" for finding in findings) else 0


def render(facts: Facts, findings: list[Finding]) -> str:
    lines = [f"{label + ':':<14}{value}" for label, value in fact_lines(facts)]
    for finding in findings:
        mark = "PROBLEM" if finding.level == "problem" else "note"
        lines += ["", f"{mark}: {finding.what}", f"  remedy: {finding.remedy}"]
    problems = sum(finding.level == "problem" for finding in findings)
    counted = "1 problem" if problems == 1 else f"{problems} problems"
    trial = facts["trial"] or {}
    if problems and trial.get("loads") and trial.get("allocated") is None:
        lines += ["", f"esper_alloc loads here, but there is no GPU to allocate on: {counted}"]
    elif problems:
        lines += ["", f"esper_alloc cannot work here: {counted}"]
    else:
        lines += ["", "esper_alloc works here"]
    return "\n".join(lines)
