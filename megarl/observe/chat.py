"""`megarl chat`: a conversation with a Hugging Face model folder in the terminal, token by token as they are made."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from megarl.data.chat import ChatTemplate
from megarl.data.stop_finder import StopFinder, check_stops_of, decode_by
from megarl.data.tokenize import load_tokenizer
from megarl.errors import ModelError
from megarl.system.hidden_bars import hide_bars

if TYPE_CHECKING:
    from rich.console import Console

COMMANDS = "the commands are /new, which forgets what was said, and /quit; a line that begins with a space is sent as it is"


def chat(
    folder: Path,
    console: Console,
    *,
    max_new_tokens: int,
    temperature: float,
    config: Any = None,
    load: Any = None,
    lines: Iterable[str] | None = None,
    system_prompt: str | None = None,
    chat_template: str | None = None,
    template_args: Mapping[str, Any] | None = None,
    stop: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
) -> list[dict[str, str]]:
    """Answer every line of `lines` (None: stdin) in one conversation with the model in the Hugging Face folder `folder`.

    `system_prompt` stands before the conversation. `chat_template` is a Jinja file in place of the model's template, and
    `template_args` are options of it. A model without a chat template continues each line by itself. `temperature` 0 is greedy.
    `stop` and `stop_token_ids` end an answer as those of `rollout` end a response. `config` is transformers' config object
    where the folder's own cannot be read as one, `load` its function that loads the model. Returns what is remembered of the
    conversation at its end.

    Raises:
        ConfigError: a stop is none.
        ModelError: `folder` holds no model that can be loaded.
        DataError: the template or an option of it is of no use, or it refuses the conversation.
    """
    tokenizer = load_tokenizer(str(folder))
    template = ChatTemplate(tokenizer, chat_template or "auto", None, template_args=template_args)
    template.left_out.refuses = False  # what was said goes on
    check_stops_of(tokenizer, "rollout", stop, stop_token_ids)
    model, talks = load_model(folder, config, load), template.is_used
    if console.is_terminal:
        console.print(f"one line is one message; {COMMANDS}", style="dim", markup=False, highlight=False)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    begun = [{"role": "system", "content": system_prompt}] if talks and system_prompt is not None else []
    messages: list[dict[str, str]] = list(begun)
    for line in lines if lines is not None else _typed(console):
        message = line.strip()
        if message == "/quit":
            break
        if message == "/new":
            messages = list(begun)
        elif re.match(r"/\w*(\s|$)", line):
            console.print(Text(f"{message.split()[0]} is no command; {COMMANDS}"), soft_wrap=True)
        elif message:
            messages = [*messages, {"role": "user", "content": message}] if talks else []
            ids = _prompt_ids(template, messages, message)
            ends = {"stopping_criteria": [_stopping(tokenizer, stop, stop_token_ids)]} if stop or stop_token_ids else {}
            answer = _answer(model, tokenizer, ids, console, max_new_tokens=max_new_tokens, **sampling, **ends)
            messages = [*messages, {"role": "assistant", "content": answer}] if talks else []
    return messages


def _stopping(tokenizer: Any, stop: Sequence[str], stop_token_ids: Sequence[int]) -> Callable[..., Any]:
    """A criterion of transformers that ends one answer behind its first stop."""
    import torch

    finder = StopFinder(stop, decode_by(tokenizer))

    def is_over(ids: Any, scores: Any, **given: Any) -> Any:
        token = int(ids[0, -1])
        return torch.tensor([finder.take(token) or token in stop_token_ids], device=ids.device)

    return is_over


def _prompt_ids(template: ChatTemplate, said: list[dict[str, str]], message: str) -> Any:
    if not said:
        return template.tokenizer(message, return_tensors="pt").input_ids
    text = template.render(template.fitted(said, "the conversation"), "the conversation", ask=True)
    return template.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


def _answer(model: Any, tokenizer: Any, ids: Any, console: Console, **options: Any) -> str:
    from transformers import TextIteratorStreamer

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    arguments = {"input_ids": ids.to(model.device), "streamer": streamer, "pad_token_id": padding, **options}
    thread = threading.Thread(target=_generate, args=(model, streamer, arguments), daemon=True)
    thread.start()
    parts = []
    for part in streamer:
        console.print(part, end="", markup=False, highlight=False, soft_wrap=True)
        parts.append(part)
    console.print()
    thread.join()
    return "".join(parts)


def _generate(model: Any, streamer: Any, arguments: dict[str, Any]) -> None:
    try:
        model.generate(**arguments)
    finally:
        streamer.end()  # else an error here would leave the terminal waiting


def load_model(path: Path, config: Any = None, load: Any = None) -> Any:
    """transformers' model of a folder, by `config` or by the folder's own. Raises ModelError if it cannot be loaded.

    `load`: transformers' function that loads it; None: that of text models.
    """
    import torch
    from transformers import AutoModelForCausalLM

    hide_bars()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        options = {"config": config, "dtype": "auto", "local_files_only": True, "trust_remote_code": False}
        return (load or AutoModelForCausalLM.from_pretrained)(str(path), **options).to(device).eval()
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ModelError(f"{path} holds no model that can be loaded: {type(error).__name__}: {reason}") from error


def _typed(console: Console) -> Iterable[str]:
    while True:
        if console.is_terminal:
            console.print("> ", end="", style="bold")
        line = sys.stdin.readline()
        if not line:
            return
        yield line
