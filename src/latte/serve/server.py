"""`latte serve`: a checkpoint behind OpenAI's API.

The application and its routes are those of ``transformers serve``. The endpoints are Latte's
(:mod:`latte.serve.handlers`):

- One model is served. It is loaded and checked as by every command here.
- Prompts begin with the start token, as documents did in training.
- Requests are checked (:mod:`latte.serve.requests`).
- Requests share a step (:mod:`latte.serve.engine`).
- A request reuses the states of text that was read before (:mod:`latte.serve.prefix_cache`).
- A request is not computed any further after its client has disconnected.
- Requests that are too large, too slow or for another host are refused (:mod:`latte.serve.guard`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers.utils.import_utils import is_serve_available

from latte.errors import LatteError, one_line
from latte.lab.evaluate.checkpoint import load_checkpoint
from latte.lab.evaluate.generate import compile_step, has_steps, keeps_state, text_ends
from latte.serve.settings import Serving

ROUTES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models"),
    *("/health", "/metrics"),
)
# A CPU reads 256 tokens per forward nearly as fast as more. Other requests wait a quarter of a
# second.
PIECES = {"cpu": 256, "other": 2048}
REQUEST_ID = b"x-request-id"
THREADS = 64  # number of requests that are checked and split, or wait for that, at the same time
GRACE = 3  # number of seconds that answers have to end when the server ends


def serve(
    checkpoint: str | Path,
    *,
    host: str = "localhost",
    port: int = 8000,
    device: str | None = None,
    dtype: str | None = None,
    serving: Serving | None = None,
) -> None:
    """Answer requests until interrupted.

    Args:
        checkpoint: Folder of the model. It is the model's name in requests, exactly as given here.
        port: Number of the port; 0 takes a free one. The address is printed when the server is
            ready.
        dtype: Dtype of the weights, as for `load_checkpoint`.

    Raises:
        LatteError: The extra is not installed, the port is in use, there is no such checkpoint or
            no tokenizer in it, the model's step cannot be compiled, or the folder of states cannot
            be written.
    """
    parts = ("transformers.cli.serving.systemone", "prometheus_client")
    if not is_serve_available() or any(find_spec(part) is None for part in parts):
        raise LatteError("serve needs its extra: pip install 'latte-attention[serving]'")
    serving = serving or Serving()
    serving.check()
    from latte.serve.guard import allowed_hosts

    serving = replace(serving, hosts=allowed_hosts(host, serving.hosts or ()))
    with contextlib.closing(listen(host, port)) as listening, _one_thread() as threads:
        serving = replace(serving, threads=serving.threads or threads)
        model, tokenizer = load_checkpoint(checkpoint, device, dtype=dtype)
        if serving.compiled:
            _check_compiled(model)
        server, close = make_server(str(checkpoint), model, tokenizer, serving)
        at = listening.getsockname()[1]
        print(f"serving {checkpoint} at http://{host}:{at}/v1 (Ctrl-C ends it)", flush=True)
        try:
            with _rare_collections(), _sigterm_as_ctrl_c(), contextlib.suppress(KeyboardInterrupt):
                server.run(sockets=[listening])
        finally:
            close()


@contextlib.contextmanager
def _one_thread() -> Iterator[int]:
    """Compute in one thread here, where the model is loaded. Gives the number of threads before.

    When two threads of a process have computed in parallel, GNU's OpenMP has more threads than the
    machine has cores. Its threads then sleep between any two operations, and a step of decoding
    takes twice as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for cycles rarely, and never in objects that exist now.

    Otherwise it looks through all of PyTorch again and again while a large body is parsed, and the
    server answers nobody for seconds.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextlib.contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt.

    uvicorn raises the signal again at its end, when the states are not written yet.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # the program that started this thread handles signals
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections. They wait until the server runs."""
    if not 0 <= port <= 65535:
        raise LatteError(f"port: expected 0 to 65535, got {port}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        family, kind, protocol, _, address = found
        # Only if the protocol is named, asyncio sends the parts of an answer without delay. An
        # answer on a connection that stays open would else come 40 ms later.
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        raise LatteError(f"{host}:{port} cannot be served at: {one_line(error)}") from None
    return listening


def make_server(
    name: str, model: Any, tokenizer: Any, serving: Serving
) -> tuple[Any, Callable[[], None]]:
    """A uvicorn server with the endpoints over one model; a function ends its threads."""
    import uvicorn
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.utils import GenerationState

    from latte.serve.guard import Bounded, guarded, patient
    from latte.serve.handlers import Chats, Completions, Responses
    from latte.serve.prompts import Prompts

    _prepare(model, tokenizer)
    prompts = Prompts(tokenizer)
    manager, counters, close = make_answers(model, prompts, serving)

    listed = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "latte"}

    class OneModel(ModelManager):
        """The model. No other model is ever loaded."""

        def __init__(self) -> None:
            super().__init__(model_timeout=-1)

        def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
            return [listed]

        get_gen_models = list_models  # type: ignore[assignment]  # its name before Transformers 5.24

    parts: dict[str, Any] = {"model_manager": OneModel(), "generation_state": GenerationState()}
    about = (name, model, prompts, manager, serving.longest)
    handlers = {"chat": Chats, "completion": Completions, "response": Responses}
    made: dict[str, Any] = {
        f"{kind}_handler": Bounded(own(*about), serving.messages, serving.characters)
        for kind, own in handlers.items()
    }
    absent: Any = {"transcription_handler": None, "systemone_handler": None}
    app = build_server(**parts, **made, **absent)
    # The other routes load models by name, or are for other kinds of models.
    served = [route for route in app.router.routes if getattr(route, "path", None) in ROUTES]
    app.router.routes[:] = served
    app.user_middleware.clear()  # it passes on each event of a stream twice
    add_model(app, listed)
    add_metrics(app, counters)
    add_errors(app)

    class Ending(uvicorn.Server):
        """End unfinished answers with an error after some seconds, so that the server can end."""

        async def startup(self, sockets: Any = None) -> None:
            # Long texts wait for their turn in these threads, and short ones pass them.
            threads = ThreadPoolExecutor(THREADS, "requests")
            asyncio.get_running_loop().set_default_executor(threads)
            await super().startup(sockets)

        async def shutdown(self, sockets: Any = None) -> None:
            prompts.end()
            asyncio.get_running_loop().call_later(GRACE, manager.stop)
            await super().shutdown(sockets)

    config = uvicorn.Config(
        _until_gone(guarded(app, serving.body, serving.hosts), counters),
        http=patient(serving.patience),
        log_level="warning",
        timeout_graceful_shutdown=2 * GRACE,
    )
    return Ending(config), close


def make_answers(model: Any, prompts: Any, serving: Serving) -> tuple[Any, Any, Callable[[], None]]:
    """The manager that answers requests, its counters, and a function that ends its threads."""
    from latte.models import LatteCache
    from latte.serve.answers import Answers, Delivery, OneByOne
    from latte.serve.counters import Counters
    from latte.serve.engine import Engine
    from latte.serve.prefix_cache import StateStore
    from latte.serve.reading import Reader
    from latte.serve.state_folder import StateFolder

    if not keeps_state(model):
        counters = Counters()
        manager = OneByOne(model, prompts, None, counters, serving.threads)
        return manager, counters, manager.close
    folder = None
    if serving.state_folder is not None:
        folder = StateFolder(serving.state_folder, model, serving.state_folder_room)
    store = StateStore(serving.state_cache, folder)
    piece = serving.piece or PIECES.get(model.device.type, PIECES["other"])
    counters = Counters(store, folder)

    def close() -> None:
        if folder is not None:
            folder.close()

    if serving.compiled:
        # Without a state that grows, the length does not matter.
        reader = Reader(model, piece, store, lambda: LatteCache(model.config, max_cache_len=2))
        manager = OneByOne(model, prompts, reader, counters, serving.threads)
        # This runs in the thread that answers requests.
        step = manager.submit(compile_step, model, 2).result()
        model.generation_config.compile_config = step

        def close_thread() -> None:
            manager.close()
            close()

        return manager, counters, close_thread
    delivery = Delivery()
    reader = Reader(model, piece, store)
    engine = Engine(reader, serving.slots, counters, delivery.send, serving.threads)

    def close_all() -> None:
        engine.close()
        close()

    return Answers(engine, prompts, delivery), counters, close_all


def _prepare(model: Any, tokenizer: Any) -> None:
    """Set a model's defaults for requests: the sampling, and the end of the text.

    It samples at temperature 1 unless the checkpoint says otherwise, as clients expect.
    """
    defaults = model.generation_config
    defaults.update(**text_ends(model, tokenizer))
    if defaults.do_sample is None or not defaults.do_sample:
        defaults.do_sample, defaults.top_k = True, 0


def add_model(app: Any, listed: dict[str, Any]) -> None:
    """/v1/models/NAME, where a name can have slashes."""
    from fastapi.responses import JSONResponse

    from latte.serve.requests import no_such_model

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> Any:
        if name != listed["id"]:
            raise no_such_model(listed["id"], name)
        return JSONResponse(listed)


def add_metrics(app: Any, counters: Any) -> None:
    """/metrics, in Prometheus' text format."""
    from fastapi.responses import Response

    @app.get("/metrics")
    def metrics() -> Any:
        return Response(counters.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_errors(app: Any) -> None:
    """Make every error one line of JSON in OpenAI's form, with its status."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException

    from latte.serve.requests import BadRequest, error_body

    def answer(status: int, error: Any, **about: Any) -> Any:
        return JSONResponse(error_body(error, **about), status_code=status)

    @app.exception_handler(RequestValidationError)
    async def no_object(_: Any, error: Any) -> Any:
        return answer(400, ValueError("body: expected a JSON object, got something else"))

    @app.exception_handler(HTTPException)
    async def refused(_: Any, error: HTTPException) -> Any:
        status = 400 if error.status_code == 422 else error.status_code
        return answer(status, ValueError(str(error.detail)))

    @app.exception_handler(BadRequest)
    async def bad(_: Any, error: BadRequest) -> Any:
        return JSONResponse(error.body, status_code=error.status)

    @app.exception_handler(ValueError)
    async def wrong(_: Any, error: ValueError) -> Any:
        return answer(400, error)

    @app.exception_handler(Exception)
    async def failed(_: Any, error: Exception) -> Any:
        return answer(500, error, kind="server_error")


def _check_compiled(model: Any) -> None:
    if not has_steps(model):
        raise LatteError("compile: this model has no step of decoding that can be compiled")
    if any(model.config.state_grows(index) for index in range(model.config.num_hidden_layers)):
        raise LatteError("compile: this model's state grows, so each length would be compiled anew")


def _until_gone(
    app: Callable[..., Awaitable[None]], counters: Any
) -> Callable[..., Awaitable[None]]:
    """The application. It cancels the work on a request when its client has disconnected.

    A request has the name that its client has given it, or a new one. The answer has it too.
    """

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        asked = dict(scope["headers"]).get(REQUEST_ID, b"").decode("latin-1")
        name = scope.setdefault("state", {})["request_id"] = asked or str(uuid.uuid4())
        messages: asyncio.Queue[Any] = asyncio.Queue(1)
        status = 499  # the client has disconnected before an answer

        async def listen() -> None:
            while True:
                message = await receive()
                await messages.put(message)
                if message["type"] == "http.disconnect":
                    return

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (REQUEST_ID, name.encode("latin-1"))]
            await send(message)

        work = asyncio.ensure_future(app(scope, messages.get, noted))
        listening = asyncio.ensure_future(listen())
        try:
            await asyncio.wait({work, listening}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # this also runs when the server ends and cancels the request
            if not work.done():
                work.cancel()
            listening.cancel()
            path = scope["path"]
            path = "/v1/models" if path.startswith("/v1/models/") else path
            counters.request(path if path in ROUTES else "other", status)
        with contextlib.suppress(asyncio.CancelledError):
            await work

    return answer
