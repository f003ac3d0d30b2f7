"""Generative judges: a prompt template that shows a language model a response, and a parser of what it answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from tether.rewards.outcome import RewardError, RewardOutcome, RewardRequest, outcome_of
from tether.rewards.service.endpoint import Endpoint, EndpointError
from tether.spelling import did_you_mean

FIELDS = ("prompt", "response", "ground_truth", "data_source")
"""Names that a template may have in braces."""
_BETWEEN = r"[-+/^*x×:±–—／∕⁄|→>]{1,9}|(?:points? )?[(\[]?(?:out of|of|to|or|and|in)\b"
_ANOTHER = r"[-+−]?\.?\d\S*|(?:five|ten|(?:a |one )?hundred)\b"
NUMBER = (
    r"Score:\s*([-+−]?\.?\d"
    r"""(?:[^\s<]*[^\s<.,;:!?)\]}*"'`_])?"""  # what touches it, without the marks that end a sentence or emphasis
    r"""(?:[*_"'`]*[^\S\n]{0,9}(?:[%％‰]|(?<=\s)(?:per ?cent\b|"""
    rf"""(?:(?:{_BETWEEN})[^\S\n]{{0,9}})?(?:{_ANOTHER}))))?)"""
)
"""The parser by default. It takes all that may belong to a number: 1,000 and 7 out of 10 are errors, not 1 and 7."""
_SHOWN = 200  # characters at the end of an answer that says nothing
_PARSER_SHOWN = 60
Messages: TypeAlias = list[dict[str, str]]


@dataclass(frozen=True)
class Judge:
    """How a model is asked, and how its answer is read."""

    prompt: str
    """With `FIELDS` in braces; other braces are text."""
    system: str | None = None
    """A system message before it."""
    parser: str = NUMBER
    """Regular expression with one group; its last match in an answer counts."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Word -> score, where the group is a word; upper and lower case are one. Empty: it is a number."""
    range: tuple[float, float] | None = None
    """Least and greatest number; what is beyond is an error."""

    def check(self, key: str) -> None:
        """Refuse a template or a parser that cannot work.

        Raises:
            ValueError: begins with `key`, the section of the configuration.
        """
        named = re.findall(r"\{(\w+)\}", f"{self.prompt} {self.system or ''}")
        for name in named:
            if name not in FIELDS and not name.isdigit():
                hint = did_you_mean(name, FIELDS) or f" There are {', '.join(FIELDS)}"
                raise ValueError(f"{key}.prompt: {{{name}}} is nothing that it could show.{hint}")
        if "response" not in named:
            raise ValueError(f"{key}.prompt: it does not show the response; write {{response}} where it belongs")
        try:
            groups = re.compile(self.parser).groups
        except re.error as error:
            raise ValueError(f"{key}.parser: {self.parser} is no regular expression ({error})") from error
        if groups != 1:
            raise ValueError(
                f"{key}.parser: {self.parser} has {groups} groups; one gives the score, (?:...) the others"
            )
        if self.range and self.range[0] >= self.range[1]:
            raise ValueError(
                f"{key}.range: [{self.range[0]:g}, {self.range[1]:g}] holds nothing; give [least, greatest]"
            )

    def messages(self, request: RewardRequest) -> Messages | RewardError:
        """The conversation that shows the judge a response; an error where its prompt has no text."""
        if request.dialogue is None or not request.dialogue.messages:
            return RewardError("the prompt is token ids without messages, which a judge cannot read")
        values = {
            "prompt": _text_of(request.dialogue.messages),
            "response": request.solution_str,
            "ground_truth": str(request.ground_truth),
            "data_source": request.data_source,
        }

        def filled(template: str) -> str:  # in one pass: braces in a response are text
            return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), template)

        before = [{"role": "system", "content": filled(self.system)}] if self.system else []
        return [*before, {"role": "user", "content": filled(self.prompt)}]

    def read(self, answer: str) -> RewardOutcome:
        """The score in an answer, behind its reasoning (``<think>``) if it has any, or the error that it has none."""
        answer = answer.rpartition("</think>")[2]
        if answer.lstrip().startswith("<think>"):
            return RewardError("the judge did not end its reasoning (<think>)")
        found = re.findall(self.parser, answer)
        if not found:
            return RewardError(f"the judge's answer has {self._nothing}; it ends in {end_of(answer)!r}")
        text = found[-1].strip()
        if self.scores:
            known = {word.casefold(): score for word, score in self.scores.items()}
            if text.casefold() not in known:
                return RewardError(f"the judge said {text[:_SHOWN]!r}, which is none of {', '.join(self.scores)}")
            return outcome_of(known[text.casefold()])
        try:
            score = float(text.replace("_", "?"))  # Python reads 1_000
        except ValueError:
            return RewardError(f"the judge said {text[:_SHOWN]!r}, which is no number")
        if self.range and not self.range[0] <= score <= self.range[1]:
            return RewardError(f"the judge said {score:g}, which is beyond [{self.range[0]:g}, {self.range[1]:g}]")
        return outcome_of(score)

    @property
    def _nothing(self) -> str:
        """The missing part of an answer without a score, for messages."""
        if self.parser == NUMBER:
            return "no `Score: NUMBER`"
        shown = self.parser if len(self.parser) <= _PARSER_SHOWN else f"{self.parser[:_PARSER_SHOWN]}..."
        return f"nothing that its parser {shown} matches"


@dataclass(frozen=True)
class RemoteJudge:
    """Asks an endpoint that speaks OpenAI's chat completions about one response."""

    judge: Judge
    endpoint: Endpoint
    """Its ``.../chat/completions``."""
    options: Mapping[str, Any]
    """Of the body beside the messages: model, temperature, max_tokens, ..."""

    def __call__(self, request: RewardRequest) -> RewardOutcome:
        """Score a response.

        Raises:
            EndpointError: no answer, or one that is not in OpenAI's layout or not whole.
        """
        messages = self.judge.messages(request)
        if isinstance(messages, RewardError):
            return messages
        answer = self.endpoint.ask({"messages": messages, **self.options})
        match answer:
            case {"choices": [{"message": {"content": str(text), **message}, **choice}, *_], **body}:
                if failed := next(filter(None, map(_failure, (body, choice, message))), None):
                    return RewardError(f"the judge gave no answer but {failed[:_SHOWN]}")
                reason = choice.get("finish_reason")
                if reason not in (None, "stop"):  # half an answer may end in half a number
                    how = f"did not end its answer by itself (finish_reason is {reason})"
                    return RewardError(f"the judge {how}; it ends in {end_of(text)!r}")
                return self.judge.read(text)
        raise EndpointError(f"the server at {self.endpoint.url} gave no chat completion: {str(answer)[:300]}")


def end_of(answer: str) -> str:
    """The last words of a judge's answer, for messages."""
    return " ".join(answer.split())[-_SHOWN:]


def _failure(part: Mapping[Any, Any]) -> str | None:
    """The reason why a part of a chat completion makes it invalid, whatever its text; None: it does not."""
    for key in ("error", "refusal", "tool_calls", "function_call"):
        if part.get(key):
            return f"{key}: {part[key]}"
    for key in ("object", "status"):
        if part.get(key) == "error":
            return f"{key}: error"
    role = part.get("role")
    return None if role in (None, "assistant") else f"a message of the role {role}"


AnswerAll: TypeAlias = Callable[[Sequence[Messages]], Sequence[str | RewardError]]
"""Conversations -> the answer to each, or why there is none."""


@dataclass(frozen=True)
class BatchJudge:
    """Asks a model of this process about all responses of a step."""

    judge: Judge
    answer_all: AnswerAll
    as_text: Callable[[str], str] = str
    """Marks what is no more than text in a response, so that `answer_all` reads it as that."""

    def __call__(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """Outcome of each request, in order."""
        marked = (replace(request, solution_str=self.as_text(request.solution_str)) for request in requests)
        shown = [self.judge.messages(request) for request in marked]
        asked = [messages for messages in shown if not isinstance(messages, RewardError)]
        answers = iter(self.answer_all(asked) if asked else [])
        return [messages if isinstance(messages, RewardError) else self._read(next(answers)) for messages in shown]

    def _read(self, answer: str | RewardError) -> RewardOutcome:
        return answer if isinstance(answer, RewardError) else self.judge.read(answer)


def _text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """A prompt as text: the content of a single message, else each after the name of its role."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
