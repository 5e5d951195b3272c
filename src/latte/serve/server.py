"""`latte serve`: a checkpoint behind Transformers' own OpenAI-compatible server.

Endpoints, requests and answers are those of ``transformers serve``. What is different: the one
model is loaded and checked as by every command here, prompts begin with the start token as
documents did in training, and a request whose client has gone is not computed any further.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.utils.import_utils import is_serve_available

from latte.data.tokenizers import document_ends
from latte.errors import LatteError, one_line
from latte.evaluate.checkpoint import load_checkpoint
from latte.evaluate.generate import compile_step, has_steps, text_ends

# For tokenizers without one. The start token comes by itself.
PLAIN_CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def serve(
    checkpoint: str | Path,
    *,
    host: str = "localhost",
    port: int = 8000,
    device: str | None = None,
    compiled: bool = False,
) -> None:
    """Answer requests until interrupted.

    Args:
        checkpoint: a folder; as it is written here it is the model's name in requests.
        port: 0 takes a free one. The address is printed once requests are taken.
        compiled: compile a step of decoding before the first request.

    Raises:
        LatteError: the extra is not installed, the port is in use, no such checkpoint or no
            tokenizer in it, a model whose step cannot be compiled.
    """
    if not is_serve_available() or find_spec("transformers.cli.serving.systemone") is None:
        raise LatteError("serve needs its extra: pip install 'latte-attention[serving]'")
    with contextlib.closing(listen(host, port)) as listening:
        model, tokenizer = load_checkpoint(checkpoint, device)
        if compiled:
            _check_compiled(model)
        server = make_server(str(checkpoint), model, tokenizer, compiled)
        at = listening.getsockname()[1]
        print(f"serving {checkpoint} at http://{host}:{at}/v1 (Ctrl-C ends it)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections; they wait until the server runs."""
    if not 0 <= port <= 65535:
        raise LatteError(f"port: expected 0 to 65535, got {port}")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        raise LatteError(f"{host}:{port} cannot be served at: {one_line(error)}") from None
    return listening


def make_server(name: str, model: Any, tokenizer: Any, compiled: bool) -> Any:
    """A uvicorn server with Transformers' handlers over one model."""
    import uvicorn
    from fastapi.responses import JSONResponse
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.systemone import SystemOneHandler
    from transformers.cli.serving.transcription import TranscriptionHandler
    from transformers.cli.serving.utils import GenerateManager, GenerationState

    class OneModel(ModelManager):
        """The model and its tokenizer; requests that name another are refused."""

        def __init__(self) -> None:
            super().__init__(model_timeout=-1)
            self.force_model = name

        def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
            return model, tokenizer

        def get_gen_models(self) -> list[dict[str, Any]]:  # type: ignore[override]
            return [{"id": name, "object": "model", "created": 0, "owned_by": "latte"}]

    class Requests(GenerateManager):
        """One after the other in one thread, each with the start token before its prompt."""

        def generate_streaming(self, model: Any, processor: Any, inputs: Any, *rest, **options):  # type: ignore
            return super().generate_streaming(model, processor, begin(inputs), *rest, **options)

        async def generate_non_streaming(  # type: ignore[override]
            self, model: Any, processor: Any, inputs: Any, *rest: Any, **options: Any
        ) -> tuple[str, int, Tensor]:
            gone = threading.Event()

            def stops(ids: Tensor, scores: Tensor) -> Tensor:
                return torch.full(ids.shape[:1], gone.is_set(), device=ids.device)

            begun = {**begin(inputs), "stopping_criteria": StoppingCriteriaList([stops])}
            work = super().generate_non_streaming(model, processor, begun, *rest, **options)
            try:
                text, _, ids = await asyncio.shield(work)
            except asyncio.CancelledError:
                gone.set()
                raise
            return text, inputs["input_ids"].shape[-1], ids

    class State(GenerationState):
        def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
            return requests

    begin, requests = _prepare(model, tokenizer), Requests()
    if compiled:  # in the thread that answers requests; no length matters where no state grows
        step = requests.submit(compile_step, model, 2).result()
        model.generation_config.compile_config = step
    parts: dict[str, Any] = {
        "model_manager": OneModel(),
        "generation_state": State(compile=compiled),
    }
    app = build_server(
        **parts,
        chat_handler=ChatCompletionHandler(**parts),
        completion_handler=CompletionHandler(**parts),
        response_handler=ResponseHandler(**parts),
        transcription_handler=TranscriptionHandler(**parts),
        systemone_handler=SystemOneHandler(**parts),
    )

    @app.exception_handler(ValueError)
    async def refuse(_: Any, error: ValueError) -> Any:
        return JSONResponse({"error": {"message": one_line(error)}}, status_code=400)

    return uvicorn.Server(uvicorn.Config(_until_gone(app), log_level="warning"))


def _prepare(model: Any, tokenizer: Any) -> Callable[[Any], dict[str, Tensor]]:
    """Give a model and its tokenizer what requests leave open; how a prompt's tokens begin.

    Sampling at temperature 1 unless the checkpoint says otherwise, as clients expect; the end of
    the text; a template of chats. A tokenizer with a template of its own says how texts begin.
    """
    start, _ = document_ends(tokenizer)
    defaults = model.generation_config
    defaults.update(**text_ends(model, tokenizer))
    if defaults.do_sample is None or not defaults.do_sample:
        defaults.do_sample, defaults.top_k = True, 0
    own_template = tokenizer.chat_template is not None
    if not own_template:
        tokenizer.chat_template = PLAIN_CHAT

    def begin(inputs: Any) -> dict[str, Tensor]:
        ids = inputs["input_ids"].long()
        if not own_template and (ids.shape[1] == 0 or int(ids[0, 0]) != start):
            ids = torch.cat([ids.new_full((1, 1), start), ids], 1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return begin


def _check_compiled(model: Any) -> None:
    if not has_steps(model):
        raise LatteError("compile: this model has no step of decoding that can be compiled")
    if any(model.config.state_grows(index) for index in range(model.config.num_hidden_layers)):
        raise LatteError("compile: this model's state grows, so each length would be compiled anew")


def _until_gone(app: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The application, whose work on a request is cancelled when its client has gone."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        messages: asyncio.Queue[Any] = asyncio.Queue(1)

        async def listen() -> None:
            while True:
                message = await receive()
                await messages.put(message)
                if message["type"] == "http.disconnect":
                    return

        work = asyncio.ensure_future(app(scope, messages.get, send))
        listening = asyncio.ensure_future(listen())
        await asyncio.wait({work, listening}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    return answer
