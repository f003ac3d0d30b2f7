"""Coroutines of the user's run in one event loop for the life of a process, in whichever thread they are called."""

import asyncio
import threading
from pathlib import Path

import pytest

from tether.rewards.custom import CustomReward
from tether.rewards.outcome import RewardRequest, Score
from tether.rewards.service import LocalRewards
from tether.rewards.service.pool import RewardPool
from tether.runtime.deadline import deadline
from tether.runtime.event_loop import finished
from tether.tools import CallRequest, ResponderSpecs, StepRequest, ToolPool
from tether.tools.spec import EnvironmentSpec, ToolSpec

CLIENT = '''
import asyncio

class Client:
    """Answers from a task in the background, which the first question starts, as a connection does."""

    def __init__(self):
        self.asked, self.task, self.one_at_a_time = asyncio.Queue(), None, asyncio.Semaphore(1)

    async def serve(self):
        count = 0
        while True:
            answer = await self.asked.get()
            count += 1
            answer.set_result(count)

    async def ask(self):
        if self.task is None:
            self.task = asyncio.get_running_loop().create_task(self.serve())
        async with self.one_at_a_time:
            answer = asyncio.get_running_loop().create_future()
            await self.asked.put(answer)
            return await asyncio.wait_for(answer, 5)

    async def ask_twice(self):
        return sum(await asyncio.gather(self.ask(), self.ask()))

client = Client()
asyncio.get_event_loop().call_soon(lambda: None)  # there is one, also while the file is imported

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(await client.ask_twice())

class Tool:
    schema = {"type": "function", "function": {"name": "count"}}

    async def call(self):
        return str(await client.ask_twice())

class Verl:
    def __init__(self, config, tool_schema):
        pass

    async def create(self, instance_id=None, **_):
        self.client = Client()
        await self.client.ask()
        return "x"

    async def execute(self, instance_id, parameters, **_):
        return str(await self.client.ask()), 0.0, {}

    async def release(self, instance_id, **_):
        await self.client.ask()

class Shell:
    async def reset(self, messages, row):
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)

    async def step(self, messages):
        self.process.stdin.write(messages[-1]["content"].encode() + b"\\n")
        return (await self.process.stdout.readline()).decode(), 0.0, False
'''
REQUEST = RewardRequest("test", "text", "1")


@pytest.fixture
def client(tmp_path: Path) -> Path:
    file = tmp_path / "client.py"
    file.write_text(CLIENT)
    return file


def test_what_a_call_of_a_worker_opens_serves_the_next(client: Path) -> None:
    schema = {"type": "function", "function": {"name": "verl"}}
    tools = (ToolSpec(f"{client}:Tool", {}, None, "tools[0]"), ToolSpec(f"{client}:Verl", {}, schema, "tools[1]"))
    environments = {"shell": EnvironmentSpec(f"{client}:Shell")}
    with ToolPool(ResponderSpecs(tools, environments), num_workers=1, timeout=20.0) as pool:
        for name, expected in (("count", "3"), ("count", "7"), ("verl", "2"), ("verl", "2")):
            reply = pool.take(pool.ask(CallRequest(name, {}, {})))
            assert (reply.error, [message["content"] for message in reply.messages]) == ("", [expected])
        turns = []
        for word in ("first", "second"):
            turns.append([{"role": "assistant", "content": word}])
            step = StepRequest("shell", 0, 0, {}, [{"role": "user", "content": "?"}], turns)
            assert pool.take(pool.ask(step)).messages == [{"role": "user", "content": f"{word}\n"}]
    with RewardPool(CustomReward(str(client)), num_workers=1, timeout=20.0) as rewards:
        assert rewards.score([REQUEST, REQUEST]) == [Score(3.0), Score(7.0)]


def test_an_object_keeps_its_client_in_notebooks_and_in_threads() -> None:
    loops = list[asyncio.AbstractEventLoop]()

    async def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> float:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return 0.5

    async def cell() -> list[object]:
        return list(rewards.score([REQUEST]))

    rewards = LocalRewards(reward, 20.0)
    found = [*rewards.score([REQUEST]), *asyncio.run(cell())]
    thread = threading.Thread(target=lambda: found.extend(rewards.score([REQUEST])))
    thread.start()
    thread.join()
    assert found == [Score(0.5)] * 3
    assert len(set(map(id, loops))) == 1
    assert not loops[0].is_closed()


def test_a_coroutine_that_is_late_does_not_go_on_in_the_next_call() -> None:
    steps = list[str]()

    async def slow() -> None:
        await asyncio.sleep(0.2)
        steps.append("went on")

    def late() -> None:
        with pytest.raises(TimeoutError, match=r"not done after 0.05 seconds"), deadline(0.05):
            finished(slow())

    async def cell() -> None:
        late()

    late()
    asyncio.run(cell())
    assert finished(asyncio.sleep(0.3, "the next")) == "the next"
    assert steps == []


def test_what_a_coroutine_raises_is_raised_and_the_loop_lives() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        finished(leave())
    assert finished(asyncio.sleep(0, "result")) == "result"
    assert finished("no coroutine") == "no coroutine"
