"""A run whose model writes what could harm a page: markup, control characters, broken Unicode, endless words."""

from pathlib import Path

import numpy as np

from tests.view.planted import text_config
from tether.metrics.loggers.jsonl import JsonlLogger
from tether.metrics.loggers.protocol import RunInfo
from tether.metrics.records import RecordFile, pack

KINDS = [
    "<script>window.harmed = {}</script>",
    "<img src=x onerror='window.harmed = {}'>",
    "</script><script>harmed({})</script>",
    "<!-- {} --",
    "<svg/onload=harmed({})>",
    "javascript:harmed({})",
    "\u202e txet desrever {}",
    "\u2066\u2067{}\u2069",
    "\x00nul {}",
    "\x1b[31mred {}\x1b[0m",
    "\ud800 lone {}",
    "{}\udfff",
    "w" * 1000 + "{}",
    "{{constructor}} {}",
    "<iframe srcdoc='<script>harmed({})</script>'>",
    "<style>*{{display:none}}</style>{}",
    "&lt;b&gt; {}",
    "\u2028{}\u2029",
    "<a href='javascript:harmed({})'>x</a>",
]
PAYLOADS = [KINDS[index % len(KINDS)].replace("{}", str(index)) for index in range(1000)]


def write_hostile(folder: Path) -> Path:
    folder.mkdir()
    logger = JsonlLogger(RunInfo(folder, "planted", "<script>harmed()</script>", text_config(), 1))
    logger.log(1, {"critic/score/mean": 0.0, "<img src=x onerror=harmed()>": 1.0})
    logger.keep_warning("<script>harmed()</script>")
    count = len(PAYLOADS)
    one = np.zeros(2, dtype=np.float32)
    with RecordFile(folder, 2_000_000, None).recording(1) as add:
        columns = {"index": np.arange(count, dtype=np.int32), "group": np.zeros(count, dtype=np.int32)}
        columns |= {name: np.zeros(count, dtype=np.float32) for name in ("reward", "length")}
        add("columns", {name: pack(column) for name, column in columns.items()})
        rows = [
            {
                "row": row, "reasons": ["first"], "messages": [{"role": PAYLOADS[row], "content": PAYLOADS[row]}],
                "prompt": PAYLOADS[row], "response": PAYLOADS[row], "prompt_ids": pack(one.astype(np.int32)),
                "response_ids": pack(one.astype(np.int32)), "pieces": [PAYLOADS[row], PAYLOADS[row + 1]],
                "mask": pack(np.ones(2, dtype=bool)), "values": {"advantages": pack(one)},
            }
            for row in range(len(KINDS))
        ]  # fmt: skip
        add("tokens", {"rows": rows, "left_out": 0})
        texts = [{"response": payload, "extra": {"reason": payload}} for payload in PAYLOADS]
        prompt = {"index": 0, "data_source": PAYLOADS[0], "prompt": PAYLOADS[2], "ground_truth": PAYLOADS[1]}
        add("texts", {"prompts": {"0": prompt}, "rows": texts})
    logger.close()
    return folder
