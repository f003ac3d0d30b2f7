"""Converts rows to prompts: templated, tokenized once, and limited in length.

`PromptSampler` determines the order in which they are sampled.

Control tokens inside messages: a tokenizer maps the text of a control token to that token, regardless of who wrote it,
so by default a question that contains ``<|im_end|>`` ends the user's turn. To read it as text (`ControlTokens`), a mark
is inserted into it before the template is applied. The rendered text is then split at the control tokens of the
template, and each section in between is tokenized without the mark and with control tokens disabled. Control tokens are
the special tokens, and other added tokens in the template (Qwen's ``</tool_response>``). Tokenizers cannot disable the
latter, so they are tokenized in two halves.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import date
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from tether.batch import Prompt, TokenIds, as_token_ids
from tether.keyed_random import permutation
from tether.runtime.deadline import deadline, memory_limit
from tether.runtime.terminal import Screen, Waiting
from tether.spelling import did_you_mean
from tether.text.data.rows import SINGLE_TURN, TOOL_AGENT, Row, Rows, raise_problems
from tether.types import JsonObject, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_SECONDS = 10.0
"""Timeout for a chat template to render one conversation, in seconds."""
TEMPLATE_BYTES = 2 << 30
"""Memory limit of a chat template, in bytes."""
LONGEST_TEXT = 2**26
"""Maximum characters of a rendered conversation."""
TEMPLATE_ERRORS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError,
    TimeoutError, MemoryError,
)  # fmt: skip
"""Errors that expressions in a template can raise."""

TRUNCATIONS: dict[str, Callable[[NDArray[Any], int], NDArray[Any]]] = {
    "left": lambda ids, length: ids[len(ids) - length :],
    "right": lambda ids, length: ids[:length],
    "middle": lambda ids, length: np.concatenate([ids[: length // 2], ids[len(ids) - (length - length // 2) :]]),
}
"""Functions that truncate to `length` tokens, by the side that is removed; `middle` keeps half of them at each end."""


_TODAY = re.compile(r"""\bstrftime_now\(\s*(?:format\s*=\s*)?(["'])(.*?)\1\s*\)""")


def today() -> str:
    """Return today's date as YYYY-MM-DD."""
    return date.today().isoformat()


def dated_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None, day: str | None) -> str | None:
    """Return the chat template with a fixed date instead of today's, which templates such as Llama 3.2's contain.

    Args:
        tokenizer: provides the chat template if `chat_template` is None.
        chat_template: a Jinja template to use instead.
        day: YYYY-MM-DD; None leaves the template as it is.

    Returns:
        The template with the date; `chat_template` if it contains none.
    """
    template = chat_template or tokenizer.chat_template
    if day is None or not isinstance(template, str):
        return chat_template
    fixed = date.fromisoformat(day)
    # transformers passes only plain values to a template, not functions.
    dated = _TODAY.sub(lambda call: json.dumps(fixed.strftime(call[2])), template)
    return chat_template if dated == template else dated


def render(
    row: Row, tokenizer: PreTrainedTokenizerBase, chat_template: str | None, template_kwargs: Mapping[str, Any]
) -> str:
    """Render a row's conversation as the text that the policy continues.

    Args:
        row: its messages are rendered, followed by the opening of the assistant's turn. If the last message is the
            assistant's, the policy continues it, as in transformers' pipelines.
        tokenizer: provides the chat template if `chat_template` is None.
        chat_template: a Jinja template to use instead.
        template_kwargs: further variables of the template, for example ``{"enable_thinking": False}``.

    Raises:
        ValueError: there is no template, or it has a syntax error, refuses the conversation (some refuse a system
            message), fails or does not end.
    """
    if chat_template is None and not tokenizer.chat_template:
        raise ValueError(
            f"{tokenizer.name_or_path}: its tokenizer has no chat template, so conversations can't be written as "
            "tokens. Take the model's chat (instruct) version, or give a Jinja template with data.chat_template."
        )
    continues = row.messages[-1].get("role") == "assistant"
    opening = {"add_generation_prompt": not continues, "continue_final_message": continues}
    arguments = {**opening, "chat_template": chat_template, **template_kwargs}
    try:
        return write_conversation(row.messages, tokenizer, **arguments)
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}. Change the row, or the template with data.chat_template.") from error


def write_conversation(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, **arguments: Any) -> str:
    """Render a conversation with the tokenizer's chat template and the `arguments` of `apply_chat_template`.

    Raises:
        ValueError: the template has a syntax error, refuses the conversation, fails or does not end.
    """
    text = apply_template(messages, tokenizer, tokenize=False, **arguments)
    assert isinstance(text, str)
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"the chat template wrote {len(text)} characters, and {LONGEST_TEXT} are the most")
    return text


def apply_template(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, **arguments: Any) -> object:
    """Call `apply_chat_template` with limits of time and memory.

    Raises:
        ValueError: the template has a syntax error, refuses the conversation, fails or does not end.
    """
    try:
        with deadline(TEMPLATE_SECONDS), memory_limit(TEMPLATE_BYTES):
            return tokenizer.apply_chat_template([dict(message) for message in messages], **arguments)
    except TEMPLATE_ERRORS as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        why = f"it takes more than {TEMPLATE_BYTES / 2**30:g} GiB" if isinstance(error, MemoryError) else error
        raise ValueError(f"the chat template refuses the conversation (roles: {roles}): {why}") from error


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[TokenIds]:
    """Return the token ids of rendered texts. No special tokens are added, because the template contains them."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return [np.array(ids, dtype=np.int32) for ids in encoded]


def decode(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | TokenIds, *, skip_special_tokens: bool = False
) -> str:
    """Return the text of a sequence of token ids."""
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
    assert isinstance(text, str)
    return text


MARK = "\uf4c3\ue6a9"
"""Default mark, for text that is marked before its context is known."""
_PRIVATE_USE = range(0xE000, 0xF900)
"""Unicode characters without a predefined meaning."""


class ControlTokens:
    """The control tokens of a tokenizer, and how messages with such tokens are tokenized.

    Args:
        tokenizer: the policy's.
        chat_template: a Jinja template to use instead of the tokenizer's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        template, added = chat_template or str(tokenizer.chat_template), tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | {*tokenizer.all_special_tokens} - {""}
        written = {t.content for t in added if len(t.content.strip()) > 1 and t.content in template} - special
        tokens = sorted(special | written, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")  # longest first; (?!) never matches
        inside = (f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in written)
        self._cut = re.compile("|".join(inside) or r"(?!)")

    def find_in(self, messages: Sequence[Message]) -> set[str]:
        """Return the control tokens that messages contain."""
        return {token for message in messages for token in self._pattern.findall(message["content"])}

    def insert_marks(self, messages: Sequence[Message]) -> tuple[list[JsonObject], str]:
        """Return the messages with a mark inserted into each control token, and the mark."""
        text = "".join(message["content"] for message in messages)
        mark = next(character for character in map(chr, _PRIVATE_USE) if character not in text)
        return [{**m, "content": self.as_text(m["content"], mark)} for m in messages], mark

    def as_text(self, text: str, mark: str = MARK, spared: Container[str] = ()) -> str:
        """Return the text with a mark after the first character of each control token, except those that are
        `spared`."""

        def insert_mark(match: re.Match[str]) -> str:
            return match[0] if match[0] in spared else match[0][0] + mark + match[0][1:]

        return self._pattern.sub(insert_mark, text)

    def tokenize(self, text: str) -> TokenIds:
        """Return the token ids of a rendered text that may contain output of `as_text`."""
        return self.tokenize_marked(text, MARK) if MARK in text else tokenize([text], self._tokenizer)[0]

    def tokenize_marked(self, text: str, mark: str) -> TokenIds:
        """Return the token ids of a rendered text, reading marked control tokens as text."""
        ids: list[int] = []
        position = 0
        for match in self._pattern.finditer(text):
            ids += [*self._as_text(text[position : match.start()].replace(mark, "")), self._id_of(match[0])]
            position = match.end()
        return np.array([*ids, *self._as_text(text[position:].replace(mark, ""))], dtype=np.int32)

    def _as_text(self, text: str) -> list[int]:
        texts = [text_ids for text_ids in self._cut.split(text) if text_ids]
        if not texts:
            return []
        ids = self._tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [token for text_ids in ids for token in text_ids]

    def _id_of(self, token: str) -> int:
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        assert isinstance(token_id, int)
        return token_id


class PromptSampler:
    """Yields batches of row indices, each row exactly once per epoch; resumable after each batch.

    The order of an epoch depends only on (seed, epoch), so the state is the epoch and the number of rows consumed. The
    batch size may differ after a resume.

    The last batch of an epoch may be smaller than `batch_size`; no row is dropped, and no batch mixes two epochs. With
    a `batch_size` above `num_prompts`, a batch is the full dataset.
    """

    def __init__(self, num_prompts: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        assert min(num_prompts, batch_size) > 0, (num_prompts, batch_size)
        self._num_prompts = num_prompts
        self.batch_size = min(batch_size, num_prompts)
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0
        self._cursor = 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._epoch

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches per epoch, including a short last one."""
        return -(-self._num_prompts // self.batch_size)

    def next_batch(self) -> list[int]:
        """Return the row indices of the next batch: between 1 and `batch_size`."""
        batch = self._order[self._cursor : self._cursor + self.batch_size].tolist()
        self._cursor += len(batch)
        if self._cursor == self._num_prompts:
            self._epoch += 1
            self._cursor = 0
            self._order = self._order_of(self._epoch)
        return batch

    def state_dict(self) -> dict[str, int]:
        """Return the state: the epoch of the next batch, and the number of its rows consumed."""
        return {"epoch": self._epoch, "cursor": self._cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from the `state_dict` of a sampler with the same data and seed.

        Raises:
            ValueError: the position is beyond the dataset, which therefore differs.
        """
        if not 0 <= state["cursor"] < self._num_prompts:
            raise ValueError(
                f"data cursor {state['cursor']} is beyond the dataset's {self._num_prompts} prompts. "
                "Resume with the data files that the checkpoint was trained on."
            )
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if self._shuffle:
            return permutation(self._num_prompts, self._seed, epoch, "epoch")
        return np.arange(self._num_prompts)


CHUNK = 512
"""Number of rows rendered and tokenized at once."""
_NO_IDS = as_token_ids((), "token_ids")


@dataclass(frozen=True)
class PromptOptions:
    """Settings of the conversion from rows to prompts."""

    max_prompt_length: int
    """Maximum tokens of a prompt, including those of the template."""
    filter_overlong_prompts: bool = False
    """Whether to drop longer prompts; the report counts them."""
    truncation: str = "error"
    """What to do with longer prompts that are not dropped: `error`, or truncate the `left`, `right` or `middle`."""
    max_samples: int = -1
    """Maximum number of rows, before overlong ones are dropped; -1 uses all."""
    shuffle: bool = False
    """Whether `max_samples` chooses rows at random instead of the first ones."""
    seed: int = 0
    """Seed of that choice."""
    chat_template: str | None = None
    """A Jinja template to use instead of the tokenizer's."""
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Further variables of the template."""
    control_tokens_as_text: bool = False
    """Whether to read control tokens inside messages as text; otherwise they act as control tokens."""
    default_agent: str = SINGLE_TURN
    """Agent of rows without an `agent_name`."""
    tools: Sequence[Mapping[str, object]] = ()
    """Tool schemas for the prompts of rows whose agent has tools."""

    def template_kwargs(self, row: Row) -> Mapping[str, object]:
        """Return the template's variables for a row."""
        listed = self.tools if (row.agent_name or self.default_agent) == TOOL_AGENT else row.tools
        return {"tools": list(listed), **self.chat_template_kwargs} if listed else self.chat_template_kwargs


@dataclass(frozen=True)
class PromptReport:
    """Counts of the rows used and dropped; lengths are in tokens."""

    num_rows: int
    """Rows in the files."""
    num_chosen: int
    """Rows after `max_samples`."""
    num_dropped: int
    """Rows longer than `max_prompt_length` that were dropped."""
    num_truncated: int
    """Rows longer than `max_prompt_length` that were truncated."""
    longest: int
    """Length of the longest prompt before dropping and truncating."""
    max_prompt_length: int
    truncation: str
    control_tokens: Mapping[str, int] = field(default_factory=dict)
    """Control token -> number of rows whose messages contain it, if it acts as a control token."""
    num_distinct: int = 0
    """Distinct prompts among those used."""
    num_repeated: int = 0
    """Generated validation prompts dropped because they repeat, or are also training prompts."""
    num_trained: int = 0
    """Validation prompts used although they are also training prompts."""
    recognised: tuple[str, ...] = ()
    """Sources whose layout was recognised by their columns."""

    def __str__(self) -> str:
        num_used = self.num_chosen - self.num_dropped - self.num_repeated
        distinct = f" ({self.num_distinct} distinct)" if self.num_distinct < num_used else ""
        counts = [f"{num_used} prompts{distinct} of {self.num_rows} rows"]
        if self.num_repeated:
            counts.append(f"{self.num_repeated} repeated or in training left out")
        if self.num_dropped:
            counts.append(f"{self.num_dropped} longer than {self.max_prompt_length} tokens dropped")
        if self.num_truncated:
            counts.append(f"{self.num_truncated} cut to {self.max_prompt_length} tokens ({self.truncation})")
        return "; ".join([", ".join(counts), f"the longest has {self.longest} tokens", *self.recognised])


class PromptDataset:
    """The prompts of a dataset, a sequence of `Prompt`.

    Token ids are computed once, by the constructor; the other fields of a prompt are read from its row on access.

    Args:
        rows: from `tether.text.data.sources.load_rows` or `tether.text.data.custom.load_custom_dataset`.
        tokenizer: the policy's; None: prompts have no token ids, for a reward that reads texts.
        options: settings of the conversion.

    Raises:
        ValueError: the truncation is unknown, the tokenizer has no chat template, the template refuses a conversation,
            prompts are too long under ``truncation="error"``, or no prompt remains.
    """

    def __init__(self, rows: Rows, tokenizer: PreTrainedTokenizerBase | None, options: PromptOptions) -> None:
        if options.truncation not in ("error", *TRUNCATIONS):
            allowed = ("error", *TRUNCATIONS)
            hint = did_you_mean(options.truncation, allowed)
            raise ValueError(f"data.truncation is {options.truncation!r}; it may be {', '.join(allowed)}.{hint}")
        limit = options.max_prompt_length
        chosen = choose_rows(len(rows), options)
        encoded = _encode(rows, chosen, tokenizer, options) if tokenizer else [_NO_IDS] * len(chosen)
        overlong = [i for i, ids in enumerate(encoded) if len(ids) > limit]
        dropped = set(overlong) if options.filter_overlong_prompts else set()
        if options.truncation == "error" and not options.filter_overlong_prompts:
            raise_problems([_too_long(rows[chosen[i]], len(encoded[i]), limit) for i in overlong])
        used = [i for i in range(len(chosen)) if i not in dropped]
        self.report = PromptReport(
            num_rows=len(rows),
            num_chosen=len(chosen),
            num_dropped=len(dropped),
            num_truncated=len(overlong) - len(dropped),
            longest=max(len(ids) for ids in encoded),
            max_prompt_length=limit,
            truncation=options.truncation,
            recognised=tuple(rows.recognised()),
            control_tokens=_count(rows, chosen, tokenizer, options)
            if tokenizer and not options.control_tokens_as_text
            else {},
        )
        if not used:
            raise ValueError(f"no prompt is left: {self.report}. Raise data.max_prompt_length.")
        self._rows = rows
        self._row_indices = [chosen[i] for i in used]
        self._token_ids = [truncate_ids(encoded[i], limit, options.truncation) for i in used]
        self.report = replace(self.report, num_distinct=len(self._keys()))

    def _keys(self) -> set[bytes]:
        return {ids.tobytes() for ids in self._token_ids}

    def as_validation_for(self, train: PromptDataset) -> PromptDataset:
        """Return this dataset as the validation data of a run that trains on `train`.

        Generated prompts that repeat or are also in `train` are dropped. Prompts of files are only counted in the
        report, so that a score is that of the file.

        Raises:
            ValueError: no prompt remains.
        """
        trained, used = train._keys(), list[int]()
        seen = set[bytes]()
        for position, (index, ids) in enumerate(zip(self._row_indices, self._token_ids, strict=True)):
            key = ids.tobytes()
            if not self._rows.is_generated(index) or (key not in trained and key not in seen):
                used.append(position)
            seen.add(key)
        if not used:
            raise ValueError(
                "data.val_files: training has every one of these questions. Generate the two with part=train and "
                "part=test, which share none."
            )
        held_out = copy(self)
        held_out._row_indices = [self._row_indices[position] for position in used]
        held_out._token_ids = [self._token_ids[position] for position in used]
        held_out.report = replace(
            self.report,
            num_distinct=len(held_out._keys()),
            num_repeated=len(self) - len(used),
            num_trained=sum(ids.tobytes() in trained for ids in held_out._token_ids),
        )
        return held_out

    def __len__(self) -> int:
        return len(self._row_indices)

    def __getitem__(self, position: int) -> Prompt:
        row = self._rows[self._row_indices[position]]
        return Prompt(
            token_ids=self._token_ids[position],
            data_source=row.data_source,
            ground_truth=row.ground_truth,
            messages=row.messages,
            extra_info=row.extra_info,
            index=self._row_indices[position],
            agent_name=row.agent_name,
        )

    def __iter__(self) -> Iterator[Prompt]:
        return (self[position] for position in range(len(self)))

    def check_rows(self, check: Callable[[Row], None]) -> None:
        """Call `check` with the row of each prompt.

        Raises:
            ValueError: `check` raised one; lists up to ten rows with their locations.
        """
        problems = []
        for index in self._row_indices:
            row = self._rows[index]
            try:
                check(row)
            except ValueError as error:
                problems.append(f"{row.place}: {error}")
        raise_problems(problems)

    def first_out_of_vocabulary(self, vocabulary: int) -> str | None:
        """Describe the first prompt with a token id outside of a vocabulary of this size; None if there is none."""
        for number, ids in zip(self._row_indices, self._token_ids, strict=True):
            if len(ids) and ids.max() >= vocabulary:
                return f"{self._rows[number].place} has the token {ids.max()}"
        return None

    def fingerprint(self) -> str:
        """Return a hash of the data that training uses: token ids, source, ground truth and extra_info.

        It does not depend on the paths of files; options and the template matter only by their effect.
        """
        digest = hashlib.sha256()
        for prompt in self:
            ids = tuple(prompt.token_ids.tolist())
            seen = (prompt.index, ids, prompt.data_source, prompt.ground_truth, prompt.extra_info)
            digest.update(repr(seen if prompt.agent_name is None else (*seen, prompt.agent_name)).encode())
        return digest.hexdigest()


def choose_rows(num_rows: int, options: PromptOptions) -> list[int]:
    """Return the indices of the rows that `max_samples` selects, in ascending order."""
    if not 0 < options.max_samples < num_rows:
        return list(range(num_rows))
    if not options.shuffle:
        return list(range(options.max_samples))
    return sorted(permutation(num_rows, options.seed, 0, "max_samples")[: options.max_samples].tolist())


def _encode(
    rows: Rows, numbers: Sequence[int], tokenizer: PreTrainedTokenizerBase, options: PromptOptions
) -> list[TokenIds]:
    encoded: list[TokenIds] = []
    with Waiting("preparing prompts", len(numbers), Screen(stderr=True), late=True) as waiting:
        for start in range(0, len(numbers), CHUNK):
            chunk = [rows[number] for number in numbers[start : start + CHUNK]]
            encoded += _encode_chunk(chunk, tokenizer, options)
            waiting.show(len(encoded))
    return encoded


def _count(
    rows: Rows, numbers: Sequence[int], tokenizer: PreTrainedTokenizerBase, options: PromptOptions
) -> Mapping[str, int]:
    control = ControlTokens(tokenizer, options.chat_template)
    templated = (row for row in (rows[number] for number in numbers) if row.token_ids is None)
    return Counter(token for row in templated for token in control.find_in(row.messages))


def _encode_chunk(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, options: PromptOptions) -> list[TokenIds]:
    if options.control_tokens_as_text:
        control = ControlTokens(tokenizer, options.chat_template)
        return [_encode_as_text(row, control, tokenizer, options) for row in rows]
    texts = [
        render(row, tokenizer, options.chat_template, options.template_kwargs(row))
        for row in rows
        if row.token_ids is None
    ]
    templated = iter(tokenize(texts, tokenizer))
    return [next(templated) if row.token_ids is None else row.token_ids for row in rows]


def _encode_as_text(
    row: Row, control: ControlTokens, tokenizer: PreTrainedTokenizerBase, options: PromptOptions
) -> TokenIds:
    if row.token_ids is not None:
        return row.token_ids
    messages, mark = control.insert_marks(row.messages)
    text = render(
        replace(row, messages=tuple(messages)), tokenizer, options.chat_template, options.template_kwargs(row)
    )
    return control.tokenize_marked(text, mark)


def truncate_ids(ids: NDArray[Any], limit: int, truncation: str) -> NDArray[Any]:
    """Truncate ids, or anything parallel to them, to `limit` tokens."""
    return TRUNCATIONS[truncation](ids, limit) if len(ids) > limit else ids


def _too_long(row: Row, length: int, limit: int) -> str:
    return (
        f"{row.place}: the prompt has {length} tokens, more than data.max_prompt_length={limit}. Raise it, drop such "
        "rows with data.filter_overlong_prompts=True, or cut them with data.truncation=left|right|middle."
    )
