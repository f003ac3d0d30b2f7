"""Shell scripts that start verl: read as bash reads them, without being run, and written as configurations."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tether.commands.cli import app
from tether.config import ConfigError, load_config
from tether.config.importers.verl.command import translate
from tether.config.importers.verl.shell import read_script
from tether.config.importers.verl.words import UNKNOWN

HOME = {"HOME": "/home/me"}


def words_of(text: str) -> list[tuple[str, ...]]:
    return [command.words[1:] for command in read_script(text, HOME).commands if command.words[0] == "cmd"]


def bash(text: str) -> list[tuple[str, ...]]:
    """The arguments of each `cmd`, as bash itself gives them."""
    prelude = "set -f\ncmd() { printf '%s\\0' \"$@\"; printf '\\1'; }\n"
    out = subprocess.run(["bash", "-c", prelude + text], env=HOME, capture_output=True, check=True, text=True).stdout
    return [tuple(call.split("\0")[:-1]) if call else () for call in out.split("\1")[:-1]]


CASES = {
    "continued lines": "cmd a.b=1 \\\n   c.d=2 \\\n\te=3\ncmd f=4",
    "quotes": """cmd a='x y' b="x y" c=x\\ y 'd'e"f" "" '' g=""",
    "quotes in quotes": """cmd logger='["console","wandb"]' l=['console'] x="it's" y="a \\"b\\" \\$c" """,
    "variables": 'A=1\nB="two words"\ncmd $A "$B" $B x$A-${B} \'$A\' a=$B',
    "lists of files": """f=$HOME/a.parquet\ng="['$f', '$HOME/b.parquet']"\ncmd data.train_files="$g" v=$f""",
    "defaults": 'A=set\ncmd ${A:-no} ${B:-"quoted"} ${C:-} x${D:-$A}y "${E:-a b}" ${F-z}',
    "defaults in defaults": "A=\nB=b\ncmd ${A:-${B:-8}} ${A:-8} ${A-8}x ${C:-${D:-${B}_$B-d}}e ${C:-x{}}",
    "arrays": """A=(a=1 "b=2 3" # comment
  c=$HOME)
A+=(d=4)
cmd "${A[@]}" ${A[@]} x"${A[@]}"y
NONE=()
cmd "${NONE[@]}" a""",
    "positional parameters": 'cmd a=1 $@ "$@" "${@}" ${@:1}',
    "comments": "# cmd no\ncmd a#b # c\ncmd x\\#y",
    "several on a line": "A=1; cmd $A && cmd b | cat; cmd c &\nwait",
    "redirections": "cmd a=1 2>&1 b=2 >/dev/stdout",
    "a comment after a backslash": "cmd a=1 \\  # reason\nA=2\ncmd b",
    "a comment between lines": "cmd a=1 \\\n  # reason\nA=2\ncmd b",
    "arithmetic": 'A=$((1024 * 2))\nB=$((A + ${A}/3))\ncmd $A $((-7 / 2)) $((-7 % 3)) x$(($B - 1))y "$(( (1+2)*3 ))"',
    "shifts and bits": "A=3\ncmd $((1<<6)) $((1 << A + 1)) $((64>>2)) $((-8 >> 1)) $((6 & 3 | 8 ^ 1)) $((1<<62))",
    "heredocs": "cat > /dev/null <<'EOF'\ndon't cmd\nEOF\ncmd a\ncat <<-X > /dev/null; cmd b\ncmd no\n\tX\ncmd c",
    "export": "export A=1 B='x y'\nexport A\ncmd $A $B",
    "declarations": "declare -r A=1\ndeclare -x B=2\nexport C D=4\nreadonly E\ntypeset F=6 G H=8\ncmd $A $B $D $F $H",
    "appended": "A=x\nA+=y\ncmd $A",
    "an empty variable": 'A=\ncmd $A "$A" x$A',
    "tildes": "D=~/data\nexport E=~\ncmd $D $E ~/x a=~/y '~/z' a.b=~/c x~/y ~reward_model.sandbox_fusion ~",
    "conditions that hold": "A=1 && B=2 && cmd $A $B\ncd / && cmd a",
    "a subshell": "A=1\n(A=2; cmd $A)\n(\nB=3\ncmd $B\n)\ncmd $A",
    "a group": "A=1\n{ A=2; cmd $A; }\ncmd $A",
    "an argument list": 'set -- a=1 "b c"\ncmd "$@" $1 "$2" x${3}y ${3:-none}',
    "no arguments": "cmd ${1:-a} ${2-b} x${3:+c}",
    "forms of an unset variable": ': ${A:=a} "${B:=b c}"\nC=\ncmd $A "$B" ${C:+n}x ${A:+y} ${C+set} ${A?gone} ${C:-d}',
    "quotes in a default": 'A=a\ncmd ${B:-"x"_\'y\'} "${B:-\'q\'}" ${B:-x\\}y} "${B:-"}"}" ${B:-${C:-"d e"}}',
    "brackets in quotes": "cat <(echo ')' \"(\") > /dev/null\n: $(echo ')' \"(\" \\( )\ncmd a",
    "odd ends of heredocs": 'cat > /dev/null <<\\EOF\ncmd a\nEOF\ncat > /dev/null <<"E-1"\ncmd b\nE-1\ncmd c',
    "a comparison": "if [[ a < b && ( x == y || 1 == 1 ) ]]; then :; fi\ncmd a",
    "a removed variable": "A=1\nB=2\nunset A\ncmd ${A:-none} $B",
    "dollars before quotes": "cmd $'a b' $\"c d\" \"$'e'\"",
    "what follows an exit": "cmd a\nexit\ncmd b",
    "a function": 'A=1\nf() { cmd $A "$@" $# $1; }\nA=2\nf x "y z"\nA=3 f\ncmd $A\nf()\n{\ncmd other\n}\nf',
    "functions in functions": "function f {\n  g in\n  cmd after $1\n}\ng() { local A=$1; cmd $A; }\nA=0\nf x\ncmd $A",
    "a function that sets and returns": "f() { A=2; return; A=3; }\nf\ncmd $A",
    "one that is never called": "f() { cmd no; A=2; }\nA=1\ncmd $A",
    "a body of one line": "A=1; f() { A=2; cmd $A; }; cmd $A; f; cmd $A",
    "assignments in order": 'A=1 B=$A\ncmd $B\nA=2 B=${A}x C=$B\ncmd "$C"\nA=9 cmd $A',
    "an array in an assignment": 'F=(a "b c")\nN="${F[@]}"\nM="x${F[*]}y"\ncmd "$N" "$M" "${F[*]}" z"${F[*]}"',
    "elements": 'F=(a "b c" d)\ncmd ${F[0]} "${F[1]}" "[${F[2]}]" ${F[3]:-none} "${F[@]:1}" ${F[@]:1:1} x"${F[@]:3}"',
    "arguments from the second": 'set -- a "b c" d\ncmd "${@:2}" ${@:3:1}',
    "an array that may be empty": """N=()
F=(a "b c")
cmd "${N[@]+"${N[@]}"}" ${F[@]+"${F[@]}"} "${F[@]+"${F[@]}"}" ${N[@]+"x"}""",
    "an array that is assigned to": "F=(a b)\nF+=x\ncmd ${F[@]}\nF=y\ncmd ${F[@]}",
    "what a pipe and & keep apart": """A=1
A=2 | cat
{ A=3; } | cat
A=4 &
true | { A=5; cat; }
{ A=6; } &
wait
cmd $A""",
    "both streams redirected": "cmd a=1 &>/dev/stdout b=2\ncmd c &>> /dev/stdout",
    "a redirection over lines": "cmd a >\t/dev/stdout b\ncmd c > \\\n /dev/stdout d",
    "heredocs in substitutions": "A=$(cat <<EOF\nit's ) # (\nEOF\n)\ncmd b\n: $(cmd x # it's )\n)\ncmd c",
    "an indented end": "cat > /dev/null <<EOF\n\tEOF\ncmd no\nEOF\ncmd a",
    "folders": "cd /tmp\ncd /\ncmd $PWD $OLDPWD\npushd / > /dev/null\ncmd $PWD\ncd usr/../bin\ncmd a=$PWD",
    "an argument list without --": "set a 'b c'\ncmd \"$@\" $#x",
    "defaults with tildes and quotes": "cmd ${A:-~/x} \"${A:-~/x}\" \"${A:-'q'}\" ${A:-'b c'}x",
    "options of declare": 'B="x y"\nf() { declare -r A=$B; local C=$B; cmd "$A" "$C"; }\nf\nexport -n D=$B\ncmd "$D"',
    "braces that are no list": 'cmd a={} b={x} c="{a,b}" {a:1}\nA={1,2}\ncmd $A',
    "exec": "cmd a\nexec true\ncmd d",
    "a split by the usual blanks": 'IFS=$(printf x)\nunset IFS\nA="a b"\ncmd $A',
    "places of tildes": 'A=${N+}~/ B=""~/ C=x:~/y D=x\\:~/y\nX=(a=~/ ~/c)\ncmd $A $B $C $D "${X[@]}" a=b:~/v \'a\'=~/',
    "arguments that are not there": 'set --\ncmd ${2-e} "$2" "${2}" "${*}" "$*" "$@" x\nA=\ncmd "$@$A" y',
    "an array without elements": 'X=()\ncmd "$X" "${X}" "${X[*]}" "${X[@]}" z',
    "pipes in groups": "A=1\n{ A=2 | cat\n}\n{ A=3 & wait\n}\ncmd $A",
    "arrays in subshells": "X=(a)\nX=(1) | cat\n{ X=(2); } | cat\n(X=(3))\ncmd $X",
    "parentheses behind other words": "A=1\nif (true); then :; fi\n! (A=2)\n{ (A=3; cmd $A); }\n({ A=4; })\ncmd $A",
    "parentheses within braces": "A=1\n{(A=2)}\nf() { (A=3; cmd $A)}\nf\ncmd $A",
    "a name over two lines": 'A=1\nAb=2\ncmd $A\\\n-b "$A\\\n b" ${A}\\\nb $A\\\n b',
    "a star in a setting": "A='k=a*b l=c?'\nX=($A m=d* 'n*')\ncmd \"${X[@]}\"",
    "the streams of a shell": "exec > >(cat) 2>&1\nA=1\ncmd $A 2> >(cat)",
    "shifted arguments": 'f() { local A=$1; shift; cmd $A "$@" $#; }\nf a "b c" d\nset 1 2\nshift\nshift 2\ncmd $1',
    "locals": "A=1\nX=(x)\nf() { local A; local X=(1 2); cmd ${A:-none} ${X[@]}; }\nf\ncmd $A ${X[@]}",
    "a function in a subshell": "(g() {\n:\n})\ncmd b",
    "functions in groups": "{ h() {\n:\n}\n}\n{ function k { cmd k; }; }\nk\ncmd a",
    "what looks like an assignment": "A=1\n'A'=2 2> /dev/null\nB='A=3'\n$B 2> /dev/null\ncmd $A 'B'=4",
    "lists in quotes in a default": 'A="${L:-[\\"a\\",\\"b\\"]}"\ncmd "$A" ${L:-[\\"a\\"]}',
    "comments within a command": "cmd a \\\n  `# why` b \\\n `#c`\ncmd x`# y`z",
    "what is cut off": """A=Qwen/Qwen2.5-0.5B-Instruct E=/tmp/a.parquet D=.parquet
cmd ${A##*/} ${A#*/} ${A%%-*} "${A%-*}" x${A%/*}y ${E%$D} ${A#z} ${A%}
F=(a/b c/d)
set -- p/q
cmd ${F##*/} ${1##*/}""",
    "what is replaced": """A=Qwen/Qwen2.5-0.5B B='x y'
cmd ${A//\\//_} ${A/-/_} ${A//./} ${A//Q*\\//$B} ${A/z} "${B/ /_}\"""",
    "parts of paths": """A=Qwen/Qwen2.5-0.5B B='a b/c.parquet'
cmd $(basename $A) "`dirname "$A"`" $(basename /a/b/ ) $(dirname /a/b/)x $(dirname a) $(dirname /)
cmd $(basename "$B" .parquet) $(basename ${B%/*})
cd /tmp
cmd $(pwd)/x "$(basename "$(pwd)")" """,
    "letters and lengths": "A=QwEn/x\ncmd ${A,,} ${A^^} ${#A} ${A:1} ${A:1:2} ${A:9}x",
    "quotes before a value that is split": "A='1 '\nB=' 1'\ncmd ''$A ''$B ''$A'' x$A$B",
}


def test_words_are_those_of_bash() -> None:
    found = {name: (words_of(text), bash(text)) for name, text in CASES.items()}
    assert {name: (ours, theirs) for name, (ours, theirs) in found.items() if ours != theirs} == {}


TEXT = st.text(alphabet="ab1=./,[]{}:- ", max_size=6)
BARE = st.text(alphabet="ab1=./,:", min_size=1, max_size=6)
REFERENCE = st.sampled_from(["${A}", "${B}", "${C:-c}", "${C:-$A}", '"$B"', '"${A}x$B"', '"${C:-x y}"'])
PIECE = st.one_of(BARE, TEXT.map("'{}'".format), TEXT.map('"{}"'.format), REFERENCE, st.just("\\ "), st.just('\\"'))
WORD = st.lists(PIECE, min_size=1, max_size=4).map("".join)
SEPARATOR = st.sampled_from([" ", "  ", " \\\n ", "\t"])


@settings(max_examples=40)
@given(st.lists(st.tuples(SEPARATOR, WORD), min_size=20, max_size=40), TEXT)
def test_any_words_are_those_of_bash(words: list[tuple[str, str]], value: str) -> None:
    script = f"A=one\nB='{value}'\ncmd" + "".join(separator + word for separator, word in words)
    assert words_of(script) == bash(script)


PATTERN = st.text(alphabet="aB./-*? ", max_size=5)
CUT = st.one_of(
    st.tuples(st.sampled_from(["#", "##", "%", "%%"]), PATTERN).map("".join),
    st.builds(
        lambda sign, pattern, text: sign + pattern.replace("/", "\\/") + f"/{text}",
        st.sampled_from(["/", "//"]), PATTERN, PATTERN,
    ),
    st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda places: f":{places[0]}:{places[1]}"),
)  # fmt: skip


@settings(max_examples=40)
@given(st.lists(st.tuples(st.text(alphabet="aB./- ", max_size=8), CUT), min_size=20, max_size=40))
def test_any_value_is_cut_as_bash_does(cuts: list[tuple[str, str]]) -> None:
    script = "".join(f"A='{value}'\ncmd \"${{A{cut}}}\"\n" for value, cut in cuts)
    found = words_of(script)
    assert sum(UNKNOWN in word for (word,) in found) <= len(found) / 2
    assert all(ours == theirs for ours, theirs in zip(found, bash(script), strict=True) if UNKNOWN not in ours[0])


def test_what_only_a_run_could_tell_is_unknown() -> None:
    script = read_script(
        "N=$(nvidia-smi | wc -l)\nif [ $N = 8 ]; then\nM=1\nfi\ncmd n=$N m=$M x=`id` y=${Z} $1 k=1\nS=1+1\n"
        "cmd $((N * 2)) $((S * 2)) $((1 / 0)) $((1 < 2)) $((010))",
        {},
    )
    found, numbers = [command for command in script.commands if command.words[0] == "cmd"]
    assert all(word.startswith(f"{UNKNOWN}$((") for word in numbers.words[1:])
    expected = ("n=?$(nvidia-smi | wc -l)?", "m=?$M?", "x=?`id`?", "y=?${Z}?", "?$1?", "k=1")
    assert found.words[1:] == tuple(word.replace("?", UNKNOWN) for word in expected)
    (note,) = script.notes
    assert note.text == "line 2: if ... is not evaluated; variables that are set in it are unknown"


LEFT_OPEN = [
    "test -d /x || A=2",
    '[ -z "$F" ] && A=2',
    "[[ -f a && -f b ]] && A=2",
    "[ -d x ] &&\n  A=2",
    "[ -d x ] && { A=2; }",
    "false && (exit) || A=2",
    "for A in 1 2; do echo $A; done",
    "case $X in a) A=2 ;; (b|c)\n A=3;; *) A=4;; esac",
    "read -r A",
    "while read A; do echo; done < file",
    "printf -v A %s 2",
    "mapfile -t A < file",
    "[ -d x ] && unset A",
    "A[0]=2",
    "A=([1]=b)",
    "A=(<(cat x))",
    "((A++))",
    "for ((A=0; A<3; A++)); do echo; done",
    "let A+=1",
    "declare -i A=1+1",
    "[ -d x ] && A+=2",
    "if x; then A=(b); fi",
    "A=(*.parquet)",
    "A=$((1#1))",
    "A=$((1 << -1))",
    "A=$(basename x; echo)",
    "A=$(basename x | cat)",
    "A=$(dirname $(cat x))",
    "A=$(basename x 2> /dev/null)",
    'A=$(dirname "$0")',
    "cd /no/such\nA=$(pwd)",
    'A=${F#"x"}',
    "A=${F##[a-z]}",
    "A=${F/a/&}",
    "A=${G##*/}",
    "B=$((A++))",
    "B=$[A=5]",
    "declare -u A\nA=b",
    "f() { A=2; }\n[ -d x ] && f",
    "f() { [ -d x ] && return; A=2; }\nf",
    "f() { read A; }\nf",
    "bash -c x; A=$-",
    "A=$((9223372036854775807 + 1))",
    "IFS=,\nA='1,2'\nset -- $A\nA=$1",
    "export A={1,2}",
    "A=~+",
    "A=~other/x",
    "A=$SECONDS",
    "if x; then f() { A=2; }; else f() { A=3; }; fi\nf",
    "f() { A=$A$A; f; f; }\nf",
    'A=${F+x"y"$(z)}',
    'A="${A:+x"y"z}"',
    "(false) && A=2",
    "{ [ -d x ] && B=1; } && A=2",
    "if x; then false; fi && A=2",
    'A=\n: "${A:=x"y"z}"',
    "A=()b=c",
    "A=()'b'",
    "cd /no/such/folder\nA=$PWD",
    "B=1\nA=$B\\\nb",
    'B=1\nA="$B\\\nb"',
    'X=(1 2)\nA=${N:-a"${X[@]}"}',
    "D=/usr\nA=($D/b*)",
    "X=/usr/b*\nA=($X)",
]


def test_a_variable_that_only_a_run_could_tell_is_unknown() -> None:
    words = {setting: words_of(f"A=1\nF=\n{setting}\ncmd a=$A") for setting in LEFT_OPEN}
    assert {setting: found for setting, found in words.items() if len(found) != 1 or UNKNOWN not in found[0][0]} == {}


def test_a_folder_is_known_where_it_is_there_or_is_made(tmp_path: Path) -> None:
    text = "cd in && cmd $PWD\nmkdir -p $HOME/in\ncd $HOME\ncmd $PWD\ncd in\ncmd $PWD\ncmd $OLDPWD"
    script = read_script(text, {"HOME": str(tmp_path), "PWD": str(tmp_path)})
    folders = [command.words[1] for command in script.commands if command.words[0] == "cmd"]
    assert folders == [f"{UNKNOWN}$PWD{UNKNOWN}", str(tmp_path), f"{tmp_path}/in", str(tmp_path)]


@pytest.mark.parametrize("name", ["source env.sh", ". ./env.sh", 'eval "$(cat x)"'])
def test_what_another_file_may_set_is_noted(name: str) -> None:
    (note,) = read_script(f"A=1\n{name}\ncmd $A", {}).notes
    assert "is not read: what it sets" in note.text


BROKEN = [
    "f() {",
    "function f",
    "f() { f() {",
    "f() { f; }; f",
    "A={",
    "$[",
    "bash -c",
    "A=(a;b)",
    "A=(x.y=(m))",
    "A=(a|b",
    "A=(>",
    "(((",
    "$((",
    "${",
    "`",
    "<(",
    "))",
    "[[ (",
    "f()",
]


def test_broken_text_ends() -> None:
    for text in BROKEN:
        read_script(text, {})


@settings(max_examples=200)
@given(st.text(alphabet="aA=1 \n;&|()<>{}[]$\"'`\\#~", max_size=24))
def test_any_text_ends(text: str) -> None:
    read_script(f"if {text}", {})
    read_script(text, {})


SCRIPT = """set -x
MODEL=${MODEL:-Qwen/Qwen2-7B}
files="['$HOME/a.parquet', '$HOME/b.parquet']"
export VLLM_ATTENTION_BACKEND=XFORMERS HF_TOKEN=hf_1 WANDB_API_KEY=$TOLD
%s \\
    algorithm.adv_estimator=gae \\
    data.train_files="$files" data.val_files=$HOME/a.parquet \\
    actor_rollout_ref.model.path=$MODEL critic.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    trainer.logger='["console","wandb"]' \\
    trainer.total_epochs=15 trainer.total_epochs=3 trainer.n_gpus_per_node=1 $@ 2>&1 | tee log.txt
"""
STARTS = (
    "python3 -m verl.trainer.main_ppo",
    "CUDA_VISIBLE_DEVICES=0 python -u -m verl.trainer.main_ppo",
    "ray job submit --no-wait -- python3 -m verl.trainer.main_ppo",
    "nsys profile -o x python verl/trainer/main_ppo.py",
    "cd /verl && python -m recipe.dapo.src.main_dapo",
    "python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_trainer'",
)


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.sh"
    file.write_text(text)
    return file


@pytest.mark.parametrize("start", STARTS)
def test_the_file_loads_to_what_the_script_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text, listing = translate(written(tmp_path, SCRIPT % start), [])
    assert listing == ""
    assert "settings: VLLM_ATTENTION_BACKEND, HF_TOKEN, WANDB_API_KEY" in text.splitlines()[1]
    assert "hf_1" not in text
    file = tmp_path / "run.yaml"
    file.write_text(text)
    config = load_config(file, []).config
    assert config.data.train_files == ("/home/me/a.parquet", "/home/me/b.parquet")
    assert config.critic.model.path == "Qwen/Qwen2-7B"
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.trainer.logger == ("console", "wandb")
    assert config.trainer.total_epochs == 3


def test_the_environment_and_overrides_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "mine")
    text, _ = translate(written(tmp_path, SCRIPT % STARTS[0]), ["trainer.total_epochs=7"])
    tree = yaml.safe_load(text)
    assert tree["actor_rollout_ref"]["model"]["path"] == "mine"
    assert tree["trainer"]["total_epochs"] == 7


def test_what_keeps_it_from_being_run_is_listed(tmp_path: Path) -> None:
    script = SCRIPT.replace("trainer.total_epochs=15", "critic.no_such_key=2 \\  # why\n    trainer.nnodes=2")
    text, listing = translate(written(tmp_path, script % STARTS[0]), [])
    assert yaml.safe_load(text)["critic"]["no_such_key"] == 2
    assert "total_epochs" not in text  # below the comment, as for bash
    lines = listing.splitlines()
    assert lines[0] == "line 11: a comment follows the backslash, so the command ends here; what is below is not passed"
    assert lines[1] == "to be changed before it runs:"
    assert "critic.no_such_key: unknown key" in listing


@pytest.mark.parametrize("between", ["\\\n\n", "\\\n  \n", "\n"])
def test_settings_behind_the_end_of_a_command_are_listed(tmp_path: Path, between: str) -> None:
    """An empty line ends a command, and bash takes the next setting for a command."""
    script = f"python -m verl.trainer.main_ppo data.seed=1 {between} +critic.optim.lr=2 \\\n trainer.nnodes=1"
    text, listing = translate(written(tmp_path, script), [])
    assert "critic" not in text
    line = script[: script.index("+critic")].count("\n") + 1
    assert f"line {line}: +critic.optim.lr=2 and what follows stands apart from the command" in listing


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("echo nothing", "starts no trainer of verl's"),
        ("cat <<E\n$(python -m verl.trainer.main_ppo a.b=1)\nE", "line 2 names one, in text, $(...), a comment"),
        ("python -m verl.trainer.main_ppo a.b=1\npython -m verl.trainer.main_ppo a.b=2", "2 times, in lines 1, 2"),
        ("python -m verl.trainer.main_ppo --config-name=own a.b=1", "is a file of the script's own"),
        (
            "python -m verl.trainer.main_ppo data.seed=$(date +%s)",
            "data.seed: is $(date +%s) in the script",
        ),
        ("python -m verl.trainer.main_ppo 'a b'", "cannot be read"),
        ("python -m verl.trainer.main_ppo a.b=1 \\ # why\nc.d=2", "run.sh: line 1: a comment follows the backslash"),
        (
            "python -m verl.trainer.main_ppo data.seed=$X \\\n  # why\nc.d=2",
            "run.sh: line 2: a comment between the lines of a command ends it",
        ),
    ],
)
def test_what_cannot_be_translated_is_one_error(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        translate(written(tmp_path, text), [])


def test_a_place_that_a_list_does_not_have_is_named_from_the_top(tmp_path: Path) -> None:
    script = written(tmp_path, M + "'data.apply_chat_template_kwargs={x: [1]}' data.apply_chat_template_kwargs.x.3=2")
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template_kwargs\.x\.3: is no index of the list"):
        translate(script, [])


def test_a_value_that_is_unknown_may_be_given(tmp_path: Path) -> None:
    script = written(tmp_path, "python -m verl.trainer.main_ppo data.seed=$(date +%s) trainer.nnodes=1")
    text, _ = translate(script, ["data.seed=3"])
    assert yaml.safe_load(text) == {"trainer": {"nnodes": 1}, "data": {"seed": 3}}


@pytest.mark.parametrize("append", ['if [ -n "$T" ]; then\nC+=(%s)\nfi', '[ -n "$T" ] && C+=(%s)'])
def test_a_setting_that_may_be_appended_is_named_alone(tmp_path: Path, append: str) -> None:
    setting = "trainer.total_training_steps=$T"
    script = written(tmp_path, f'C=({M}trainer.nnodes=1)\n{append % setting}\nA=1 "${{C[@]}}" data.seed=2')
    with pytest.raises(ConfigError) as caught:
        translate(script, [])
    (problem,) = caught.value.problems[-1:]
    assert problem.path == "trainer.total_training_steps"
    assert "add trainer.total_training_steps=VALUE" in problem.fix
    text, _ = translate(script, ["trainer.total_training_steps=5"])
    assert yaml.safe_load(text) == {"trainer": {"nnodes": 1, "total_training_steps": 5}, "data": {"seed": 2}}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        translate(tmp_path / "no.sh", [])


M = "python3 -m verl.trainer.main_ppo "


@pytest.mark.parametrize(
    "overrides",
    [
        "trainer.seed=5 trainer={total_epochs:4}",
        "trainer={seed:5,total_epochs:4} ~trainer.seed",
        "trainer.seed=5 ~trainer data.seed=1",
        "trainer.seed=5 ~trainer.seed trainer.seed=6",
        "actor_rollout_ref.rollout.engine_kwargs={vllm:{a:1}} actor_rollout_ref.rollout.engine_kwargs.vllm.b=2",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.b=2 +actor_rollout_ref.rollout.engine_kwargs={vllm:{a:{c:1}}}",
        "actor_rollout_ref.actor.ppo_micro_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.actor={ppo_micro_batch_size:4}",
        "reward.custom_reward_function={name:a} custom_reward_function.name=b",
        "trainer.logger=[console] trainer.logger=[wandb]",
        "critic.model.override_config={attention_dropout:0.1} critic.model.override_config.embd_pdrop=0.2",
    ],
)
def test_the_file_loads_to_what_the_settings_load_to(tmp_path: Path, overrides: str) -> None:
    given = ["data.train_files=a", "data.val_files=b", "actor_rollout_ref.model.path=m", *overrides.split()]
    text, _ = translate(written(tmp_path, M + " ".join(f"'{one}'" for one in given)), [])
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert load_config(file, []).config == load_config(None, given).config


@pytest.mark.parametrize(
    "script",
    [
        "export VERL_USE_MODELSCOPE=True\n" + M,
        "VERL_USE_MODELSCOPE=True " + M,
        "env VERL_USE_MODELSCOPE=True " + M,
        """ray job submit --runtime-env-json='{"env_vars": {"VERL_USE_MODELSCOPE": "True"}}' -- """ + M,
        """ray job submit --runtime-env-json '{"env_vars": {"VERL_USE_MODELSCOPE": "True"}}' -- """ + M,
    ],
)
def test_modelscope_is_told(tmp_path: Path, script: str) -> None:
    text, listing = translate(written(tmp_path, script + "data.seed=1"), [])
    assert "VERL_USE_MODELSCOPE=True is set there and no setting" in listing
    assert "VERL_USE_MODELSCOPE" in text.splitlines()[1]


@pytest.mark.parametrize(
    "trainer",
    ["recipe.sppo.main_sppo", "recipe.spin.main_spin", "verl.experimental.one_step_off_policy.main_ppo",
     "verl.experimental.fully_async_policy.fully_async_main", "verl.trainer.main_generation", "verl.trainer.main_eval",
     "verl.trainer.fsdp_sft_trainer"],
)  # fmt: skip
def test_other_trainers_are_refused_by_name(tmp_path: Path, trainer: str) -> None:
    with pytest.raises(ConfigError, match=rf"line 1 starts {trainer}, which is not verl\.trainer\.main_ppo"):
        translate(written(tmp_path, f"python -m {trainer} data.seed=1"), [])


@pytest.mark.parametrize("option", ["--config-path=", "--config-dir "])
@pytest.mark.parametrize("folder", ["/my/conf", "/my/config", "conf"])
def test_a_folder_of_configurations_is_told(tmp_path: Path, option: str, folder: str) -> None:
    script = f"{M}{option}{folder} --config-name=ppo_trainer data.seed=1"
    _, listing = translate(written(tmp_path, script), [])
    assert f"--config-path={folder} was taken for verl's own; if it has a ppo_trainer.yaml" in listing


def test_secrets_in_settings_are_told(tmp_path: Path) -> None:
    _, listing = translate(written(tmp_path, M + "reward_model.server.api_key=s"), [])
    assert "passwords or keys" in listing


def test_secrets_of_the_caller_are_read_when_the_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_PASS"):
        monkeypatch.setenv(name, "hidden")
    variables = "+ray_kwargs.ray_init.runtime_env.env_vars"
    settings = [f"{variables}.WANDB_API_KEY=$WANDB_API_KEY", "trainer.experiment_name=run-$HF_TOKEN-${MY_PASS:-none}"]
    text, listing = translate(written(tmp_path, M + " ".join(settings)), [])
    assert "hidden" not in text
    tree = yaml.safe_load(text)
    assert tree["trainer"]["experiment_name"] == "run-${oc.env:HF_TOKEN}-${oc.env:MY_PASS}"
    assert tree["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"] == {"WANDB_API_KEY": "${oc.env:WANDB_API_KEY}"}
    assert "passwords or keys" not in listing


@pytest.mark.parametrize("part", ["${HF_TOKEN:0:4}", "${HF_TOKEN##*_}", "${#HF_TOKEN}", "$(basename $HF_TOKEN)"])
def test_no_part_of_a_secret_is_made_of_what_stands_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hidden")
    with pytest.raises(ConfigError, match="is known only when it is run"):
        translate(written(tmp_path, f"{M}trainer.experiment_name={part}"), [])


def test_the_present_folder_is_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/here")
    text, _ = translate(written(tmp_path, f"{M}data.train_files=$PWD/a.parquet data.val_files=$(pwd)/b.parquet"), [])
    assert yaml.safe_load(text)["data"] == {"train_files": "/here/a.parquet", "val_files": "/here/b.parquet"}


@pytest.mark.parametrize("command", ["echo", "pkill -f", "pgrep -f", "grep -c x", "/usr/bin/cat"])
def test_a_command_that_mentions_the_trainer_is_no_start(tmp_path: Path, command: str) -> None:
    script = written(tmp_path, f"{command} main_ppo.py\n{command} -m verl.trainer.main_ppo\n{M}data.seed=1")
    assert yaml.safe_load(translate(script, [])[0]) == {"data": {"seed": 1}}


@pytest.mark.parametrize("start", ["exec ", "nohup ", "bash -c '", 'docker exec -it c bash -lc "cd /verl && '])
def test_a_trainer_behind_another_command_is_one(tmp_path: Path, start: str) -> None:
    end = {"'": "'", '"': '"'}.get(next((char for char in start if char in "'\""), ""), "")
    text, _ = translate(written(tmp_path, f"{start}{M}data.seed=1{end}"), [])
    assert yaml.safe_load(text) == {"data": {"seed": 1}}


def test_what_is_unknown_of_names_does_not_reach_the_heading(tmp_path: Path) -> None:
    text, _ = translate(written(tmp_path, "export $(grep -v x .env)\npython $X/trainer/main_ppo.py data.seed=1"), [])
    assert UNKNOWN not in text
    assert text.startswith("# The settings of run.sh, line 2 ($X/trainer/main_ppo.py).")


def test_what_is_nested_too_deeply_is_one_error(tmp_path: Path) -> None:
    text = "A=" + "${B:-" * 3000 + "}" * 3000
    with pytest.raises(ConfigError, match=r"run\.sh: it nests expansions or functions too deeply"):
        translate(written(tmp_path, f"{text}\n{M}data.seed=$A"), [])


@pytest.mark.parametrize(("text", "said"), [
    ("A=aa\n" + "A=$A$A$A\n" * 20, r"run\.sh: line 14: \$A is more than 1,000,000 characters"),
    ("A=(a a)\n" + 'A=("${A[@]}" ${A[@]})\n' * 30, r"line 20: \$\{A\[@\]\} is more than 1,000,000 characters"),
    ("f0() { :; }\n" + "".join(f"f{n}() {{ {f'f{n - 1}; ' * 9}}}\n" for n in range(1, 7)) + "f6\n",
     r"line 2: functions are called more than 1,000 times"),
])  # fmt: skip
def test_what_has_no_end_is_one_error(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        translate(written(tmp_path, f"{text}{M}data.seed=1"), [])


@pytest.mark.parametrize(("word", "advice"), [
    ('data.custom={"a","b"}', """write 'data.custom={"a","b"}'"""),
    ("data.custom={a:$N,b:2}", 'write "data.custom={a:$N,b:2}"'),  # not '...', in which $N stays as it is
    ("data.custom={a:'x y',b:2}", """write "data.custom={a:'x y',b:2}\""""),
    ("""data.custom={a:"$N",b:'c'}""", "write all of it in quotes"),
])  # fmt: skip
def test_advice_on_quotes_is_what_bash_reads_as_it_is_meant(tmp_path: Path, word: str, advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(written(tmp_path, f"N=3\n{M}{word}"), [])
    assert str(caught.value).endswith(advice)


def test_arguments_before_an_unknown_one_are_known(tmp_path: Path) -> None:
    body = f'local seed=$1; shift\n{M} data.seed=$seed "$@"'
    script = written(tmp_path, f"run() {{ {body}\n}}\nrun 5 trainer.seed=$(date)")
    with pytest.raises(ConfigError, match=r"^trainer\.seed: is \$\(date\)[^\n]*$"):
        translate(script, [])
    assert yaml.safe_load(translate(script, ["trainer.seed=4"])[0]) == {"data": {"seed": 5}, "trainer": {"seed": 4}}


def test_a_file_that_is_not_written_is_said(tmp_path: Path) -> None:
    script, out = written(tmp_path, M + "data.seed=$(date)"), tmp_path / "run.yaml"
    with pytest.raises(ConfigError, match=rf"(?s)data\.seed: is \$\(date\).*\n--out {out}: is not written"):
        CliRunner().invoke(app, ["config", "import-verl", str(script), "-o", str(out)], catch_exceptions=False)
    assert not out.exists()


def test_a_long_sum_is_named_in_short(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.seed: is \$\(\(1\+") as caught:
        translate(written(tmp_path, f"A=$(({'1+' * 5000}1))\n{M}data.seed=$A"), [])
    assert len(str(caught.value)) < 600


def test_all_that_is_wrong_is_in_one_error(tmp_path: Path) -> None:
    script = written(tmp_path, M + "trainer.nnodes=$(x) data.custom={a:1,b:2} critic.no_such_key=2")
    with pytest.raises(ConfigError) as caught:
        translate(script, [])
    found = str(caught.value)
    assert "trainer.nnodes: is $(x) in the script" in found
    assert "{a:1,b:2} is not in quotes, so that bash makes several words of it. write 'data.custom={a:1,b:2}'" in found
    assert "critic.no_such_key: unknown key" in found


def test_options_of_hydra_take_their_values_along(tmp_path: Path) -> None:
    text, listing = translate(written(tmp_path, M + "--cfg job data.seed=1 --package foo"), [])
    assert yaml.safe_load(text) == {"data": {"seed": 1}}
    assert "--cfg job is no setting and was left out" in listing


def test_where_the_file_went_is_said(tmp_path: Path) -> None:
    script, out = written(tmp_path, M + "data.seed=1"), tmp_path / "run.yaml"
    done = CliRunner().invoke(app, ["config", "import-verl", str(script), "-o", str(out)])
    assert f"written to {out}" in done.output


def test_a_first_line_behind_a_byte_order_mark_counts(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"S=3\n{M}data.seed=$S", encoding="utf-8-sig")
    assert yaml.safe_load(translate(script, [])[0]) == {"data": {"seed": 3}}


def test_a_backslash_in_a_comment_is_told(tmp_path: Path) -> None:
    _, listing = translate(written(tmp_path, M + "data.seed=3 # why \\\n  trainer.seed=4\n"), [])
    assert listing.startswith("line 1: the backslash is part of a comment, so the command ends here")


def test_a_function_that_starts_the_trainer_is_followed(tmp_path: Path) -> None:
    script = written(tmp_path, f'SEED=1\nrun() {{\n{M} data.seed=$SEED "$@"\n}}\nSEED=5 run trainer.seed=2\nSEED=6')
    assert yaml.safe_load(translate(script, [])[0]) == {"data": {"seed": 5}, "trainer": {"seed": 2}}


def test_a_function_that_starts_the_trainer_twice_is_refused(tmp_path: Path) -> None:
    script = written(tmp_path, f"run() {{\n{M} data.seed=$1\n}}\nrun 1\nrun 2")
    with pytest.raises(ConfigError, match="starts verl 2 times, in lines 2, 2"):
        translate(script, [])


def test_a_function_that_is_never_called_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"starts no trainer of verl's; line 2 names one, .* that is never called"):
        translate(written(tmp_path, f"run() {{\n{M} data.seed=1\n}}\n"), [])


def test_the_script_is_not_written_over(tmp_path: Path) -> None:
    script = written(tmp_path, M + "data.seed=1")
    with pytest.raises(ValueError, match=r"run\.sh: is the file that is translated"):
        CliRunner().invoke(app, ["config", "import-verl", str(script), "-o", str(script)], catch_exceptions=False)
    assert script.read_text() == M + "data.seed=1"


def test_words_that_are_no_settings_are_arguments_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "gpus=$1; name=${2:-none}; shift\npython3 -m verl.trainer.main_ppo data.train_files=a.parquet "
        'trainer.n_gpus_per_node=$gpus trainer.experiment_name=$name trainer.nnodes=$# "${@:2}"\n'
    )
    with pytest.raises(
        ConfigError, match=r"known only when it is run\. give it behind the script, or add trainer\.n_gpus"
    ):
        translate(script, [])
    for words in (["8", "tiny", "trainer.seed=3"], ["trainer.seed=3", "8", "tiny"]):
        tree = yaml.safe_load(translate(script, words)[0])
        assert tree["trainer"] == {"n_gpus_per_node": 8, "experiment_name": "tiny", "nnodes": 1, "seed": 3}
    assert yaml.safe_load(translate(script, ["8"])[0])["trainer"]["experiment_name"] == "none"
    script.write_text("bash -c 'python3 -m verl.trainer.main_ppo data.train_files=a.parquet trainer.nnodes=$1'\n")
    with pytest.raises(ConfigError, match=r"trainer\.nnodes"):  # a script of its own, which has none
        translate(script, ["8"])
