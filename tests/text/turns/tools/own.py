"""Tools and environments as a user writes them: well-behaved ones, and others."""

import json
import os
import random
import sys
import time
from dataclasses import dataclass
from typing import ClassVar

SCHEMA = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}


class Calculator:
    schema = SCHEMA

    def __init__(self, digits=2):
        self.digits = digits

    def call(self, expression, **more):
        if expression == "loop":
            while True:
                time.sleep(1)
        if expression == "exit":
            sys.exit(3)
        if expression == "die":
            os._exit(3)
        if expression == "note":
            error = ValueError("the reason")
            error.add_note("see the manual")
            raise error
        if expression == "group":
            raise ExceptionGroup("several", [ValueError("the first")])
        return f"{eval(expression):.{self.digits}f}{more or ''}"


class Priced(Calculator):
    async def call(self, expression):
        return await_less(expression), -0.25


def await_less(expression):
    return str(eval(expression))


class VerlTool:
    def __init__(self, config, tool_schema):
        self.config, self.schema, self.open = config, tool_schema, {}

    async def create(self, instance_id=None, **kwargs):
        self.open["x"] = kwargs
        return "x"

    async def execute(self, instance_id, parameters, **kwargs):
        return f"{parameters} {self.open[instance_id]} {self.config}", 0.5, {}

    async def release(self, instance_id, **kwargs):
        del self.open[instance_id]


class Count:
    """Answers how often it was stepped, with a number that it drew."""

    def __init__(self, goal=3):
        self.goal, self.count, self.drawn = goal, 0, []

    def reset(self, messages, row):
        self.about = row["ground_truth"]

    def step(self, messages):
        self.count += 1
        self.drawn.append(random.randrange(1000))
        turn = messages[-1]["content"]
        if turn == "die":
            os._exit(3)
        if turn == "raise":
            raise RuntimeError("no more")
        if turn == "library":
            json.loads("{")
        return f"{self.about} {self.count} {self.drawn}", float(self.count), self.count == self.goal


class Logged:
    """A tool and an environment that leave a trace of each call, and do not come back from it."""

    schema = SCHEMA

    def __init__(self, log, way):
        self.log, self.way = log, way

    def call(self, expression):
        self.leave("call")

    def reset(self, messages, row):
        self.leave("reset")

    def step(self, messages):
        return "", 0.0, True

    def leave(self, word):
        with open(self.log, "a") as file:
            file.write(word + "\n")
        while self.way == "loop":
            time.sleep(1)
        os._exit(3)


class Says:
    def __init__(self, answer):
        self.answer = tuple(answer)

    def reset(self, messages, row):
        pass

    def step(self, messages):
        return self.answer


class SaysTool(Says):
    schema = SCHEMA

    def call(self, expression):
        return self.answer


@dataclass
class Found:
    price: float | None
    tags: frozenset


class ToolResponse:
    """As verl's: text, and pictures that the model cannot see."""

    def __init__(self, text, image=None, video=None):
        self.text, self.image, self.video = text, image, video


class Structured:
    schema = SCHEMA

    def call(self, expression):
        itself = []
        itself.append(itself)
        return {
            "dict": {"found": True, "price": None, "name": "it's é"},
            "list": [{"id": 1, "next": None}],
            "dataclass": Found(None, frozenset("ba")),
            "bool": True,
            "nothing": None,
            "number": 1.5,
            "pair": ({"a": None}, 1.0),
            "itself": itself,
            "picture": ToolResponse("a map", image=["pixels"]),
        }[expression]


class Prepared:
    """Looks its word up once in a process."""

    words: ClassVar[list[str]] = []

    @classmethod
    def prepare(cls, word):
        cls.words.append({"yes": "oui"}[word])

    def __init__(self, word):
        pass

    def reset(self, messages, row):
        pass

    def step(self, messages):
        return " ".join(self.words), 0.0, False


class VerlInteraction:
    def __init__(self, config):
        self.config, self.truth = config, {}

    async def start_interaction(self, instance_id=None, truth=None, **kwargs):
        self.truth["x"] = truth
        return "x"

    async def generate_response(self, instance_id, messages, **kwargs):
        right = messages[-1]["content"] == self.truth[instance_id]
        return right, "right" if right else "wrong", float(right), {}


class ShortInteraction(VerlInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return (True,)


class Half:
    def step(self, messages):
        return None


class Broken:
    schema = SCHEMA

    def __init__(self):
        raise KeyError("no server")

    def call(self):
        pass
