"""The `tether` command. Heavy modules are imported inside the commands that need them, so that help is fast."""

from __future__ import annotations

import errno
import gc
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tether import __version__
from tether.commands.data import data_app
from tether.commands.environments import serve, setup
from tether.commands.models import model_app
from tether.commands.options import ConfigArguments, ConfigName, ConfigPath, Threads
from tether.commands.recipes import recipe, recipe_file, recipe_names
from tether.commands.status import status
from tether.commands.view import compare, runs, view
from tether.integrations.reward_models.command import rm_app
from tether.runtime.disk import OF_THE_DISK
from tether.runtime.huge_pages import restart_with_huge_pages
from tether.runtime.install import pip_install
from tether.runtime.package_warnings import hide_warnings_of_packages
from tether.runtime.printable import printable
from tether.runtime.standard_streams import OutputLost, continue_without_output, prepare_standard_streams
from tether.runtime.terminal import Activity, Screen
from tether.runtime.user_files import append_import_path, raised_by_tether
from tether.spelling import did_you_mean

if TYPE_CHECKING:
    from tether.config import LoadedConfig, Problem, RunConfig


class BadValue(Exception):
    """A command-line option or argument has an invalid value."""


class Commands(TyperGroup):
    """The group of commands, which reports a bad value in one line, as for keys, without typer's usage text."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if type(error) is not typer.BadParameter:  # a missing argument, for which printing the usage is right
                raise
            raise BadValue(_bad_value(error)) from None


def _bad_value(error: typer.BadParameter) -> str:
    """Return what is wrong with the value of an option, with the value, which typer omits for some types."""
    names, given = error.param.opts if error.param else [], None
    for word, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        name, has_value, value = word.partition("=")
        if name in names:
            given = f"{name} {value if has_value else following}"
    if given is None:
        return error.format_message()
    return f"{given}: {error.message[:1].lower()}{error.message[1:]}"


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's option tables cut off names on a terminal of 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(name="config", help="Inspect a configuration without running it.", no_args_is_help=True)
critic_app = typer.Typer(name="critic", help="Pretrain a critic.", no_args_is_help=True)
reward_app = typer.Typer(name="reward", help="Check a reward before training.", no_args_is_help=True)
for group in (config_app, critic_app, data_app, model_app, reward_app, rm_app):
    app.add_typer(group)
app.command()(status)
for command in (view, runs, compare):
    app.command()(command)
app.command()(recipe)
app.command()(setup)
app.command(context_settings={"ignore_unknown_options": True})(serve)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"tether {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Post-train language models and control policies with PPO and its relatives."""


def _with_threads(overrides: Sequence[str] | None, threads: int | None) -> list[str]:
    return [*(overrides or []), *([] if threads is None else [f"trainer.num_threads={threads}"])]


@contextmanager
def _importing() -> Iterator[None]:
    """Disable garbage collection during imports of torch and transformers."""
    # These imports create a million objects that stay alive; collecting during import and at exit only costs time.
    if "torch" in sys.modules:  # the process belongs to another program, which may have garbage to collect
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _loading(what: str, screen: Screen) -> Iterator[None]:
    """Show immediately why the imports in the block are needed, since they take seconds."""
    with Activity(screen) as activity, _importing():
        activity.begin(f"loading {what}")
        yield


def _load(
    arguments: Sequence[str] | None,
    config_path: Path | None = None,
    config_name: str | None = None,
    *,
    files: bool = False,
    reward_inputs: bool = False,
    note: Callable[[str], None] | None = None,
    check: Callable[[RunConfig], Sequence[Problem]] = lambda config: [],
) -> LoadedConfig:
    """Load a configuration.

    Args:
        arguments: a file or the name of a recipe, and overrides.
        config_path: folder of the configuration.
        config_name: name of a file in `config_path`.
        files: whether to also report missing files, models and functions.
        reward_inputs: whether to check only the inputs of a reward.
        note: called with problems that only this machine has; if it is set, every row of the data is checked.
        check: an additional check, used if `files` is not set.
    """
    from tether.config import load_config
    from tether.text.input_checks import missing_anywhere, missing_inputs, missing_reward_inputs

    path, overrides = _split(arguments)
    named = _file_by_name(config_path, config_name)
    if path is not None and named is not None:
        raise ValueError(f"{path} and {named} are two configurations. Give one: the file, or --config-name")
    if reward_inputs:
        find_missing = missing_reward_inputs
    else:
        find_missing = partial(missing_anywhere, say=note) if note else missing_inputs
    return load_config(path or named, overrides, find_missing if files else check)


def _split(arguments: Sequence[str] | None) -> tuple[Path | None, list[str]]:
    """Split arguments into the file, which may be a recipe's, and the overrides.

    Raises:
        ValueError: the first argument is similar to the name of a recipe, or `recipe_file` raises it.
    """
    if not arguments:
        return None, []
    first, *overrides = arguments
    if first.endswith((".yaml", ".yml")) or ("=" not in first and Path(first).is_file()):
        return Path(first), overrides
    if re.fullmatch(r"[\w.-]+", first):
        if named := recipe_file(first):
            return named, overrides
        if meant := did_you_mean(first, recipe_names()):
            raise ValueError(f"{first}: no such recipe.{meant} An override is written KEY=VALUE")
    return None, [first, *overrides]


def _file_by_name(folder: Path | None, name: str | None) -> Path | None:
    """Return the YAML file that Hydra's options name; the default name is ppo_trainer, as in verl's main_ppo."""
    if folder is None and name is None:
        return None
    file = (folder or Path()) / (name or "ppo_trainer")
    return file if file.suffix in (".yaml", ".yml") else file.with_name(f"{file.name}.yaml")


def _load_embodied(arguments: Sequence[str] | None) -> LoadedConfig:
    loaded = _load(arguments)
    if loaded.config.env.train.id is None:
        raise ValueError("env.train.id: name the simulator, for example env.train.id=CartPole-v1")
    return loaded


@app.command()
def train(arguments: ConfigArguments = None, config_path: ConfigPath = None, config_name: ConfigName = None) -> None:
    """Train, or resume from the last checkpoint of the run.

    For example: tether train run.yaml trainer.total_epochs=2, or tether train quickstart (a recipe)
    """
    _train(arguments, config_path, config_name)


@app.command()
def sft(arguments: ConfigArguments = None, config_path: ConfigPath = None, config_name: ConfigName = None) -> None:
    """Fine-tune a language model on conversations, or resume from the last checkpoint of the run.

    Rows have messages, or prompt and response; the loss is that of the assistant's tokens. Keys of verl's SFT trainer
    are read, too: model.partial_pretrain, optim.lr, data.micro_batch_size_per_gpu. PPO starts from the result with
    actor_rollout_ref.model.path=RUN.

    For example: tether sft model.path=Qwen/Qwen2.5-0.5B data.train_files=chats.jsonl data.val_files=held_out.jsonl
    """
    path, overrides = _split(arguments)
    _train([*([] if path is None else [str(path)]), "sft.enable=True", *overrides], config_path, config_name)


def _train(arguments: Sequence[str] | None, config_path: Path | None, config_name: str | None) -> None:
    restart_with_huge_pages()
    continue_without_output()
    loaded = _load(arguments, config_path, config_name, files=True)
    from tether.config import masked_command

    with _loading("torch", Screen()):
        from tether.commands.report import command_to_resume, how_it_stopped, show_report
        from tether.commands.train import train as run

    try:
        result = run(loaded)
    except KeyboardInterrupt:  # before or after training, which handles the signal itself
        typer.echo("interrupted; run the same command again to start, or to resume from the last checkpoint", err=True)
        raise typer.Exit(130) from None
    screen, command = Screen(), shlex.join(masked_command(["tether", *sys.argv[1:]]))
    show_report(result.folder, screen, command_to_resume(command, loaded, result.step, result.total_steps))
    if result.stopped_by:
        screen.print(how_it_stopped(result))
        raise typer.Exit(3 if result.collapsed else 0)


@app.command(name="eval")
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="A global_step_N folder, the folder of a run (its last checkpoint), or another model: its directory, "
            "a known name or a hub id."
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN.yaml] [KEY=VALUE]...",
            help="For example data.val_files=math/test.parquet, or env.eval.num_episodes=100. RUN.yaml is for models "
            "that are not checkpoints of a run.",
        ),
    ] = None,
    threads: Threads = None,
) -> None:
    """Score a checkpoint or a model on held-out prompts, or in episodes."""
    with _loading(model, Screen(stderr=True)):
        from tether.commands.evaluate import evaluate as run

    run(model, *_split(_with_threads(arguments, threads)))


@app.command()
def play(
    checkpoint: Annotated[Path, typer.Argument(help="A global_step_N folder, or the folder of a run (its last one).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="For example env.eval.seed=3")] = None,
    episodes: Annotated[int, typer.Option("--episodes", "-n", min=1, help="Number of episodes.")] = 3,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the video; default: the run's.")] = None,
    threads: Threads = None,
) -> None:
    """Record episodes of a control policy to an mp4."""
    with _importing():
        from tether.commands.evaluate import play as run

    run(checkpoint, _with_threads(overrides, threads), episodes, out)


@app.command()
def collect(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="The policy: a checkpoint; file.py:function, called with (env, obs); or scripted, for the policy that "
            "the simulator includes (MetaWorld).",
        ),
    ],
    arguments: ConfigArguments = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the dataset (LeRobot's layout).")] = Path("demos"),
    episodes: Annotated[int, typer.Option("--episodes", "-n", min=1, help="Number of episodes.")] = 50,
    seed: Annotated[int | None, typer.Option(help="Seed of the start states; default: env.train.seed.")] = None,
    successful: Annotated[bool, typer.Option("--successful", help="Keep only episodes that solve the task.")] = False,
) -> None:
    """Record episodes of a simulator, for `tether bc`.

    For example: tether collect run.yaml --from expert.py:act --out demos -n 50
    """
    loaded = _load_embodied(arguments)
    with _importing():
        from tether.integrations.robots.clone_command import collect as run

    run(loaded, source, out, episodes, seed, only_successful=successful)


@app.command()
def bc(
    arguments: ConfigArguments = None,
    data: Annotated[Path, typer.Option(help="Folder of episodes from `tether collect` or LeRobot.")] = Path("demos"),
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the checkpoint; default: cloned in the run's folder.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Maximum number of passes over the episodes.")] = 100,
    patience: Annotated[
        int, typer.Option(min=1, help="Stop after so many passes without a better held-out loss.")
    ] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Decisions per optimizer step.")] = 64,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate of AdamW.")] = 1e-3,
    weight_decay: Annotated[float, typer.Option(min=0, help="Weight decay of AdamW.")] = 0.0,
    held_out: Annotated[float, typer.Option(min=0, max=0.9, help="Share of held-out episodes, at least one.")] = 0.1,
    bounds: Annotated[tuple[float, float], typer.Option(help="Quantiles of the actions that action tokens cover.")] = (
        0.01,
        0.99,
    ),
) -> None:
    """Behaviour cloning: imitate recorded episodes before a run.

    Start the run from the result with actor_rollout_ref.model.path.

    For example: tether bc run.yaml --data demos --epochs 50
    """
    continue_without_output()
    loaded = _load_embodied(arguments)
    with _importing():
        from tether.integrations.robots.behaviour_cloning import CloningOptions
        from tether.integrations.robots.clone_command import clone

    options = CloningOptions(lr, batch_size, epochs, patience, weight_decay)
    clone(loaded, data, out, options, held_out=held_out, bounds=bounds)


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A model directory, a run, a checkpoint, a known name or a hub id.")],
    prompts: Annotated[list[str], typer.Argument(help="Prompts; - reads standard input, @FILE the lines of a file.")],
    max_new_tokens: int = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: float = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; -1 keeps all.")] = -1,
    stop: Annotated[list[str] | None, typer.Option(help="End a reply before this text; may be repeated.")] = None,
    n: Annotated[int, typer.Option(help="Replies per prompt.")] = 1,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    seed: int = 1,
    threads: Threads = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code in the model's repository.")
    ] = False,
) -> None:
    """Generate replies to prompts and print them."""
    with _loading(model, Screen(stderr=True)):
        from tether.commands.model import generate as run

    run(
        model,
        prompts,
        n=n,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop=stop or (),
        system=system,
        seed=seed,
        num_threads=threads,
        trust_remote_code=trust_remote_code,
    )


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs; each has a colour and a name in the legend.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Path of the PNG.")] = Path("curves.png"),
    keys: Annotated[
        list[str] | None, typer.Option("--key", "-k", help="Metric to draw; default: the main ones.")
    ] = None,
    mean: Annotated[bool, typer.Option("--mean", help="Draw the mean of runs that differ only in their seed.")] = False,
    title: Annotated[str | None, typer.Option(help="Title of the page; default: the folders' names.")] = None,
) -> None:
    """Draw the curves of runs to a PNG.

    For example: tether plot runs/seed_1 runs/seed_2 --mean
    """
    try:
        from tether.metrics.plot import plot_run
    except ModuleNotFoundError as error:
        raise ValueError(f"tether plot needs {error.name}: {pip_install('quickstart')}") from error

    typer.echo(plot_run(runs, out, keys, mean=mean, title=title))


@app.command()
def card(
    run: Annotated[Path, typer.Argument(help="A global_step_N folder, or the folder of a run (its last one).")],
) -> None:
    """Write a model card (README.md) next to the weights of a trained policy.

    The card has the task, the held-out curve, the seed, the configuration and the command.
    """
    with _importing():
        from tether.commands.card import write_card

    typer.echo(write_card(run))


@app.command()
def plan(
    arguments: ConfigArguments = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Devices, such as h100-80g:8; memory=24,teraflops=120,bandwidth=900,link=10:2 for others; default: "
            "this machine, as tether doctor measured it."
        ),
    ] = None,
    host_memory: Annotated[
        float | None, typer.Option(min=1, help="GiB of host memory of a machine; default: unknown.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of machines.")] = None,
    price: Annotated[str | None, typer.Option(help="Price of a device for an hour, such as 2.5EUR.")] = None,
    prompt_mean: Annotated[float | None, typer.Option(help="Mean tokens of a prompt.")] = None,
    response_mean: Annotated[float | None, typer.Option(help="Mean tokens of a response.")] = None,
    response_tail: Annotated[
        float | None, typer.Option(help="Tokens that 99 % of the responses do not exceed.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of the training data.")] = None,
    reward_seconds: Annotated[float, typer.Option(min=0, help="Seconds of waiting for rewards in a step.")] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    brief: Annotated[bool, typer.Option("--brief", help="Print no tables.")] = False,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
) -> None:
    """Estimate what a run needs before it is started: memory by phase, time, price; exits with 1 if it does not fit.

    Given the folder of a run, compare it with its plan, and correct later plans for the device.

    For example: tether plan run.yaml --device h100-80g:8 --nodes 2
    """
    from tether.commands.plan import PlanOptions, show_plan
    from tether.plan.assumptions import Assumptions

    assumptions = Assumptions(prompt_mean, response_mean, response_tail, rows, reward_seconds)
    options = PlanOptions(
        device, nodes, price, as_json=json, brief=brief, host_memory=host_memory, assumptions=assumptions
    )
    code = show_plan(arguments or [], options, lambda words, check: _load(words, config_path, config_name, check=check))
    if code:
        raise typer.Exit(code)


@app.command()
def doctor() -> None:
    """Show installed packages, device and dtype, and what each extra adds."""
    from tether.commands.doctor import show_doctor

    show_doctor()


@app.command()
def selftest(
    quick: Annotated[bool, typer.Option("--quick", help="Only what takes a minute on two cores.")] = False,
    report: Annotated[
        Path, typer.Option("--report", help="File for versions, devices, results and tracebacks.")
    ] = Path("tether-selftest.txt"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Check that tether does on this machine what it promises, in at most 5 minutes, and write a report.

    Each line is a pass, a failure with what to do, or a check that does not apply here, with what it needs. Exits
    with 1 if a check failed.
    """
    with _importing():
        from tether.commands.selftest.command import selftest as run

    if not run(quick=quick, report=report, as_json=as_json):
        raise typer.Exit(1)


@config_app.command()
def show(arguments: ConfigArguments = None, config_path: ConfigPath = None, config_name: ConfigName = None) -> None:
    """Print the resolved configuration and the source of each value."""
    from tether.config import format_tree

    typer.echo(format_tree(_load(arguments, config_path, config_name)))


@config_app.command()
def check(
    arguments: ConfigArguments = None,
    files: Annotated[
        bool, typer.Option("--files/--no-files", help="Also check that its files, models and functions exist.")
    ] = True,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
) -> None:
    """Check a configuration and print all problems at once."""

    def print_note(note: str) -> None:
        typer.echo(f"note: {note}")

    loaded = _load(arguments, config_path, config_name, files=files, note=print_note)
    for note in loaded.notes:
        print_note(note)
    typer.echo("the configuration is sound")


@config_app.command(name="import-rlinf")
def import_rlinf(
    arguments: ConfigArguments,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Path of the YAML file; default: print it.")] = None,
) -> None:
    """Translate a YAML file of RLinf; every key is listed as mapped, defaulted, without effect, or not supported."""
    from tether.integrations.rlinf.command import translate
    from tether.integrations.verl.translation import write_translation

    write_translation(lambda: translate(arguments or []), out, Path((arguments or [""])[0]))


@config_app.command(name="import-verl")
def import_verl(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT.sh", help="A shell script that starts verl's trainer.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ARGUMENT]... [KEY=VALUE]...",
            help="Arguments of the script ($1, $2, ...), and settings that override its own.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Path of the YAML file; default: print it.")] = None,
) -> None:
    """Translate a script that starts verl to a YAML file; settings that prevent a run are listed."""
    from tether.integrations.verl.command import translate
    from tether.integrations.verl.translation import write_translation

    write_translation(lambda: translate(script, arguments or []), out, script)


@config_app.command()
def explain(
    key: Annotated[
        str | None, typer.Argument(help="For example algorithm.lam, or a section; without it, sections are listed.")
    ] = None,
    arguments: ConfigArguments = None,
    search: Annotated[str | None, typer.Option("--search", "-s", help="List the keys that contain this word.")] = None,
) -> None:
    """Explain a key: its meaning, valid values and default; with a configuration also its value and its effect."""
    from tether.config import explanations

    if search is not None:
        text = explanations.search(search)
    elif key is None:
        text = explanations.list_sections()
    else:
        text = explanations.explain(key, _load(arguments) if arguments else None)
    typer.echo(text)


@critic_app.command()
def pretrain(
    arguments: ConfigArguments = None,
    rollouts: Annotated[Path | None, typer.Option(help="Stored rollouts; default: trainer.rollout_data_dir.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of the critic; default: pretrained_critic in the run's folder."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the rollouts.")] = 1,
    held_out: Annotated[float, typer.Option(min=0, max=0.9, help="Share of held-out prompts, at least one.")] = 0.1,
) -> None:
    """Train a critic on the rollouts of an earlier run.

    Start a new run from the result with critic.model.path.

    For example: tether critic pretrain run.yaml --rollouts rollouts --epochs 2
    """
    continue_without_output()
    loaded = _load(arguments)
    with _importing():
        from tether.commands.critic import pretrain_critic

    pretrain_critic(loaded, rollouts, out, epochs=epochs, held_out=held_out)


@reward_app.command(name="check")
def check_reward(
    arguments: ConfigArguments = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows of the training data.")] = 64,
    samples: Annotated[int, typer.Option(min=0, help="Replies of the untrained policy; 0 loads no policy.")] = 32,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="PNG of the scores; default: none.")] = None,
) -> None:
    """Check the reward before training on ground truths, wrong replies and sampled replies.

    Exits with 1 if it rewards wrong replies or fails. For example: tether reward check run.yaml --samples 0
    """
    loaded = _load(arguments, files=True, reward_inputs=not samples)
    with _importing():
        from tether.commands.reward import check_reward as run

    if not run(loaded, rows=rows, samples=samples, out=out):
        raise typer.Exit(1)


BROKEN_PIPE = 128 + signal.SIGPIPE
"""Exit code that shells report for a program whose stdout was closed."""


def main() -> None:
    """Run the command line; an error that the user can fix is printed without a traceback, with exit code 2.

    If stdout is closed before a command has printed everything, the exit code is 141 and nothing is reported, as is
    usual for programs; on a full disk it is 2. Commands that write files, such as training, continue and exit as usual.
    """
    prepare_standard_streams()
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # otherwise libraries would draw progress bars in files and pipes
    hide_warnings_of_packages()
    # Like `python -m`, because a user's files import packages from the working directory.
    append_import_path(Path.cwd())
    red = None if os.environ.get("NO_COLOR") else typer.colors.RED
    try:
        app()
    except SystemExit as end:
        code = BROKEN_PIPE if isinstance(end.__context__, BrokenPipeError) else end.code  # typer and rich exit with 1
        if option := getattr(end.__context__, "option_name", ""):
            from tether.config import key_written_as

            if key := key_written_as(option):
                typer.echo(f"Keys are written without dashes: {key}=...", err=True)
    except Exception as error:  # noqa: BLE001  all errors are printed, because their text may contain escape sequences
        message = _for_the_user(error)
        code = 1 if message is None else 2
        typer.secho(printable(message or traceback.format_exc()), fg=red if message else None, err=True)
    else:
        code = 0
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = code or BROKEN_PIPE
    except OutputLost as error:
        typer.secho(error.strerror, fg=red, err=True)
        code = code or 2
    raise SystemExit(code)


def _for_the_user(error: Exception) -> str | None:
    """Return the message of an error that the user can fix, or None for a bug.

    Such errors are tether's own classes, ValueErrors that tether raised, a full or read-only disk, and a lack of
    memory. A ValueError raised by a library or by the user's code is not one of them, because it needs its traceback.
    """
    if "torch" in sys.modules:
        from tether.loop.engine import out_of_memory_message

        if (message := out_of_memory_message(error)) is not None:
            return message
    if isinstance(error, OSError) and error.errno in (*OF_THE_DISK, errno.ENAMETOOLONG) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if type(error).__module__.startswith("tether.") or (type(error) is ValueError and raised_by_tether(error)):
        message = (isinstance(error, OSError) and error.strerror) or str(error)
        return "\n".join([message, *getattr(error, "__notes__", ())])
    return None
