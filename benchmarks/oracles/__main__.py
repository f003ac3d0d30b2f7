"""See the package."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import benchmarks.oracles
from benchmarks.oracles import environment
from benchmarks.oracles.compare import Difference
from benchmarks.oracles.peers import PEERS
from benchmarks.oracles.report import page


def main() -> int:
    """Run every peer that can be had; returns the number of unexplained results."""
    parser = argparse.ArgumentParser(
        description=benchmarks.oracles.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--write", type=Path, help="also write the page to this file")
    parser.add_argument("--environment", type=Path, default=environment.ROOT / "runs/oracles", help="of the peers")
    arguments = parser.parse_args()
    python = environment.make(arguments.environment)
    versions: dict[str, str] = {}
    absent: dict[str, str] = {}
    found: list[Difference] = []
    torch = ""
    for peer in arguments.peers:
        problem = environment.install(python, peer)
        result, why = (None, problem) if problem else environment.run_worker(python, peer)
        if result is None:
            absent[peer] = str(why)
            continue
        answer = json.loads(result)
        versions[peer], torch = answer["version"], answer["torch"]
        found += [Difference(**difference) for difference in answer["differences"]]
    text = page(versions, absent, torch, found)
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    unexplained = [difference for difference in found if difference.unexplained]
    for difference in unexplained:
        print(f"not as expected: {difference}", file=sys.stderr)
    return len(unexplained)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
