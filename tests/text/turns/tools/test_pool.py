"""Tools and environments in processes of their own: what they answer, and what becomes of those that do not."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tether.text.turns.tools import (
    AGENTS_KEY,
    FUNCTIONS_KEY,
    EnvironmentSpec,
    FunctionsSpec,
    Reply,
    ResponderSpecs,
    ToolPool,
    ToolSpec,
    environment_named,
    read_agents,
    read_environments,
    read_tools,
)
from tether.text.turns.tools.pool import CallRequest, StepRequest

OWN = Path(__file__).with_name("own.py")


def tool(name="Calculator", schema=None, **config):
    return ToolSpec(f"{OWN}:{name}", config, schema, "tools[0]")


def pool_of(*tools, timeout=20.0, workers=1, **environments):
    return ToolPool(ResponderSpecs(tools, environments), num_workers=workers, timeout=timeout)


def said(text, reward=0.0, role="tool", done=False):
    return Reply([{"role": role, "content": text}], reward, done)


def call(pool, *arguments, **kwargs):
    return pool.take(pool.ask(CallRequest("calculator", dict(arguments), kwargs)))


def step(pool, *turns, row=0, name="count", batch=0, about=None):
    """The policy says `turns`, one after the other; what is answered to the last."""
    spoken = [[{"role": "assistant", "content": turn}] for turn in turns]
    about = about or {"ground_truth": "truth", "extra_info": {}}
    return pool.take(pool.ask(StepRequest(name, batch, row, about, [{"role": "user", "content": "go"}], spoken), row))


def test_tools_are_called_with_what_the_model_says_and_what_the_row_gives():
    with pool_of(tool(digits=1)) as pool:
        assert pool.schemas[0]["function"]["name"] == "calculator"
        assert call(pool, ("expression", "2 / 3")) == said("0.7")
        assert call(pool, ("expression", "1"), unit="m") == said("1.0{'unit': 'm'}")
    with pool_of(tool("Priced")) as pool:
        assert call(pool, ("expression", "6 * 7")) == said("42", -0.25)


def test_what_a_tool_returns_in_parts_is_read_as_json():
    expected = {
        "dict": '{"found": true, "price": null, "name": "it\'s é"}',
        "list": '[{"id": 1, "next": null}]',
        "dataclass": '{"price": null, "tags": ["a", "b"]}',
        "bool": "true",
        "nothing": "",
        "number": "1.5",
        "itself": "[[...]]",
        "picture": "a map\n[image, which cannot be shown as text]",
    }
    with pool_of(tool("Structured")) as pool:
        assert {kind: call(pool, ("expression", kind)).messages[0]["content"] for kind in expected} == expected
        assert call(pool, ("expression", "pair")) == said('{"a": null}', 1.0)


def test_verls_tools_and_interactions_are_taken():
    schema = {"type": "function", "function": {"name": "calculator"}}
    truth = {"extra_info": {"interaction_kwargs": {"name": "judge", "truth": "b"}}}
    with pool_of(tool("VerlTool", schema, a=1), judge=EnvironmentSpec(f"{OWN}:VerlInteraction")) as pool:
        result = call(pool, ("x", 7), create_kwargs={"truth": 3})
        assert result == said("{'x': 7} {'truth': 3} {'a': 1}", 0.5)
        assert step(pool, "a", name="judge", about=truth) == said("wrong", 0.0, "user")
        assert step(pool, "a", "b", name="judge", about=truth) == said("right", 1.0, "user", done=True)


def test_kwargs_that_a_column_filled_with_null_are_none():
    """A column of Parquet has what any of its rows has."""
    about = {"extra_info": {"interaction_kwargs": None}}
    schema = {"type": "function", "function": {"name": "calculator"}}
    with pool_of(tool("VerlTool", schema), judge=EnvironmentSpec(f"{OWN}:VerlInteraction")) as pool:
        assert call(pool, ("x", 7), create_kwargs=None) == call(pool, ("x", 7))
        assert step(pool, "a", name="judge", about=about) == said("wrong", 0.0, "user")


def test_a_tool_that_fails_is_an_answer():
    with pool_of(tool(), timeout=5.0) as pool:
        for expression, error in (
            ("1 / 0", "ZeroDivisionError: division by zero"),
            ("exit", "SystemExit: 3"),
            ("note", "^ValueError: the reason$"),
            ("group", "^ValueError: the first$"),
            ("die", "ended with exit code 3"),
            ("loop", "gave no answer within the deadline of 5 s"),
        ):
            assert re.search(error, call(pool, ("expression", expression)).error)
            assert call(pool, ("expression", "1 + 1")).messages, f"after {expression}"
    with pool_of(tool("Priced")) as pool:
        assert re.search("it returned 10 MiB", call(pool, ("expression", "'x' * 10**7")).error)
        assert call(pool, ("expression", "1 + 1")).messages


@pytest.mark.parametrize(("way", "error"), [("loop", "within the deadline of 2 s"), ("die", "exit code 3")])
def test_a_call_that_ends_its_process_is_made_once(tmp_path, way, error):
    """Whether it is a call of a tool, the making of an environment or a step of one."""
    log = tmp_path / "log"
    counted = {"log": str(log), "way": way}
    with pool_of(tool("Logged", **counted), count=EnvironmentSpec(f"{OWN}:Logged", counted), timeout=2.0) as pool:
        assert re.search(error, call(pool, ("expression", "1")).error)
        assert log.read_text() == "call\n"
        assert re.search(error, step(pool, "a").error)
        assert log.read_text() == "call\nreset\n"


@pytest.mark.parametrize(("way", "error"), [("loop", "within the deadline of 2 s"), ("die", "exit code 3")])
def test_a_file_that_cannot_be_imported_is_named(tmp_path, way, error):
    file = tmp_path / "own.py"
    file.write_text("import os, time\n" + {"loop": "time.sleep(100)", "die": "os._exit(3)"}[way])
    for specs in (
        ResponderSpecs((ToolSpec(f"{file}:Own", {}, None, "file tools[0]"),)),
        ResponderSpecs((), {"own": EnvironmentSpec(f"{file}:Own", {}, "file tools[0]")}),
    ):
        with pytest.raises(ValueError, match=rf"file tools\[0\]: loading {file}:Own failed: its process .*{error}"):
            ToolPool(specs, num_workers=1, timeout=20.0, startup_timeout=2.0)


def test_an_environment_is_stepped_turn_by_turn():
    with pool_of(count=EnvironmentSpec(f"{OWN}:Count", {"goal": 2})) as pool:
        first = step(pool, "a")
        second = step(pool, "a", "b")
    assert (first.reward, first.done, second.reward, second.done) == (1.0, False, 2.0, True)
    assert first.messages[0]["content"].startswith("truth 1 [")
    assert second.messages[0]["content"].startswith("truth 2 [")


def test_what_an_environment_returns_is_of_its_types():
    answers = [
        (("x", "1.0", False), "returned the reward '1.0', which is not a number"),
        (("x", 0.0, "no"), "returned done='no', neither True nor False"),
        (("x", 0.0, 2), "returned done='2', neither True nor False"),
        ((["x"], 0.0, False), "returned the message 'x', not {role, content}"),
        ((5, 0.0, False), "returned the reply '5', neither text nor a list of messages"),
        (("x",), "returned \"('x',)\", not (reply, reward, done)"),
        (("x", None, None), ""),
        (("x", 1, 1), ""),
    ]
    specs = {f"env{n}": EnvironmentSpec(f"{OWN}:Says", {"answer": says}) for n, (says, _) in enumerate(answers)}
    with pool_of(**specs) as pool:
        result = [step(pool, "a", row=n, name=name) for n, name in enumerate(specs)]
    expected = [error and f"TypeError: {OWN}:Says.step {error}" for _, error in answers]
    assert [reply.error for reply in result] == expected
    assert [(reply.reward, reply.done) for reply in result[-2:]] == [(0.0, False), (1.0, True)]


def test_what_verls_interaction_returns_has_four_parts():
    with pool_of(judge=EnvironmentSpec(f"{OWN}:ShortInteraction")) as pool:
        result = step(pool, "a", name="judge").error
    named = f"{OWN}:ShortInteraction.generate_response"
    assert result == f"TypeError: {named} returned '(True,)', not (done, reply, reward, data)"


def line_of(text):
    return next(n for n, line in enumerate(OWN.read_text().splitlines(), 1) if text in line)


def test_what_an_environment_raises_is_placed():
    """In the user's own file, also where a library raised it; a tool's error, which the policy reads, is not."""
    with pool_of(tool(), count=EnvironmentSpec(f"{OWN}:Count")) as pool:
        assert step(pool, "raise").error == f"RuntimeError: no more ({OWN} line {line_of('no more')})"
        result = step(pool, "library", row=1).error
        assert result.startswith("json.decoder.JSONDecodeError: ")
        assert result.endswith(f"({OWN} line {line_of('json.loads')})")
        assert call(pool, ("expression", "1 / 0")).error == "ZeroDivisionError: division by zero"
    with pytest.raises(ValueError, match=rf"Broken cannot be created .*KeyError: 'no server'\) \({OWN} line \d+\)"):
        pool_of(tool("Broken"))


def test_the_reward_of_a_tool_is_a_number():
    with pool_of(tool("SaysTool", answer=("x", "1"))) as pool:
        assert call(pool, ("expression", "")).error == "TypeError: call returned the reward '1', which is not a number"


def test_an_environment_is_prepared_once_in_a_process():
    with pool_of(count=EnvironmentSpec(f"{OWN}:Prepared", {"word": "yes"})) as pool:
        assert [step(pool, "a", row=row).messages[0]["content"] for row in range(2)] == ["oui", "oui"]


def test_an_environment_whose_process_ended_is_brought_to_where_it_was():
    """With the same random numbers; the one that ended its process is the only one that fails."""
    with pool_of(count=EnvironmentSpec(f"{OWN}:Count")) as pool:
        undisturbed = [step(pool, *"abc"[:n]) for n in (1, 2, 3)]
        assert "ended" in step(pool, "die", row=1).error or "exit" in step(pool, "die", row=1).error
        assert step(pool, *"abc") == undisturbed[-1]
        assert "RuntimeError: no more" in step(pool, "raise", row=2).error
    with pool_of(count=EnvironmentSpec(f"{OWN}:Count"), workers=2) as pool:
        assert step(pool, *"abc", row=5) == undisturbed[-1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pool_of(tool("Calculatr")), r"tools\[0\]: .*defines no Calculatr. Did you mean Calculator\?"),
        (lambda: pool_of(tool("Broken")), r"Broken cannot be created .*KeyError: 'no server'"),
        (lambda: pool_of(tool(), tool()), "another tool is already named calculator"),
        (lambda: pool_of(tool("Count", {"function": {"name": "x"}})), "has no method `call`"),
        (
            lambda: pool_of(x=EnvironmentSpec(f"{OWN}:Prepared", {"word": "no"}, "here")),
            r"here: .*Prepared cannot be prepared \(KeyError: 'no'\)",
        ),
        (lambda: pool_of(tool("Calculator", {"function": {}})), "the schema of .*Calculator: function.name is missing"),
        (lambda: pool_of(tool(sides=3)), r"cannot be created with config \{'sides': 3\}"),
        (lambda: pool_of(half=EnvironmentSpec(f"{OWN}:Half")), "no methods `reset` and `step`"),
        (
            lambda: pool_of(count=EnvironmentSpec(f"{OWN}:Count", {"upto": 3}, "here")),
            r"here: .*Count cannot be created with config \{'upto': 3\} \(TypeError: .*argument 'upto'",
        ),
        pytest.param(
            lambda: pool_of(none=environment_named("verifiers:some?a=1", "hermes", "here")),
            r"^here: verifiers:some\?a=1 needs the package verifiers, .* Run: pip install .*\[verifiers\]'$",
            marks=pytest.mark.skipif(find_spec("verifiers") is not None, reason="verifiers is installed"),
        ),
        (lambda: pool_of(none=EnvironmentSpec("no_such_package.tools.Class")), "cannot be imported"),
    ],
)
def test_what_cannot_be_loaded_is_refused_at_the_start(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_environment_that_a_row_names_is_looked_for():
    with pool_of() as pool:
        pool.check(f"{OWN}:Count")
        with pytest.raises(ValueError, match="defines no Coun"):
            pool.check(f"{OWN}:Coun")


def functions_pool(tmp_path, text):
    file = tmp_path / f"functions{len(text)}.py"
    file.write_text(text)
    return pool_of(FunctionsSpec(str(file), f"{FUNCTIONS_KEY}={file}"))


def test_the_functions_of_a_file_are_tools(tmp_path):
    text = (
        "from json import dumps\n"
        "__all__ = ['centimetres', 'sign']\n"
        "def helper(x): pass\n"
        "def centimetres(inches: float, digits: int = 1) -> str:\n"
        '    """Convert inches.\n\n    Args:\n        inches: a length.\n        digits: decimals.\n    """\n'
        "    return _rounded(2.54 * inches, digits)\n"
        "async def sign(x: int):\n"
        '    """Say the sign.\n\n    Args:\n        x: a number.\n    """\n'
        "    return ('+' if x > 0 else '-'), 0.5\n"
        "def _rounded(number, digits):\n"
        "    return f'{number:.{digits}f}'\n"
    )
    with functions_pool(tmp_path, text) as pool:
        first, second = (schema["function"] for schema in pool.schemas)
        assert (first["name"], first["description"], second["name"]) == ("centimetres", "Convert inches.", "sign")
        assert first["parameters"]["properties"]["inches"] == {"type": "number", "description": "a length."}
        assert first["parameters"]["required"] == ["inches"]
        assert pool.take(pool.ask(CallRequest("centimetres", {"inches": 2}, {"digits": 2}))) == said("5.08")
        assert pool.take(pool.ask(CallRequest("sign", {"x": 3}, {}))) == said("+", 0.5)
        assert "inches" in pool.take(pool.ask(CallRequest("centimetres", {}, {}))).error
    for broken, message in (
        ("def f(x):\n    'Say.'\n", "f has no schema .*missing a type hint.* tools in __all__"),
        ("from json import dumps\n", "defines no public function"),
        ("import no_such_package_at_all\n", "importing the file failed"),
    ):
        with pytest.raises(ValueError, match=message):
            functions_pool(tmp_path, broken)


def test_agents_are_read_by_name(tmp_path):
    path = tmp_path / "agents.yaml"
    verls = "{name: tool_agent, _target_: verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop}"
    path.write_text(f"[{verls}, {{name: counts, _target_: '{OWN}:Count'}}, {{name: b, _target_: p.m.B, size: 2}}]")
    agents = read_agents(str(path))
    assert {name: (spec.class_name, spec.config) for name, spec in agents.items()} == {
        "counts": (f"{OWN}:Count", {}), "b": ("p.m.B", {"size": 2}),
    }  # fmt: skip
    with pool_of(counts=agents["counts"]) as pool:
        assert step(pool, "a", name="counts") == step(pool, "a", name=f"{OWN}:Count", row=1)
    for text, message in (
        ("agents: []", "no list of entries {name, _target_"),
        ("[7]", r"\[0\] is '7', not a mapping"),
        ("[{_target_: a.B}]", r"\[0\].name is None. Give each agent a name"),
        ("[{name: a, _target_: a.B}, {name: a, _target_: a.B}]", r"\[1\].name is 'a'"),
        ("[{name: a}]", r"\[0\]._target_ is None. Name a class"),
        ("[{name: endpoint, _target_: a.B}]", "is an agent of tether's own. Give the agent its name: another one"),
        (f"[{verls.replace('name: tool_agent', 'name: mine')}]", "mine is tool_agent here"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            read_agents(str(path))
        assert str(error.value).startswith(f"{AGENTS_KEY}={path}")
    missing = EnvironmentSpec("no_such_package.B", place=f"{AGENTS_KEY}=a.yaml: [0]", class_key="_target_")
    with pytest.raises(ValueError, match=r"\[0\]._target_=no_such_package.B: cannot be imported"):
        pool_of(missing=missing)


def test_a_file_of_tools_that_is_not_of_the_layout_is_refused(tmp_path):
    path = tmp_path / "tools.yaml"
    for text, message in (
        ("tools: [", "cannot be read as YAML"),
        ("tool: []", "no list under `tools:`. There is `tool`; call it `tools`. It"),
        ("tools: []", "no list under `tools:`. It holds"),
        ("tools: [7]", r"tools\[0\] is '7', not a mapping"),
        ("tools: [{config: {}}]", r"class_name is None. Name a class"),
        ("tools: [{class_nam: a.B}]", r"class_name is None \(there is class_nam\). Name a class"),
        ("tools: [{class_name: a.B, config: [1]}]", "not a mapping of the arguments"),
        ("tools: [{class_name: a.B, config: {type: mcp}}]", "type='mcp'"),
        ("tools: [{class_name: a.B, tool_schema: {function: {}}}]", "function.name is missing"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            read_tools(str(path))
        assert str(error.value).startswith(f"actor_rollout_ref.rollout.multi_turn.tool_config_path={path}")


def test_files_of_verls_layout_are_read(tmp_path):
    path = tmp_path / "all.yaml"
    path.write_text(
        "tools: [{class_name: a.py:B, config: {type: native, x: 1}, tool_schema: {function: {name: b}}}]\n"
        "interaction: [{name: judge, class_name: a.b.C}]\n"
    )
    (result,) = read_tools(str(path))
    assert (result.class_name, result.config) == ("a.py:B", {"x": 1})
    assert result.schema == {"type": "function", "function": {"name": "b"}}
    assert read_environments(str(path))["judge"].class_name == "a.b.C"
    with pytest.raises(ValueError, match="no such file"):
        read_environments(str(path) + "x")
