"""Serves the runs of a folder to a browser on this machine: their list, and the page of those that are chosen.

Rollouts, logs and settings are for the user alone, and any program or web page on the machine can send requests to a
port of it. So every request needs a random key in its path, and a ``Host`` that no name of another site can have (DNS
rebinding). Runs are looked up by name among those that are listed; no path is made from a request. A page is made when
it is asked for, in memory: nothing is written.
"""

from __future__ import annotations

import hmac
import html
import itertools
import logging
import os
import secrets
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, quote

from monarch_rl.errors import SettingsError
from monarch_rl.report.page import Page, Pieces, content_hash, make_page, piece_name
from monarch_rl.report.read import RunReader
from monarch_rl.report.runs import RunSummary, list_runs

logger = logging.getLogger("monarch_rl")

ADDRESS = "127.0.0.1"
REQUEST_S = 30.0
"""Seconds that a client may take to send a request, or to take each part of an answer."""
RUNS_AT_ONCE = 20
"""The most runs on a page."""
PIECE_BYTES = 512 << 20
"""Bytes of older rollouts of the pages made last. Those of the newest page are always held."""
READ_BYTES = 512 << 20
"""Bytes that are held of running runs, so that of their files only new lines are read again. Those of the run that was
read last are always held."""
SETTINGS_SHOWN = 12
"""The most differing settings that the list shows of a run."""
RELOAD_S, RELOAD_SHARE = 10.0, 0.05
"""Seconds between two reloads of the list, and of a page while a run is running; of a page more, if reading its runs
would take more than this share of the time."""
LIST_SCRIPT = (
    'document.documentElement.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches); '
    'setInterval(() => { if (!document.hidden && !document.querySelector("input:checked")) location.reload(); }, '
    f"{1000 * RELOAD_S:.0f});"
)
"""A reload would undo what the user has chosen; browsers restore the place on the page."""


class RunServer(ThreadingHTTPServer):
    """Serves on 127.0.0.1 while ``serve_forever`` runs.

    Args:
        folder: of runs, or of one run.
        port: 0 lets the system choose one.

    Raises:
        SettingsError: there is no such folder, or the port is not available.
    """

    daemon_threads = True  # Ctrl-C does not wait for a browser

    def __init__(self, folder: Path, port: int = 0) -> None:
        if not folder.is_dir():
            raise SettingsError(f"{folder} is no folder: give a folder of runs, such as runs, or the folder of a run")
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SettingsError(f"--port {port} is not available ({reason}): choose another, or omit it") from error
        self.folder = folder
        self.key = secrets.token_urlsafe(24)
        self.hosts = {f"{host}:{self.server_port}" for host in (ADDRESS, "localhost")}
        self._numbers = itertools.count()
        self._making = threading.Lock()
        self._pieces: dict[str, Pieces] = {}
        """By page, oldest first."""
        self._readers: dict[Path, RunReader] = {}
        """Of running runs, by folder, those that were used last at the end."""

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's also asks the name service who we are, which may take long
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @property
    def url(self) -> str:
        """Address of the list."""
        return f"http://{ADDRESS}:{self.server_port}/{self.key}/"

    def page(self, runs: list[RunSummary]) -> Page:
        """The page of these runs as they are now. One is made at a time, because each needs the memory of its runs.

        Raises:
            SettingsError: a run was deleted.
        """
        with self._making:
            began = time.thread_time()
            readers = [self._readers.pop(run.folder, RunReader(run.folder)) for run in runs]
            records = [reader.read() for reader in readers]
            for record, run in zip(records, runs, strict=True):
                record.name = run.name  # a folder's name differs between runs of one recipe, unlike the run's
            number = str(next(self._numbers))
            reload_s = max(RELOAD_S, (time.thread_time() - began) / RELOAD_SHARE)
            page = make_page(records, reload_s=reload_s, pieces_at=f"pieces/{number}")
            self._pieces[number] = page.pieces
            _remove_oldest(self._pieces, PIECE_BYTES)
            for reader, record in zip(readers, records, strict=True):
                if record.state.get("state") == "running":
                    self._readers[reader.folder] = reader
            _remove_oldest(self._readers, READ_BYTES)
        return page

    def piece(self, page: str, name: str) -> str | None:
        """Text of a piece of a page; None if there is none, or it is no longer held."""
        with self._making:
            pieces = self._pieces.get(page, Pieces())
            return next((pieces[number] for number in pieces if piece_name(number) == name), None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closed its tab or sends nothing is no error of ours."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            logger.exception("a request failed")


def _remove_oldest(held: dict[Any, Any], limit: int) -> None:
    """Remove first entries, but not the last, until all have at most ``limit`` bytes (``nbytes``)."""
    nbytes = sum(entry.nbytes for entry in held.values())
    for key in list(held)[:-1]:
        if nbytes <= limit:
            break
        nbytes -= held.pop(key).nbytes


class _Handler(BaseHTTPRequestHandler):
    server: RunServer
    timeout = REQUEST_S

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            self.send_error(HTTPStatus.FORBIDDEN, f"open {ADDRESS} or localhost, with the port of the server")
            return
        path, _, query = self.path.partition("?")
        _, key, *rest = path.split("/") if path.startswith("/") else ("", "")
        if not hmac.compare_digest(key.encode(), self.server.key.encode()):
            self.send_error(HTTPStatus.NOT_FOUND, "open the whole address that monarch-rl view printed, with its key")
            return
        try:
            self._route(rest, query)
        except (SettingsError, OSError) as error:
            if isinstance(error, ConnectionError | TimeoutError):
                raise
            self.send_error(HTTPStatus.NOT_FOUND, str(error))
        except Exception:
            logger.exception("the page cannot be made")
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, "the page cannot be made: see the server's terminal")

    def _route(self, path: list[str], query: str) -> None:
        match path:
            case [""]:
                runs = list_runs(self.server.folder)
                text, policy = _list(self.server.folder, runs)
                self._answer(HTTPStatus.OK, "text/html", text, policy)
            case ["report"]:
                self._report(query)
            case ["pieces", page, name] if (piece := self.server.piece(page, name)) is not None:
                self._answer(HTTPStatus.OK, "text/javascript", piece)
            case _:
                self.send_error(HTTPStatus.NOT_FOUND, "there is no such page")

    def _report(self, query: str) -> None:
        try:
            fields = parse_qs(query, errors="surrogateescape", max_num_fields=RUNS_AT_ONCE)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST, f"choose at most {RUNS_AT_ONCE} runs")
            return
        names = list(dict.fromkeys(fields.get("run", [])))
        runs = {run.name: run for run in list_runs(self.server.folder)}
        if not names:
            self.send_error(HTTPStatus.BAD_REQUEST, "no run was chosen: go back and choose one")
        elif unknown := next((name for name in names if name not in runs), None):
            self.send_error(HTTPStatus.NOT_FOUND, f"{unknown!r} is no run in {self.server.folder}")
        else:
            page = self.server.page([runs[name] for name in names])
            self._answer(HTTPStatus.OK, "text/html", page.html, page.policy)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with one sentence; also called for what is no HTTP, and for methods other than GET."""
        self._answer(code, "text/plain", f"{code}: {message or HTTPStatus(code).phrase}\n")

    def _answer(self, code: int, kind: str, text: str, policy: str = "default-src 'none'") -> None:
        body = text.encode(errors="replace")
        self.send_response(code)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", f"{policy}; frame-ancestors 'none'"),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),  # the address holds the key
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line per request would hide the address, and contain the key."""

    def version_string(self) -> str:
        return "monarch-rl"


def _list(folder: Path, runs: list[RunSummary]) -> tuple[str, str]:
    """The list as HTML, and its policy."""
    style = (files("monarch_rl.report") / "static" / "style.css").read_text()
    policy = (
        f"default-src 'none'; script-src {content_hash(LIST_SCRIPT)}; style-src {content_hash(style)}; "
        "base-uri 'none'; form-action 'self'"
    )
    headings = ("", "run", "state", "started", "steps", "held-out", "settings that differ")
    body = (
        "<p>No runs yet.</p>"
        if not runs
        else '<form action="report"><div class="bar"><button>Show the chosen runs together</button></div><table><tr>'
        + "".join(f"<th>{heading}</th>" for heading in headings)
        + f"</tr>{''.join(map(_row, runs))}</table></form>"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Runs</title><style>{style}</style><script>{LIST_SCRIPT}</script></head><body>"
        f"<header><h1>Runs</h1><span class=dim>{_text(folder.resolve())}</span></header><main>{body}</main>"
        "</body></html>\n"
    ), policy


def _row(run: RunSummary) -> str:
    differs = [f"--{name} {value}" for name, value in run.differs.items()]
    if len(differs) > SETTINGS_SHOWN:
        differs[SETTINGS_SHOWN:] = [f"and {len(differs) - SETTINGS_SHOWN} more"]
    cells = [
        f'<input type="checkbox" name="run" value="{_text(run.name)}" aria-label="{_text(run.name)}">',
        f'<a href="report?{_query(run)}"><bdi>{_text(run.name)}</bdi></a>',
        _text(run.state),
        time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started)),
        _text("" if run.steps is None else run.steps),
        _text(run.held_out),
        "<br>".join(map(_text, differs)),
    ]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _query(run: RunSummary) -> str:
    return f"run={quote(os.fsencode(run.name), safe='')}"


def _text(value: object) -> str:
    """Escaped for an element's content or a quoted attribute."""
    return html.escape(str(value).encode(errors="replace").decode())


def opening_lines(server: RunServer) -> str:
    """Where to look, and how from another machine."""
    runs = list_runs(server.folder)
    single = len(runs) == 1 and runs[0].folder == server.folder.resolve()
    port = server.server_port
    return (
        f"{server.url}{f'report?{_query(runs[0])}' if single else ''}\n"
        f"from another machine, first: ssh -L {port}:{ADDRESS}:{port} {socket.gethostname()}\n"
        "Ctrl-C ends it. Whoever has the address can read the runs."
    )


def view(folder: Path, port: int = 0) -> None:
    """Serve a folder until Ctrl-C.

    Raises:
        SettingsError: there is no such folder, or the port is not available.
    """
    with RunServer(folder, port) as server:
        print(opening_lines(server), flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
