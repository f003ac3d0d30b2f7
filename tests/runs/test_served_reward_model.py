"""A reward model behind the real vLLM."""

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.tiny_run import GRPO, base_overrides, measured, train, write_inputs
from tests.text.servers.bench import REAL, needs_vllm
from tests.tiny import save_tiny_reward_model

SHORT = ["trainer.total_training_steps=1", "trainer.test_freq=-1", "data.val_files=[]"]
RAW = "reward_model.model.input_tokenizer=null"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    save_tiny_reward_model(folder / "rm", seed=3, hidden_size=128)  # heads of 32, the smallest that vLLM takes on a CPU
    return folder


@pytest.fixture(scope="module")
def url(inputs: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = [str(REAL), "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", "rm", "--enforce-eager"]
    where = ["--model", str(inputs / "rm"), "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    small = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}  # GiB of cache
    small.pop("PYTHONPATH", None)
    with (inputs / "vllm.log").open("w") as log:
        server = subprocess.Popen([*module, *where], stdout=log, stderr=log, env=small)
    try:
        _wait(f"http://127.0.0.1:{port}", server, inputs / "vllm.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def _wait(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(900):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except OSError:
            assert server.poll() is None, log.read_text()[-3000:]
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("more", [[], [RAW]], ids=["text", "ids"])
def test_vllm_scores_as_this_process(inputs: Path, tmp_path: Path, url: str, more: list[str]) -> None:
    """The raw output of the head; a random policy writes control tokens, too."""
    learned = ["reward_model.enable=True", f"reward_model.model.path={inputs / 'rm'}"]
    base = [*base_overrides(inputs, tmp_path), *GRPO, *SHORT, *learned, "custom_reward_function.path=null", *more]
    dtype = "reward_model.model.fsdp_config.dtype=float32"
    here = measured(train([*base, dtype, f"trainer.default_local_dir={tmp_path / 'here'}"]))[1]
    remote = [f"reward_model.server.url={url}", "reward_model.server.api=vllm", "reward_model.server.model=rm"]
    there = measured(train([*base, f"trainer.default_local_dir={tmp_path / 'there'}", *remote]))[1]
    assert there["reward/error_rate"] == 0
    for key in ("critic/score/mean", "critic/score/max", "critic/score/min"):
        assert there[key] == pytest.approx(here[key], abs=1e-4)
    assert there["critic/score/max"] - there["critic/score/min"] > 0.1
