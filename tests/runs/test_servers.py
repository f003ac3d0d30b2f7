"""Whole runs that sample by servers: by stand-ins of vLLM and SGLang everywhere, and by vLLM where it is there."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.installed import needs_megatron
from tests.runs.forked_group import ForkedGroup
from tests.runs.tiny_run import GRPO, LIGHT, base_overrides, measured, same, set_eos, train, weights, write_inputs
from tests.text.servers.bench import REAL, STAND_INS, needs_vllm, processes_of
from tests.text.servers.stand_in import environment
from tests.tiny import EOS_ID, save_tiny
from tether.checkpoints.store import TRACKER
from tether.commands.build import build
from tether.config import ConfigError, load_config
from tether.distributed import groups
from tether.text.build import build_run
from tether.text.input_checks import missing_inputs

ROLLOUT = "actor_rollout_ref.rollout"
SIZES = ("parity_freq=2", "gpu_memory_utilization=0.1", "enforce_eager=True", "server_timeout=900")
SETTINGS = [*GRPO, *LIGHT, *(f"{ROLLOUT}.{size}" for size in SIZES)]
VLLM, SGLANG = ([*SETTINGS, f"{ROLLOUT}.name={kind}"] for kind in ("vllm", "sglang"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs of a run, whose model vLLM takes, too: its heads are 32 wide."""
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    set_eos(save_tiny(folder / "model", "qwen2", hidden_size=128), [EOS_ID, *range(4, 90)])
    return folder


@pytest.fixture
def inputs(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of them, in the folder of the test, and environments of both kinds of servers."""
    for kind in STAND_INS:
        monkeypatch.setenv(f"TETHER_{kind.upper()}", str(environment(tmp_path / kind, kind=kind)))
    return shutil.copytree(written, tmp_path, dirs_exist_ok=True)


def check_steps(directory: Path, *steps: int) -> None:
    """The steps were done, with samples of the policy that learned from them."""
    metrics = measured(directory)
    assert [step for step in metrics if step] == list(steps)
    for step in steps:
        assert metrics[step]["training/rollout_mismatch_alarm"] == 0
        assert metrics[step]["rollout_corr/k3_kl"] < 1e-7
        assert metrics[step]["actor/grad_norm"] > 0
    assert all(map(math.isfinite, metrics[steps[-1]].values()))


def without_transfers(run: Path) -> dict[int, dict[str, float]]:
    steps = measured(run).items()
    return {step: {key: value for key, value in found.items() if "transfer/" not in key} for step, found in steps}


@contextmanager
def another_server(model: Path, kind: str = "vllm", faults: str = "", **options: int) -> Iterator[str]:
    """The override that names it."""
    server = STAND_INS[kind].serve(str(model), 0, set(filter(None, [faults])), **options)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"{ROLLOUT}.server_urls=[http://127.0.0.1:{server.server_port}]"
    server.shutdown()
    server.server_close()


SLOW_SGLANG = pytest.param("sglang", marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", ["vllm", SLOW_SGLANG])
def test_a_resumed_run_is_the_uninterrupted_one(inputs: Path, kind: str) -> None:
    """Its server is another, and has other weights at first."""
    whole, resumed = inputs / "whole", inputs / "resumed"
    for folder in (whole, resumed):
        options = ["trainer.save_freq=1", "trainer.total_training_steps=2"]
        if folder == resumed:
            path = f"trainer.resume_from_path={whole / 'global_step_1'}"
            options += ["trainer.resume_mode=resume_path", path]
        with another_server(inputs / "model", kind) as url:
            train([*base_overrides(inputs, folder), *SETTINGS, *options, f"{ROLLOUT}.name={kind}", url])
    check_steps(whole, 1, 2)
    check_steps(resumed, 2)
    assert same(weights(whole / "global_step_2"), weights(resumed / "global_step_2"))
    assert without_transfers(whole)[2] == without_transfers(resumed)[2]  # this server gets the weights at its beginning


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank"), [*((kind, 0) for kind in STAND_INS), ("vllm", 4)])
def test_a_server_gets_the_weights_of_megatrons_ranks(
    inputs: Path, kind: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put together from two ranks that share the matrices, or the adapters: samples of steps 1 and 2 are the
    policy's."""
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    actor = "actor_rollout_ref.actor"
    sizes = [f"{actor}.megatron.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"]
    two = [f"{actor}.strategy=megatron", "trainer.total_training_steps=2", f"{ROLLOUT}.name={kind}", *sizes]
    two += [f"actor_rollout_ref.model.lora_rank={rank}"]
    with another_server(inputs / "model", kind, **({"rank": 8} if rank else {})) as url:
        run = train([*base_overrides(inputs, inputs / "run"), *SETTINGS, *two, url])
    check_steps(run, 1, 2)
    moved = measured(run)
    assert moved[2]["transfer/weights_bytes"] > 0
    assert moved[1]["rollout_corr/k3_kl"] != moved[2]["rollout_corr/k3_kl"]


AHEAD = {
    "one_step_off": ["trainer.async_mode=one_step_off"],
    "fully_async": ["trainer.async_mode=fully_async"],
    "partial": ["trainer.async_mode=fully_async", f"{ROLLOUT}.partial_rollout=True", f"{ROLLOUT}.max_num_seqs=2"],
}


@pytest.mark.parametrize("mode", ["one_step_off", pytest.param("fully_async", marks=pytest.mark.slow), "partial"])
def test_the_server_samples_while_the_policy_learns(inputs: Path, mode: str) -> None:
    """Its log-probs are those of the weights that it had: step 1 agrees exactly, step 2 is one update behind."""
    ahead = [*AHEAD[mode], "trainer.total_training_steps=3", "trainer.test_freq=3",
             f"trainer.rollout_data_dir={inputs / 'rows'}"]  # fmt: skip
    with another_server(inputs / "model") as url:
        metrics = measured(train([*base_overrides(inputs, inputs / "run"), *VLLM, *ahead, url]))
    assert metrics[1]["training/staleness"] == 0
    assert metrics[1]["rollout_corr/k3_kl"] < 1e-7
    rows = [json.loads(line) for line in (inputs / "rows" / "3.jsonl").read_text().splitlines()]
    behind = {2 - row["policy_version"] for row in rows}
    assert (
        max(behind) <= metrics[3]["training/staleness"]
        if mode == "partial"
        else behind == {metrics[3]["training/staleness"]}
    )
    if mode == "one_step_off":
        assert metrics[2]["training/staleness"] == metrics[3]["training/staleness"] == 1
        assert metrics[2]["rollout_corr/k3_kl"] > 1e-7
    assert all(math.isfinite(metrics[3][key]) for key in ("actor/pg_loss", "actor/grad_norm"))


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("mode", AHEAD)
def test_vllm_samples_while_the_policy_learns(inputs: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    assert REAL is not None
    monkeypatch.setenv("TETHER_VLLM", str(REAL.parent.parent))
    options = ["trainer.test_freq=2", "trainer.total_training_steps=4", *AHEAD[mode]]
    metrics = measured(train([*base_overrides(inputs, inputs / "run"), *VLLM, *options]))
    assert metrics[1]["rollout_corr/k3_kl"] < 1e-7
    assert metrics[4]["training/staleness"] <= 1
    assert metrics[4]["actor/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["disk", "tensor", "distributed"])
def test_a_run_by_a_server_of_sglang_that_tether_starts(inputs: Path, way: str) -> None:
    options = ["trainer.test_freq=1", "trainer.total_training_steps=3", f"{ROLLOUT}.weight_transfer={way}"]
    check_steps(train([*base_overrides(inputs, inputs / "run"), *SGLANG, *options]), 1, 2, 3)


ADAPTERS, MERGED = "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=True"
PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size=2"
FROM_FILES = f"{ROLLOUT}.load_format=safetensors"


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [[], [ADAPTERS], [ADAPTERS, MERGED], [PARALLEL], [ADAPTERS, PARALLEL], [FROM_FILES], [ADAPTERS, FROM_FILES]],
    ids=["", "adapters", "merged", "parallel", "adapters-parallel", "files", "adapters-files"],
)
def test_a_run_by_vllm(inputs: Path, monkeypatch: pytest.MonkeyPatch, what: list[str]) -> None:
    assert REAL is not None
    monkeypatch.setenv("TETHER_VLLM", str(REAL.parent.parent))
    options = ["trainer.test_freq=1", "trainer.total_training_steps=4", *what]
    check_steps(train([*base_overrides(inputs, inputs / "run"), *VLLM, *options]), 1, 2, 3, 4)


@pytest.mark.parametrize(("kind", "merge"), [("vllm", False), ("sglang", True)])
def test_adapters_reach_the_server(inputs: Path, kind: str, *, merge: bool) -> None:
    """As such after the first update, or added into all weights each time."""
    settings = [*SETTINGS, f"{ROLLOUT}.name={kind}", ADAPTERS, f"actor_rollout_ref.model.lora.merge={merge}"]
    settings += ["trainer.total_training_steps=2"]
    with another_server(inputs / "model", kind, **({} if merge else {"rank": 8})) as url:
        run = train([*base_overrides(inputs, inputs / "run"), *settings, url])
    check_steps(run, 1, 2)
    sizes = {step: found["transfer/weights_bytes"] for step, found in measured(run).items() if step}
    assert sizes[2] > 0
    assert sizes[1] == 2 * sizes[2] if merge else sizes[1] > 5 * sizes[2]  # at its beginning and at its end


@pytest.mark.slow
def test_adapters_reach_a_server_that_tether_starts(inputs: Path) -> None:
    partial = ["trainer.async_mode=fully_async", f"{ROLLOUT}.partial_rollout=True", f"{ROLLOUT}.max_num_seqs=2"]
    metrics = measured(train([*base_overrides(inputs, inputs / "run"), *VLLM, ADAPTERS, *partial]))
    assert metrics[1]["rollout_corr/k3_kl"] < 1e-7
    assert metrics[3]["actor/grad_norm"] > 0
    assert metrics[1]["transfer/weights_bytes"] > 5 * metrics[3]["transfer/weights_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_begins_with_the_files_of_the_policy(inputs: Path, kind: str) -> None:
    """Of a policy with adapters, vLLM is then sent these alone, from the beginning."""
    settings = [*SETTINGS, f"{ROLLOUT}.name={kind}", ADAPTERS, f"{ROLLOUT}.load_format=auto"]
    run = train([*base_overrides(inputs, inputs / "run"), *settings, "trainer.total_training_steps=2"])
    check_steps(run, 1, 2)
    sent = [found["transfer/weights_bytes"] for step, found in measured(run).items() if step]
    model = 4 * sum(value.numel() for value in AutoModelForCausalLM.from_pretrained(inputs / "model").parameters())
    assert sent[0] == 2 * sent[1]  # at the beginning of the first step and at its end
    assert sent[1] < model / 5 if kind == "vllm" else sent[1] == model


def test_a_server_reads_no_files_of_a_model_before(inputs: Path) -> None:
    command_of(inputs, *VLLM, FROM_FILES)
    policy = AutoModelForCausalLM.from_pretrained(inputs / "model")
    (inputs / "model/model.safetensors").unlink()
    policy.save_pretrained(inputs / "model", max_shard_size="100KB")
    shards = {file.name for file in (inputs / "model").glob("model*")}
    assert len(shards) > 2
    command_of(inputs, *VLLM, FROM_FILES)
    assert {file.name for file in (inputs / "run/vllm/model").glob("model*")} == shards


def test_a_server_reads_the_files_that_the_trainer_reads(inputs: Path) -> None:
    """Beside them lie the same weights in another layout, as in folders of Mistral, and what is no weight at all."""
    for name in ("consolidated.safetensors", "adapter_model.safetensors", "optimizer.bin"):
        (inputs / "model" / name).write_bytes(b"")
    command_of(inputs, *VLLM, FROM_FILES)
    files = {*(inputs / "run/vllm/model").glob("*.safetensors"), *(inputs / "run/vllm/model").glob("*.bin")}
    assert {file.name for file in files} == {"model.safetensors"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            [f"{ROLLOUT}.load_format=safetensors"],
            r"load_format=safetensors: .*/model has no \*.safetensors files, .*dummy",
        ),
        ([f"{ROLLOUT}.load_format=tensorizer"], r"load_format.*tensorizer"),
    ],
)
def test_files_that_servers_could_not_begin_with_are_refused(inputs: Path, settings: list[str], message: str) -> None:
    (inputs / "model/model.safetensors").rename(inputs / "model/pytorch_model.bin")  # only the name is looked at here
    with pytest.raises((ConfigError, ValueError), match=message):
        build_run(load_config(None, [*base_overrides(inputs, inputs / "run"), *VLLM, *settings]))


@pytest.mark.slow
@pytest.mark.parametrize("python", [pytest.param(None, id="stand-in"), pytest.param(REAL, marks=needs_vllm, id="vllm")])
def test_a_run_goes_on_after_kills(inputs: Path, monkeypatch: pytest.MonkeyPatch, python: Path | None) -> None:
    """SIGKILL ends the trainer after its first checkpoint, and the server with it; then the next server, while the
    run goes on. Its weights are those of the undisturbed run, bit for bit: the seeds of rows are the same, and training
    computes log-probs by itself."""
    if python is not None:
        monkeypatch.setenv("TETHER_VLLM", str(python.parent.parent))
    options = [*VLLM, "trainer.save_freq=1", "trainer.total_training_steps=3"]
    options += [f"custom_reward_function.path={inputs / 'reward.py'}"]  # which another process finds
    whole, killed = inputs / "whole", inputs / "killed"
    train([*base_overrides(inputs, whole), *options])
    process = multiprocessing.get_context("spawn").Process(
        target=train, args=([*base_overrides(inputs, killed), *options],)
    )
    process.start()
    while not (killed / TRACKER).exists():
        assert process.is_alive()
        time.sleep(0.05)
    process.kill()
    process.join()
    reached = int((killed / TRACKER).read_text())
    assert reached < 3

    run = build_run(load_config(None, [*base_overrides(inputs, killed), *options]))
    engine = run.trainer.rollouts.collector.engine._engine
    victims: list[int] = []

    def interrupted() -> bool:
        if run.trainer.step_number > reached and not victims:
            victims.extend(one.pid for one in processes_of(engine.servers[0]))
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
        return False

    try:
        run.trainer.fit(interrupted)
    finally:
        run.close()
    assert victims
    check_steps(whole, 1, 2, 3)
    check_steps(killed, 1, 2, 3)
    assert same(weights(whole / "global_step_3"), weights(killed / "global_step_3"))
    failures = [
        sum(step.get("transfer/server_failures", 0) for step in measured(run).values()) for run in (whole, killed)
    ]
    assert failures == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "one_step_off"])
def test_shards_are_put_together_for_the_server(inputs: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server samples while two devices learn, too: of the weights of one update before."""
    monkeypatch.setattr(groups, "_start_group", ForkedGroup)
    options = ["trainer.n_gpus_per_node=2", f"trainer.async_mode={mode}"]
    with another_server(inputs / "model") as url:
        run = train([*base_overrides(inputs, inputs / "run"), *VLLM, url, *options])
    if mode == "off":
        check_steps(run, 1, 2, 3)
    else:
        metrics = measured(run)
        assert [metrics[step]["training/staleness"] for step in (1, 2, 3)] == [0, 1, 1]
        assert metrics[1]["rollout_corr/k3_kl"] < 1e-7 < metrics[2]["rollout_corr/k3_kl"]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_without_a_server_its_command_is_named(inputs: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv(f"TETHER_{kind.upper()}", str(inputs / "nowhere"))
    overrides = [*base_overrides(inputs, inputs / "run"), *SETTINGS, f"{ROLLOUT}.name={kind}"]
    words = rf"none is at TETHER_{kind.upper()}=.*nowhere. Run tether setup {kind}.*server_urls.*rollout.name=native"
    with pytest.raises(ConfigError, match=words):
        load_config(None, overrides, missing_inputs)
    with pytest.raises(ValueError, match=words):
        build(load_config(None, overrides))
    assert not missing_inputs(load_config(None, [*overrides, f"{ROLLOUT}.server_urls=[http://localhost:1]"]).config)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_environment_without_the_server_is_named(inputs: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Before anything is loaded."""
    monkeypatch.setenv(f"TETHER_{kind.upper()}", sys.prefix)
    overrides = [*base_overrides(inputs, inputs / "run"), *SETTINGS, f"{ROLLOUT}.name={kind}"]
    with pytest.raises(ConfigError, match=rf"{sys.prefix}/bin/python does not have it. Run tether setup {kind}"):
        load_config(None, overrides, missing_inputs)


def test_what_is_no_address_of_a_server_is_refused(inputs: Path) -> None:
    for url in ("here", "127.0.0.1:8000", "https://host", "http://:80", "http://h:x", "http://h:1/v1"):
        overrides = [*base_overrides(inputs, inputs / "run"), *VLLM, f"{ROLLOUT}.server_urls=['{url}']"]
        words = f"{ROLLOUT}.server_urls.*{url}: is no address of a server; give http://HOST"
        with pytest.raises(ConfigError, match=words):
            load_config(None, overrides, missing_inputs)
    with pytest.raises(ValueError, match=f"{ROLLOUT}.server_urls={url}: is no address of a server"):
        build(load_config(None, overrides))


def test_a_wait_for_a_server_is_said(inputs: Path, caplog: pytest.LogCaptureFixture) -> None:
    dead = [f"{ROLLOUT}.server_urls=[http://127.0.0.1:9]", f"{ROLLOUT}.server_timeout=3"]
    with pytest.raises(
        ValueError, match=r"http://127\.0\.0\.1:9: no vLLM server answers within .*server_timeout=3 seconds"
    ):
        train([*base_overrides(inputs, inputs / "run"), *VLLM, *dead])
    assert "Connection refused; the run waits up to 3 seconds for the server" in caplog.text


@pytest.mark.parametrize(
    ("kind", "faults", "message"),
    [
        ("vllm", "another_vocabulary", r"of vocabulary \d+; actor_rollout_ref.model.path has vocabulary \d+. Start it"),
        ("sglang", "another_model", r"a llama; actor_rollout_ref.model.path is a qwen2"),
    ],
)
def test_a_server_of_another_model_is_named_before_anything_is_loaded(
    inputs: Path, kind: str, faults: str, message: str
) -> None:
    for file in (inputs / "model").glob("*.safetensors"):
        file.write_bytes(b"no weights: reading them would be another error")
    with another_server(inputs / "model", kind, faults) as url, pytest.raises(ValueError, match=message):
        build(load_config(None, [*base_overrides(inputs, inputs / "run"), *SETTINGS, f"{ROLLOUT}.name={kind}", url]))


def command_of(inputs: Path, *settings: str) -> tuple[set[str], Mapping[str, str]]:
    """The words of the server's command line, and its environment."""
    run = build_run(load_config(None, [*base_overrides(inputs, inputs / "run"), *settings]))
    (server,) = run.trainer.rollouts.collector.engine._engine.servers
    run.close()
    return set(server.launch_or_url.command(1234)), server.launch_or_url.environment


def test_options_of_servers_in_other_spellings(inputs: Path) -> None:
    """With hyphens, as on the command line; null is none, as in verl."""
    own = "{load-format: auto, max-model-len: 80, seed: null, swap_space: null}"
    words, _ = command_of(inputs, *VLLM, f"{ROLLOUT}.engine_kwargs.vllm={own}")
    assert {"--load-format=auto", "--max-model-len=80", "--seed=0"} <= words
    assert not {word for word in words if "dummy" in word or "72" in word or "None" in word}
    assert (inputs / "run/vllm/model/model.safetensors").is_symlink()
    assert "--load-format=dummy" in command_of(inputs, *VLLM, f"{ROLLOUT}.engine_kwargs.vllm={{load_format: null}}")[0]


def test_keys_of_verl_reach_the_command_line_of_vllm(inputs: Path) -> None:
    words, environment = command_of(
        inputs, *VLLM, f"{ROLLOUT}.max_num_seqs=7", f"{ROLLOUT}.max_num_batched_tokens=99",
        f"{ROLLOUT}.enable_chunked_prefill=False", f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.top_k=5",
        f"{ROLLOUT}.engine_kwargs.vllm={{swap_space: 3, seed: 4, compilation_config: {{mode: 0}}}}",
    )  # fmt: skip
    assert {"--port=1234", "--max-num-seqs=7", "--max-num-batched-tokens=99", "--no-enable-chunked-prefill"} <= words
    assert {"--tensor-parallel-size=2", "--gpu-memory-utilization=0.1", "--enforce-eager", "--dtype=float32"} <= words
    assert {"--load-format=dummy", "--max-model-len=72", "--max-logprobs=5", "--swap-space=3", "--seed=4"} <= words
    assert '--compilation-config={"mode": 0}' in words
    for settings in ([f"{ROLLOUT}.load_format=hf"], [f"{ROLLOUT}.engine_kwargs.vllm={{load_format: auto}}"]):
        assert "--load-format=auto" in command_of(inputs, *VLLM, *settings)[0]
    assert "--load-format=dummy" in command_of(inputs, *VLLM, f"{ROLLOUT}.load_format=dummy_dtensor")[0]
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"


def test_keys_of_verl_reach_the_command_line_of_sglang(inputs: Path) -> None:
    settings = (f"{ROLLOUT}.max_num_seqs=7", f"{ROLLOUT}.max_num_batched_tokens=99", f"{ROLLOUT}.top_k=3000",
                f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.enable_prefix_caching=False")  # fmt: skip
    words, _ = command_of(inputs, *SGLANG, *settings, f"{ROLLOUT}.engine_kwargs.sglang={{attention_backend: triton}}")
    assert {"--port=1234", "--tp-size=2", "--max-running-requests=7", "--max-prefill-tokens=99"} <= words
    assert {"--chunked-prefill-size=99", "--disable-radix-cache", "--disable-cuda-graph", "--dtype=float32"} <= words
    assert {"--mem-fraction-static=0.1", "--context-length=72", "--load-format=dummy", "--device=cpu"} <= words
    assert {"--skip-tokenizer-init", "--enable-deterministic-inference", "--attention-backend=triton"} <= words
    assert "--sampling-mask-max-tokens=6000" in words
    assert not any("memory-saver" in word or "cpu-backup" in word or word.startswith("--no-") for word in words)
    words, _ = command_of(inputs, *SGLANG, f"{ROLLOUT}.enable_chunked_prefill=False", f"{ROLLOUT}.enforce_eager=False")
    assert "--chunked-prefill-size=-1" in words
    assert not {"--disable-cuda-graph", "--disable-radix-cache"} & words


def test_options_of_the_other_kind_have_no_effect(inputs: Path) -> None:
    other = f"{ROLLOUT}.engine_kwargs.vllm={{swap_space: 3}}"
    notes = load_config(None, [*base_overrides(inputs, inputs / "run"), *SGLANG, other]).notes
    assert any("engine_kwargs.vllm" in note and f"{ROLLOUT}.name is sglang" in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([f"{ROLLOUT}.top_p=0.9"], r"0.9 alone: vllm tells which tokens it kept only together with"),
        ([f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.top_p=0.9"], r"0.9 alone: sglang tells which tokens it kept only"),
        ([f"{ROLLOUT}.name=trtllm"], r"tether has no client for it: set native, vllm or sglang"),
    ],
)
def test_what_servers_cannot_do_is_refused_at_once(inputs: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*base_overrides(inputs, inputs / "run"), *VLLM, *settings])


def test_options_of_servers_have_no_effect_on_those_of_others(inputs: Path) -> None:
    urls = f"{ROLLOUT}.server_urls=[http://localhost:1]"
    notes = load_config(None, [*base_overrides(inputs, inputs / "run"), *VLLM, urls]).notes
    assert any(f"{ROLLOUT}.enforce_eager=True" in note and "server_urls is" in note for note in notes)
