"""Environments of an OpenEnv server (protocol of OpenEnv 0.10.0: JSON over a WebSocket at ``/ws``).

    Environment(lambda seed: OpenEnv("http://localhost:8000"), action=moves, show=shown)

OpenEnv's package is needed only on the server; it cannot be installed alongside this project.
"""

from __future__ import annotations

from typing import Any

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
    """

    def __init__(self, url: str) -> None:
        self._url = f"{url.rstrip('/')}/ws"
        self._session: Any = None
        self._socket: Any = None

    async def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        """Open the session and start an episode.

        Raises:
            OSError: there is no such server.
            RuntimeError: the server refused; the message says why.
        """
        import aiohttp

        if self._socket is None:
            self._session = aiohttp.ClientSession()
            # waits: EpisodeRunner has a deadline for it
            self._socket = await self._session.ws_connect(self._url, max_msg_size=MESSAGE_BYTES)
        return (await self._ask("reset", {"seed": seed}))["observation"], {}

    async def step(self, action: dict[str, Any], /) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute an action. Raises RuntimeError if the server refuses the action; the message says why."""
        answer = await self._ask("step", action)
        return answer["observation"], float(answer.get("reward") or 0.0), bool(answer.get("done")), False, {}

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            # waits: EpisodeRunner has a deadline for it; the server's session ends with the connection
            await self._session.close()
            self._session = self._socket = None

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        await self._socket.send_json({"type": kind, "data": data})  # waits: EpisodeRunner has a deadline for it
        message = await self._socket.receive()  # waits: EpisodeRunner has a deadline for it
        if not isinstance(message.data, str):
            raise RuntimeError(f"{self._url} ended the session ({message.data or message.extra or message.type.name})")
        answer = message.json()
        if answer["type"] == "error":
            raise RuntimeError(f"{self._url} refused {kind}: {answer['data'].get('message', answer['data'])}")
        content: dict[str, Any] = answer["data"]
        return content
