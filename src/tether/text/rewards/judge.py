"""Generative judges: a prompt template that shows a response to a language model, and a parser for its answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from tether.spelling import did_you_mean
from tether.text.rewards.outcome import RewardError, RewardOutcome, RewardRequest, outcome_of
from tether.text.rewards.service.endpoint import Endpoint, EndpointError

FIELDS = ("prompt", "response", "ground_truth", "data_source")
"""Names that a template may contain in braces."""
_BETWEEN = r"[-+/^*x×:±–—／∕⁄|→>]{1,9}|(?:points? )?[(\[]?(?:out of|of|to|or|and|in)\b"
_ANOTHER = r"[-+−]?\.?\d\S*|(?:five|ten|(?:a |one )?hundred)\b"
NUMBER = (
    r"Score:\s*([-+−]?\.?\d"
    r"""(?:[^\s<]*[^\s<.,;:!?)\]}*"'`_])?"""  # adjacent characters, without the ends of a sentence or of emphasis
    r"""(?:[*_"'`]*[^\S\n]{0,9}(?:[%％‰]|(?<=\s)(?:per ?cent\b|"""
    rf"""(?:(?:{_BETWEEN})[^\S\n]{{0,9}})?(?:{_ANOTHER}))))?)"""
)
"""The default parser. It matches everything that may belong to a number: 1,000 and 7 out of 10 are errors, not 1 and 7.
"""
_SHOWN = 200  # characters at the end of an answer without a score
_PARSER_SHOWN = 60
Messages: TypeAlias = list[dict[str, str]]


@dataclass(frozen=True)
class Judge:
    """The prompt of a judge and the parser of its answer."""

    prompt: str
    """Template with `FIELDS` in braces; other braces are text."""
    system: str | None = None
    """Template of a system message before the prompt."""
    parser: str = NUMBER
    """Regular expression with one group, of which the last match in an answer is used."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Word -> score if the group matches words, ignoring case. Empty: the group matches a number."""
    range: tuple[float, float] | None = None
    """Smallest and largest valid number; any other number is an error."""

    def check(self, key: str) -> None:
        """Check the template and the parser.

        Raises:
            ValueError: the template or the parser cannot work.
        """
        names = re.findall(r"\{(\w+)\}", f"{self.prompt} {self.system or ''}")
        for name in names:
            if name not in FIELDS and not name.isdigit():
                hint = did_you_mean(name, FIELDS) or f" There are {', '.join(FIELDS)}"
                raise ValueError(f"{key}.prompt: {{{name}}} is not a field.{hint}")
        if "response" not in names:
            raise ValueError(f"{key}.prompt: it does not show the response; write {{response}} where it belongs")
        try:
            groups = re.compile(self.parser).groups
        except re.error as error:
            raise ValueError(f"{key}.parser: {self.parser} is not a regular expression ({error})") from error
        if groups != 1:
            raise ValueError(
                f"{key}.parser: {self.parser} has {groups} groups; use one for the score, and (?:...) for others"
            )
        if self.range and self.range[0] >= self.range[1]:
            raise ValueError(f"{key}.range: [{self.range[0]:g}, {self.range[1]:g}] is empty; give [smallest, largest]")

    def messages(self, request: RewardRequest) -> Messages | RewardError:
        """Return the conversation that shows a response to the judge, or an error if the prompt has no text."""
        if request.dialogue is None or not request.dialogue.messages:
            return RewardError("the prompt is token ids without messages, which a judge cannot read")
        values = {
            "prompt": _text_of(request.dialogue.messages),
            "response": request.solution_str,
            "ground_truth": str(request.ground_truth),
            "data_source": request.data_source,
        }

        def fill(template: str) -> str:  # in one pass, because braces in a response are text
            return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)

        before = [{"role": "system", "content": fill(self.system)}] if self.system else []
        return [*before, {"role": "user", "content": fill(self.prompt)}]

    def read(self, answer: str) -> RewardOutcome:
        """Parse the score in an answer, after any reasoning (``<think>``); an error if there is none."""
        answer = answer.rpartition("</think>")[2]
        if answer.lstrip().startswith("<think>"):
            return RewardError("the judge did not end its reasoning (<think>)")
        matches = re.findall(self.parser, answer)
        if not matches:
            return RewardError(f"the judge's answer has {self._no_match}; it ends in {last_words(answer)!r}")
        text = matches[-1].strip()
        if self.scores:
            scores = {word.casefold(): score for word, score in self.scores.items()}
            if text.casefold() not in scores:
                return RewardError(f"the judge answered {text[:_SHOWN]!r}, which is none of {', '.join(self.scores)}")
            return outcome_of(scores[text.casefold()])
        try:
            score = float(text.replace("_", "?"))  # "?" makes float() refuse 1_000, which it would accept
        except ValueError:
            return RewardError(f"the judge answered {text[:_SHOWN]!r}, which is not a number")
        if self.range and not self.range[0] <= score <= self.range[1]:
            interval = f"[{self.range[0]:g}, {self.range[1]:g}]"
            return RewardError(f"the judge answered {score:g}, which is outside {interval}")
        return outcome_of(score)

    @property
    def _no_match(self) -> str:
        """Describe what an answer without a score lacks, for messages."""
        if self.parser == NUMBER:
            return "no `Score: NUMBER`"
        shown = self.parser if len(self.parser) <= _PARSER_SHOWN else f"{self.parser[:_PARSER_SHOWN]}..."
        return f"no match of its parser {shown}"


@dataclass(frozen=True)
class RemoteJudge:
    """Queries a server with OpenAI's chat completions about one response."""

    judge: Judge
    endpoint: Endpoint
    """The server's ``.../chat/completions``."""
    options: Mapping[str, Any]
    """Fields of the request other than the messages: model, temperature, max_tokens, ..."""

    def __call__(self, request: RewardRequest) -> RewardOutcome:
        """Score a response.

        Raises:
            EndpointError: there is no answer, or it is not in OpenAI's format.
        """
        messages = self.judge.messages(request)
        if isinstance(messages, RewardError):
            return messages
        answer = self.endpoint.ask({"messages": messages, **self.options})
        match answer:
            case {"choices": [{"message": {"content": str(text), **message}, **choice}, *_], **body}:
                if failed := next(filter(None, map(_failure, (body, choice, message))), None):
                    return RewardError(f"the judge returned no answer but {failed[:_SHOWN]}")
                reason = choice.get("finish_reason")
                if reason not in (None, "stop"):  # a truncated answer may end in a truncated number
                    how = f"did not complete its answer (finish_reason is {reason})"
                    return RewardError(f"the judge {how}; it ends in {last_words(text)!r}")
                return self.judge.read(text)
        raise EndpointError(f"the server at {self.endpoint.url} returned no chat completion: {str(answer)[:300]}")


def last_words(answer: str) -> str:
    """Return the last words of a judge's answer, for messages."""
    return " ".join(answer.split())[-_SHOWN:]


def _failure(section: Mapping[Any, Any]) -> str | None:
    """Return why a section of a chat completion makes it invalid, regardless of its text; None if it does not."""
    for key in ("error", "refusal", "tool_calls", "function_call"):
        if section.get(key):
            return f"{key}: {section[key]}"
    for key in ("object", "status"):
        if section.get(key) == "error":
            return f"{key}: error"
    role = section.get("role")
    return None if role in (None, "assistant") else f"a message of the role {role}"


AnswerAll: TypeAlias = Callable[[Sequence[Messages]], Sequence[str | RewardError]]
"""Conversations -> the answer to each, or an error."""


@dataclass(frozen=True)
class BatchJudge:
    """Queries a model in this process about all responses of a step."""

    judge: Judge
    answer_all: AnswerAll
    as_text: Callable[[str], str] = str
    """Marks a response as plain text, so that `answer_all` does not read special tokens in it."""

    def __call__(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        marked = (replace(request, solution_str=self.as_text(request.solution_str)) for request in requests)
        prompts = [self.judge.messages(request) for request in marked]
        conversations = [messages for messages in prompts if not isinstance(messages, RewardError)]
        answers = iter(self.answer_all(conversations) if conversations else [])
        return [messages if isinstance(messages, RewardError) else self._read(next(answers)) for messages in prompts]

    def _read(self, answer: str | RewardError) -> RewardOutcome:
        return answer if isinstance(answer, RewardError) else self.judge.read(answer)


def _text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Convert a prompt to text: the content of a single message; several are preceded by their roles."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
