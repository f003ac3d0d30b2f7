"""Cost of an agent behind the endpoint beside the same conversation as turns of the run.

    python -m benchmarks.endpoint
    python -m benchmarks.endpoint --write docs/guides/endpoint.md

A random model of 3 million weights says the same 32 tokens in every turn and is answered with the same 8 words, by an
environment (`multi_turn.enable`) or by a program that calls the endpoint. Both ways are measured alternately, so that
other work on the machine slows both down; the table has the medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from benchmarks.resumable import write_between
from benchmarks.speed.machine import machine_line
from benchmarks.speed.table import grid
from tests.runs.tiny_run import write_jsonl
from tests.tiny import EOS_ID, tiny_model, tiny_tokenizer
from tether.batch import Prompt
from tether.config import load_config
from tether.text.learning.collector import Collector, ScoredResponses
from tether.text.sampling.protocol import NoiseKey, SamplingParams
from tether.text.standalone import build_evaluator

BEGIN, END = "<!-- cost:begin -->", "<!-- cost:end -->"
HEAD = ("episodes", "calls of each", "turns, ms a call", "endpoint, ms a call", "ratio", "endpoint, tokens/s")
SAID = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcde"  # and the end of the turn: 32 tokens
CASES = {8: (2, 6), 64: (2, 4)}
"""Episodes at a time -> calls of each."""
RUNS = 3
MAX_LENGTH = 2048
AGENT = "actor_rollout_ref.rollout.agent"
PLAYERS = """
import http.client, json, os
from urllib.parse import urlsplit

REPLY = "one two three four five six seven eight"


class Environment:
    def reset(self, messages, row):
        self.left = int(row["ground_truth"])

    def step(self, messages):
        self.left -= 1
        return REPLY, 0.0, self.left == 0


def play(row):
    address = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(address.hostname, address.port)
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    messages = list(row["prompt"])
    for _ in range(int(row["ground_truth"])):
        body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages})
        connection.request("POST", "/v1/chat/completions", body, headers)
        reply = json.loads(connection.getresponse().read())["choices"][0]["message"]
        messages += [reply, {"role": "user", "content": REPLY}]
    return 0.0
"""


def model() -> PreTrainedModel:
    """A model whose next token is a function of the last one alone, although all layers are computed."""
    made = tiny_model(
        "llama", hidden_size=256, intermediate_size=704, num_hidden_layers=4, max_position_embeddings=MAX_LENGTH
    )
    made.generation_config.eos_token_id = EOS_ID
    says = [*tiny_tokenizer()("\n" + SAID)["input_ids"], EOS_ID]
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        read, written = made.get_input_embeddings().weight, made.get_output_embeddings().weight
        written.zero_()
        written[says[1:]] = 5 * torch.nn.functional.normalize(read[says[:-1]], dim=-1)
    return made


def overrides(folder: Path, episodes: int) -> dict[str, list[str]]:
    """Settings of both ways."""
    both = [
        f"data.train_files={folder / 'rows.jsonl'}", f"data.val_files={folder / 'rows.jsonl'}",
        f"actor_rollout_ref.model.path={folder / 'model'}", f"data.max_prompt_length={MAX_LENGTH // 2}",
        f"data.max_response_length={MAX_LENGTH // 2}", "actor_rollout_ref.rollout.dtype=float32",
        f"{AGENT}.num_workers={episodes}", "trainer.num_threads=1", "trainer.device=cpu",
    ]  # fmt: skip
    turns = [
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        f"{AGENT}.default_agent_loop={folder / 'players.py'}:Environment",
    ]
    program = [f"{AGENT}.endpoint.program={folder / 'players.py'}:play", f"{AGENT}.endpoint.reward=program"]
    return {"turns": [*both, *turns], "endpoint": [*both, f"{AGENT}.default_agent_loop=endpoint", *program]}


def row_of(episode: int, calls: int) -> Prompt:
    """A row of data, each with another text."""
    message = {"role": "user", "content": f"Say it in episode {episode:02}."}
    text = tiny_tokenizer().apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    return Prompt(tiny_tokenizer()(text)["input_ids"], "talk", str(calls), messages=(message,))


def seconds(collect: Callable[[], ScoredResponses], episodes: int, calls: int) -> float:
    """Seconds of the episodes, after a check that the policy said in them what it always says."""
    begun = time.perf_counter()
    sampled = collect()
    taken = time.perf_counter() - begun
    assert int(sampled.rollout.response_mask.sum()) == episodes * calls * (len(SAID) + 1), sampled.texts[0]
    return taken


def measure(folder: Path, episodes: int, lengths: Sequence[int]) -> list[tuple[str, ...]]:
    """Rows of the table for so many episodes at a time."""
    rows = []
    with ExitStack() as stack:
        collectors: dict[str, Collector] = {}
        for name, keys in overrides(folder, episodes).items():
            _, collectors[name] = stack.enter_context(build_evaluator(load_config(None, keys), folder / "model"))
        for calls in lengths:
            prompts = [row_of(episode, calls) for episode in range(episodes)]
            taken: dict[str, list[float]] = {name: [] for name in collectors}
            for run in range(RUNS + 1):
                for name, collector in collectors.items():
                    limit = SamplingParams(MAX_LENGTH // 2 if name == "turns" else 64)
                    collect = lambda: collector.collect(prompts, limit, NoiseKey(0, run))  # noqa: B023, E731
                    taken[name].append(seconds(collect, episodes, calls))
            turns, endpoint = (median(taken[name][1:]) for name in collectors)  # the first warms up
            total = episodes * calls
            cells = (f"{1e3 * turns / total:.2f}", f"{1e3 * endpoint / total:.2f}", f"{endpoint / turns:.2f}")
            rows.append((str(episodes), str(calls), *cells, f"{total * (len(SAID) + 1) / endpoint:,.0f}"))
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also put the table between the marks of this page")
    arguments = parser.parse_args()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model().save_pretrained(folder / "model")
        tiny_tokenizer().save_pretrained(folder / "model")
        (folder / "players.py").write_text(PLAYERS)
        row = {
            "data_source": "talk",
            "prompt": [{"role": "user", "content": "Say it."}],
            "reward_model": {"style": "rule", "ground_truth": "2"},
        }
        write_jsonl(folder / "rows.jsonl", [row])
        table = [row for episodes, lengths in CASES.items() for row in measure(folder, episodes, lengths)]
    lines = [*grid(HEAD, table), "", f"{machine_line()}."]
    print("\n".join(lines))
    if arguments.write:
        write_between(arguments.write, BEGIN, END, "\n".join(lines))


if __name__ == "__main__":
    main()
