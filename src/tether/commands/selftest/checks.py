"""All checks, in the order in which they run."""

from __future__ import annotations

from tether.commands.selftest import engines, kernels, runs, servers, speed
from tether.commands.selftest.results import Check

REPORT_IT = "Attach this report to an issue"
KERNELS = "Delete the compiled kernels (numba's __pycache__ in tether/kernels) and try again; else attach this report"
LOAD = "Run it again on an idle machine; `tether doctor` names the kernels that are used"
GPUS = "Check that every GPU answers (nvidia-smi, NCCL_DEBUG=INFO), and that no other job uses them"
SERVERS = "Read the server's log in the report's error; `tether setup NAME` makes its environment again"

CHECKS = (
    Check("limits of this machine", speed.limits, LOAD),
    Check("kernels against the reference", kernels.kernels_agree, KERNELS),
    Check("model against transformers", kernels.model_agrees, KERNELS),
    Check("first ratio is 1", engines.first_ratio, REPORT_IT),
    Check("memory settings change no gradient", engines.memory_settings, REPORT_IT),
    Check("out of memory is handled", engines.out_of_memory, REPORT_IT),
    Check("text: PPO trains and resumes bitwise", runs.text_ppo, REPORT_IT),
    Check("text: GRPO trains", runs.text_grpo, REPORT_IT),
    Check("control: PPO trains and resumes bitwise", runs.control_ppo, REPORT_IT),
    Check("control: GRPO trains", runs.control_grpo, REPORT_IT),
    Check("decoding speed", speed.decoding, LOAD),
    Check("training speed", speed.training, LOAD),
    Check("several ranks train as one device", runs.two_ranks, GPUS, quick=False),
    Check("Ulysses trains as one device", runs.ulysses, GPUS, quick=False),
    Check("FSDP2 with offload trains as one device", runs.offloaded, GPUS, quick=False),
    Check("Megatron with tensor parallelism", runs.megatron_tensor, GPUS, quick=False),
    Check("Megatron with pipeline parallelism", runs.megatron_pipeline, GPUS, quick=False),
    Check("vLLM", servers.vllm, SERVERS, quick=False),
    Check("SGLang", servers.sglang, SERVERS, quick=False),
)
