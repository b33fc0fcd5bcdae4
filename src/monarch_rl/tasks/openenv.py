"""Environments of an OpenEnv server (protocol of OpenEnv 0.10.0: JSON over a WebSocket at ``/ws``).

    Environment(lambda seed: OpenEnv("http://localhost:8000"), action=moves, show=shown)

OpenEnv's package is needed only on the server; it cannot be installed alongside this project.
"""

from __future__ import annotations

import asyncio
from typing import Any

from monarch_rl.errors import InfrastructureFailed

MESSAGE_BYTES = 16 << 20
"""Maximum bytes of an observation."""


class OpenEnv:
    """A session of a server, which gives each session its own environment: see
    :class:`~monarch_rl.tasks.environment.Steps`.

    Observations and actions are mappings, as the environment's own classes define them (the server describes them at
    ``/schema``). The server has to allow as many sessions as episodes run at once (``max_concurrent_envs``), and its
    environment class several at a time (``SUPPORTS_CONCURRENT_SESSIONS``).

    Args:
        url: URL of the server, ``http://...`` or ``https://...``.
        deadline_s: deadline in seconds of an answer.
    """

    def __init__(self, url: str, deadline_s: float = 120.0) -> None:
        self._url, self._deadline_s = f"{url.rstrip('/')}/ws", deadline_s
        self._session: Any = None
        self._socket: Any = None

    async def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        """Open the session and start an episode.

        Raises:
            InfrastructureFailed: there is no such server, or it did not answer.
            RuntimeError: the server refused; the message says why.
        """
        import aiohttp

        if self._socket is None:
            self._session = aiohttp.ClientSession()
            try:
                async with asyncio.timeout(self._deadline_s):
                    self._socket = await self._session.ws_connect(self._url, max_msg_size=MESSAGE_BYTES)
            except (aiohttp.ClientError, OSError) as error:
                raise InfrastructureFailed(f"{self._url} cannot be reached: {error or type(error).__name__}") from error
        return (await self._ask("reset", {"seed": seed}))["observation"], {}

    async def step(self, action: dict[str, Any], /) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute an action.

        Raises:
            InfrastructureFailed: the server ended the session, or did not answer.
            RuntimeError: the server refused the action; the message says why.
        """
        answer = await self._ask("step", action)
        return answer["observation"], float(answer.get("reward") or 0.0), bool(answer.get("done")), False, {}

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            # waits: EpisodeRunner has a deadline for it; the server's session ends with the connection
            await self._session.close()
            self._session = self._socket = None

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._socket.send_json({"type": kind, "data": data})
                message = await self._socket.receive()
        except TimeoutError as error:
            raise InfrastructureFailed(f"{self._url} did not answer {kind} within {self._deadline_s:g} s") from error
        except OSError as error:
            raise InfrastructureFailed(f"{self._url} did not answer {kind}: {error}") from error
        if not isinstance(message.data, str):
            why = message.data or message.extra or message.type.name
            raise InfrastructureFailed(f"{self._url} ended the session ({why})")
        answer = message.json()
        if answer["type"] == "error":
            raise RuntimeError(f"{self._url} refused {kind}: {answer['data'].get('message', answer['data'])}")
        content: dict[str, Any] = answer["data"]
        return content
