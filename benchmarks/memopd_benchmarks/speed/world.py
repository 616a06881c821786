"""How fast the built-in world is written, and that its size costs no memory.

The named alternative is reading the same passages back from the JSONL that was just written: a corpus cannot be had for
less than that. Each size runs in a process of its own, so that its peak memory is its own.

    python -m memopd_benchmarks.speed.world --passages 4000 100000
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from memopd_env.tasks.world import World, WorldConfig


def measure(passages: int) -> dict[str, float]:
    """Write one world and read it back; seconds of processor time, MiB of peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"
        started = time.process_time()
        World(WorldConfig(passages=passages)).write_corpus(path)
        written = time.process_time() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        started = time.process_time()
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                json.loads(line)
        read = time.process_time() - started
    return {
        "passages": passages,
        "passages_per_second": passages / written,
        "seconds_over_reading_back": written / read,
        "peak_mib": peak,
    }


def main() -> None:
    """Measure every size in its own process and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, nargs="+", default=[4_000, 100_000])
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sys.stdout.write(json.dumps(measure(options.passages[0])))
        return
    print(f"{'passages':>10} {'passages/s':>11} {'x reading back':>15} {'peak MiB':>9}")
    for passages in options.passages:
        command = [sys.executable, "-m", "memopd_benchmarks.speed.world", "--one", "--passages", str(passages)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(
            f"{passages:>10,} {found['passages_per_second']:>11,.0f} {found['seconds_over_reading_back']:>15.1f} "
            f"{found['peak_mib']:>9.0f}"
        )


if __name__ == "__main__":
    main()
