"""`make demo`: replays the recorded jobs in examples/traces, then trains where there is a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRACES = sorted((ROOT / "examples" / "traces").glob("*.pickle*"))
TRAINING = ROOT / "examples" / "train_gpt2.py"


def run(*arguments: str) -> None:
    print("\n$ python " + " ".join(arguments), flush=True)
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(f"demo: that ended with exit code {done.returncode}")


def main() -> None:
    from esper_alloc import _core

    if not TRACES:
        raise SystemExit("demo: examples/traces holds no recorded job")
    traces = [str(path.relative_to(ROOT)) for path in TRACES]
    run("-m", "esper_alloc", "replay", *traces)
    report = _core.driver_report()
    if report["available"]:
        run(str(TRAINING.relative_to(ROOT)))
    else:
        print(f"\nNo training: {report['error']}.")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
