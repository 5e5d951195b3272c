"""A conversation about a whole book, with a server that keeps what it has read.

Start a server in another terminal, then ask:

    latte serve runs/smollm2
    python -m examples.book_chat book.txt "Who is this about?" "Where does it take place?"

The first question waits until the book is read. Each further question costs its own tokens only.
Every answer is printed with the number of tokens in the prompt, the number of those that had been
read before, and the seconds until the first word.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from openai import OpenAI

Messages = list[dict[str, str]]


def ask(client: Any, model: str, messages: Messages, tokens: int) -> tuple[str, Any, float]:
    """The greedy answer to a chat, its usage, and the seconds to its first word."""
    begun, first, text, usage = time.perf_counter(), 0.0, "", None
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for part in stream:
        said = part.choices[0].delta.content or "" if part.choices else ""
        if said and not text:
            first = time.perf_counter() - begun
        text, usage = text + said, part.usage or usage
    return text, usage, first


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("book", type=Path, help="text file in UTF-8")
    parser.add_argument("questions", nargs="+", help="questions, asked one after the other")
    parser.add_argument("--url", default="http://localhost:8000/v1", help="address of the server")
    parser.add_argument(
        "--tokens", type=int, default=64, help="largest number of tokens of an answer"
    )
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key="none", timeout=3600, max_retries=0)
    model = client.models.list().data[0].id
    book = args.book.read_text("utf-8")
    messages: Messages = []
    for question in args.questions:
        content = question if messages else f"{book}\n\n{question}"
        messages.append({"role": "user", "content": content})
        text, usage, seconds = ask(client, model, messages, args.tokens)
        messages.append({"role": "assistant", "content": text})
        cached = usage.prompt_tokens_details.cached_tokens
        print(f"> {question}\n{text.strip()}")
        print(
            f"[{usage.prompt_tokens:,} tokens, {cached:,} of them read before;"
            f" first word after {seconds:.2f} s]\n",
            flush=True,
        )


if __name__ == "__main__":
    main()
