"""What a conversation consists of: turns, what a chat template puts around them, answers that come piece by piece."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformers import TextIteratorStreamer

_MARKS = ("#" * 13 + "1", "#" * 13 + "2", "#" * 13 + "3")  # messages that no template contains
BETWEEN_TEXTS = "\n\n"  # of one message


@dataclass(frozen=True)
class Turn:
    """A text that was read, or a question and its answer.

    Attributes
    ----------
    text : str
        What was read or asked.
    answer : str or None
        None where nothing was asked.
    start, answer_start, end : int
        Places among the conversation's tokens: of the turn's first, of the answer's first, and behind its last.
    """

    text: str
    answer: str | None
    start: int
    answer_start: int
    end: int


@dataclass(frozen=True)
class ChatPieces:
    """The text between messages.

    Attributes
    ----------
    opening : str
        Before the first message of the user, the system's message included.
    answering : str
        Between a message of the user and the answer.
    following : str
        Between an answer and the next message of the user. The end-of-turn token comes first, where there is one.
    """

    opening: str
    answering: str
    following: str


def chat_pieces(tokenizer, system: str | None) -> ChatPieces:
    """The pieces of a tokenizer's chat template; plain newlines where it has none.

    Pieces are taken from made-up messages, so a conversation consists of what was said, token by token, also where a
    template would leave something out of earlier turns (such as reasoning).

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    system : str, optional
        The system's message; by default the template's own, if it has one.

    Raises
    ------
    ValueError
        If the template does not show messages as they are, or takes no system message.
    """
    if tokenizer.chat_template is None:
        start = (tokenizer.bos_token or "") + ("" if system is None else system + BETWEEN_TEXTS)
        return ChatPieces(start, "\n", "\n")
    first, answer, second = _MARKS
    head = [] if system is None else [{"role": "system", "content": system}]
    opening, answering = _split(tokenizer, [*head, _user(first)], [first])
    turns = [_user(first), {"role": "assistant", "content": answer}, _user(second)]
    return ChatPieces(opening, answering, _split(tokenizer, turns, [answer, second])[1])


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _split(tokenizer, messages: list[dict[str, str]], marks: list[str]) -> list[str]:
    """The text of messages, cut at the marks."""
    try:
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
    except Exception as error:
        raise ValueError(f"the tokenizer's chat template refuses these messages ({error}); leave system out") from error
    parts, rest = [], text
    for mark in marks:
        part, found, rest = rest.partition(mark)
        if not found or mark in rest:
            raise ValueError("the tokenizer's chat template does not show each message once, as it is; set it to None")
        parts.append(part)
    return [*parts, rest]


# --- streams ----------------------------------------------------------------------------------------------------------


class _BrokenOff(Exception):
    """The pieces of a stream are not wanted any more."""


def streamed(tokenizer, ask: Callable) -> Iterator[str]:
    """Pieces of an answer, while a thread generates it.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    ask : callable
        ``ask(streamer, check)`` calls ``generate`` with a streamer and a stopping criterion. If not all pieces are
        taken, the criterion raises, so that ``generate`` ends. What ``ask`` raises otherwise is raised here.
    """
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    is_over, failures = threading.Event(), []

    def check(*args, **kwargs) -> bool:
        if is_over.is_set():
            raise _BrokenOff
        return False

    def work() -> None:
        try:
            ask(streamer, check)
        except BaseException as error:  # raised again where the pieces are taken
            failures.append(error)
        finally:
            streamer.end()  # or the pieces would be waited for forever

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield from filter(None, streamer)
    finally:
        is_over.set()
        thread.join()
    if failures:
        raise failures[0]
