"""The tables of docs/evidence/oracles.md."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from datetime import date

from benchmarks.oracles.cases import GROUPS, SCENARIOS, SEEDS, WIDTH
from benchmarks.oracles.compare import Difference

Reasons = dict[tuple[str, str | None], list[Difference]]
"""(peer, reason) -> the differences that it explains; reason None: unexplained."""


READ = (
    ("NeMo RL 00925dd", "gdpo", "sums the components, then whitens over rows", "whitens over tokens, as verl does"),
    ("NeMo RL 00925dd", "gdpo, grpo", "the baseline can exclude a row's own score", "`rloo` does; the others do not"),
    (
        "NeMo RL 00925dd, AReaL 1.0.4",
        "rejection by the ratio",
        "bounds of rho: 0.5 and 5 keep 0.5 to 5",
        "k1 as in verl: bounds of 1 / rho, so `0.5_5` keeps 0.2 to 2",
    ),
    (
        "AReaL 1.0.4",
        "importance weights",
        "a non-finite log-ratio counts as 0",
        "-inf on both sides does; NaN stays NaN, and `veto_mask` drops the row",
    ),
    (
        "RLinf 0.3.0",
        "losses of action dimensions, under a mask",
        "divides by the number of actions, not by their D dimensions: D times as large",
        "divides by the number of terms",
    ),
    ("verl 0.9.1", "kl_cov: `actor/ppo_kl`", "mean of abs(log r)", "mean of -log r; `actor/ppo_kl_abs` is the other"),
    ("verl 0.9.1", "gspo: `actor/ppo_kl`", "of the unclamped log r", "of log r clamped to +-20"),
    (
        "verl 0.9.1",
        "importance metrics of level sequence",
        "weights each row by its number of tokens",
        "each row counts once",
    ),
    (
        "verl 0.9.1",
        "optimal_token_baseline, two rows and one of them empty",
        "the other is its own baseline (advantage 0) with handle_zero_tail=False",
        "a group of one keeps its return",
    ),
)
"""(library and version, function, what it does, what tether does)."""


def page(versions: Mapping[str, str], absent: Mapping[str, str], torch: str, found: Sequence[Difference]) -> str:
    """Return the page: what was compared, the largest differences, and the reason of each real one."""
    reasons = group_by_reason(found)
    numbers = {key: number for number, key in enumerate(reasons, start=1)}
    peers = ", ".join(f"{peer} {version}" for peer, version in versions.items())
    lines = [
        "# Against other libraries",
        "",
        "`tether.algorithms` is compared with the same functions of other libraries on the same random batches. "
        "Written by",
        "",
        "```sh",
        "python -m benchmarks.oracles --write docs/evidence/oracles.md",
        "```",
        "",
        f"on {date.today()}, with {peers}, torch {torch}, Python {platform.python_version()}.",
        *(f"Left out: {peer} ({why})." for peer, why in absent.items()),
        "",
        f"Each function sees {len(SEEDS)} seeds of batches of {sum(GROUPS)} rows and up to {WIDTH} tokens:",
        "",
        *(f"- *{name}*: {meaning}" for name, meaning in SCENARIOS.items()),
        "",
        "Losses are compared together with their gradients, in float64 if the other library allows it.",
        "",
        "## Largest differences",
        "",
        "A cell shows the largest difference, absolute / relative to the largest value of the result, over the kinds",
        "of batches on which both agree; [n] is a difference that the next table explains. Empty: the library has no",
        "such function, or none that can be called alone.",
        "",
        *agreements(list(versions), found, numbers),
        "",
        "## Real differences, and who is right",
        "",
        "| | function | batches | largest | who is right, and why |",
        "|---|---|---|---|---|",
        *(explanation(numbers[key], key, differences) for key, differences in reasons.items()),
        "",
        "## Read, not run",
        "",
        "These differences come from reading the code: the libraries are not called here, or the functions cannot be",
        "called alone.",
        "",
        "| library | function | the library | tether |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in READ),
    ]
    return "\n".join(lines) + "\n"


def group_by_reason(found: Sequence[Difference]) -> Reasons:
    """Collect what differs by peer and reason, in the order of the checks."""
    reasons: Reasons = {}
    for difference in found:
        if not difference.agrees:
            reasons.setdefault((difference.peer, difference.reason), []).append(difference)
    return reasons


def agreements(
    peers: Sequence[str], found: Sequence[Difference], numbers: Mapping[tuple[str, str | None], int]
) -> list[str]:
    """One row a function, one column a peer."""
    cells: dict[str, dict[str, list[Difference]]] = {}
    for difference in found:
        cells.setdefault(difference.function, {}).setdefault(difference.peer, []).append(difference)
    rows = ["| function | " + " | ".join(peers) + " |", "|---" * (len(peers) + 1) + "|"]
    for function, by_peer in cells.items():
        rows.append(f"| {function} | " + " | ".join(cell(by_peer.get(peer, []), numbers) for peer in peers) + " |")
    return rows


def cell(found: Sequence[Difference], numbers: Mapping[tuple[str, str | None], int]) -> str:
    """Show the largest agreeing difference and the numbers of the others."""
    agreeing = [difference for difference in found if difference.agrees]
    notes = sorted({numbers[d.peer, d.reason] for d in found if not d.agrees})
    parts = []
    if agreeing:
        parts.append(f"{show(max(d.absolute for d in agreeing))} / {show(max(d.relative for d in agreeing))}")
    return " ".join([*parts, *(f"[{number}]" for number in notes)])


def explanation(number: int, key: tuple[str, str | None], found: Sequence[Difference]) -> str:
    """One row of the second table."""
    functions = "; ".join(dict.fromkeys(difference.function for difference in found))
    scenarios = ", ".join(dict.fromkeys(difference.scenario for difference in found))
    finite = [difference.absolute for difference in found if math.isfinite(difference.absolute)]
    infinite = "" if len(finite) == len(found) else "raises" if any(d.error for d in found) else "NaN or inf"
    largest = ", ".join([*([show(max(finite))] if finite else []), *([infinite] if infinite else [])])
    return f"| [{number}] {key[0]} | {functions} | {scenarios} | {largest} | {key[1] or '**unexplained**'} |"


def show(number: float) -> str:
    """Write a difference with one digit."""
    return "0" if number == 0 else f"{number:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
