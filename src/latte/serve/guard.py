"""What a server takes from its clients: how large a request is, what for, and how slowly it comes.

These limits hold before any work on a request. So one client cannot stop the server for others.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import JSONResponse
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from latte.errors import LatteError
from latte.serve.requests import BadRequest, error_body

App = Callable[..., Awaitable[None]]
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
# A body that is at most so many times too large is read to its end and dropped, because many
# clients read an answer only after they have sent all.
DROPPED = 16


def allowed_hosts(host: str, named: Sequence[str] = ()) -> list[str] | None:
    """The names by which requests may call a server; None are all.

    A page in a browser can reach a server of the same machine: its own name has the address of that
    machine after its first answer (DNS rebinding). The requests of the page still have its name.

    Args:
        host: Address at which the server listens.
        named: Further names. ``*.example.com`` are all names that end so, ``*`` is any name.

    Raises:
        LatteError: A name has a port or a ``*`` elsewhere.
    """
    for name in named:
        # Letters of a name, or an IPv6 address in brackets; both without a port.
        if not re.fullmatch(r"\*|(\*\.)?[\w.-]+|\[[0-9a-fA-F:.]+\]", name):
            raise LatteError(
                "allowed-hosts: expected names without a port, such as example.com, *.example.com"
                f" or *, got {name!r}"
            )
    if not is_loopback(host):
        return list(named) or None
    return [*LOOPBACK, f"[{host}]" if ":" in host else host, *named]


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach a server that listens at this address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def guarded(app: App, most: int, hosts: Sequence[str] | None = None) -> App:
    """The application, for requests whose host and size are allowed.

    Args:
        app: Application that answers an ``HTTPException`` of its ``receive``.
        most: Largest number of bytes of a body. A larger one gets status 413.
        hosts: Allowed values of the Host header; others get status 400. None allows all.
    """

    async def guard(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if hosts is not None and not await _is_trusted(scope, hosts):
            said = f"host: expected {' or '.join(hosts)}, got {headers.get('host')!r}"
            await JSONResponse(error_body(said), status_code=400)(scope, receive, send)
            return
        declared = int(headers.get("content-length", "0"))
        came = 0

        async def bounded() -> Any:
            nonlocal came
            message: dict[str, Any] = {"more_body": True}
            while message.get("more_body") and max(came, declared) <= DROPPED * most:
                message = await receive()
                came += len(message.get("body", b""))
                if max(came, declared) <= most or message["type"] == "http.disconnect":
                    return message
            raise HTTPException(413, f"expected a body of at most {most} bytes, got more")

        await app(scope, bounded, send)

    return guard


async def _is_trusted(scope: Any, hosts: Sequence[str]) -> bool:
    """Whether Starlette's middleware lets a request through."""
    passed = []

    async def answer(*_: Any) -> None:
        passed.append(True)

    async def ignore(*_: Any) -> Any:
        pass

    await TrustedHostMiddleware(answer, hosts, www_redirect=False)(scope, ignore, ignore)
    return bool(passed)


class Bounded:
    """A handler of requests that refuses those which are too long, before any other work.

    Args:
        handler: Handler with a method ``handle_request``.
        messages: Largest number of messages of a chat.
        characters: Largest number of characters of all strings of a request.
    """

    def __init__(self, handler: Any, messages: int, characters: int) -> None:
        self._handler, self._messages, self._characters = handler, messages, characters

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """The answer.

        Raises:
            BadRequest: The request is too long.
        """
        # In another thread, because a body can have a million values.
        await asyncio.to_thread(self.check, body)
        return await self._handler.handle_request(body, request_id)

    def check(self, body: dict[str, Any]) -> None:
        for name in ("messages", "input"):
            value = body.get(name)
            if isinstance(value, list) and len(value) > self._messages:
                said = f"{name}: expected at most {self._messages} messages, got {len(value)}"
                raise BadRequest(said, name)
        if (count := characters_of(body)) > self._characters:
            said = f"expected at most {self._characters} characters in a request, got {count}"
            raise BadRequest(said, code="context_length_exceeded")


def characters_of(value: Any) -> int:
    """Number of characters of all strings in a JSON value, as a chat template may write them.

    A template may indent what is in lists and objects: each value counts its depth.
    """
    count, left = 0, [(value, 0)]
    while left:
        value, depth = left.pop()
        if isinstance(value, dict):
            left += ((x, depth + 1) for pair in value.items() for x in pair)
        elif isinstance(value, list):
            left += ((x, depth + 1) for x in value)
        count += depth + (len(value) if isinstance(value, str) else 0)
    return count


def patient(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which drops a client that is silent where it is to send or to read.

    uvicorn itself ends only connections that wait for a next request.

    Args:
        seconds: Time after which half a request, or an answer that is not read, is dropped. It can
            last up to twice as long.
    """

    class Patient(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _came = _read = False  # whether the client has sent, and has read, since the last look
        _left = 0  # number of bytes that it had not read then
        _look: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._look = self.loop.call_later(seconds, self._drop_silent)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._look is not None:
                self._look.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._came = True
            super().data_received(data)

        def resume_writing(self) -> None:
            self._read = True
            super().resume_writing()

        def _drop_silent(self) -> None:
            left, cycle = self.transport.get_write_buffer_size(), self.cycle
            if self.flow.write_paused or self.transport.is_closing():
                silent = left >= self._left > 0 and not self._read
            else:
                sends = cycle is None or cycle.response_complete or cycle.more_body
                silent = sends and not self._came and not self.flow.read_paused
            if silent:
                self.transport.abort()
                return
            self._came, self._read, self._left = False, False, left
            self._look = self.loop.call_later(seconds, self._drop_silent)

    return Patient
