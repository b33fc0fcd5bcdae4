"""The server of ``monarch-rl view``, asked over a real connection."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from monarch_rl.errors import SettingsError
from monarch_rl.report import view
from monarch_rl.report.view import RunServer, opening_lines
from tests.patience import LIMIT_S, exit_code, join
from tests.report.synthetic import write_run
from tests.report.test_convert import monarch_rl
from tests.report.test_page import data_of
from tests.runtime.test_folder_lock import holder

HOSTILE = "<img src=x onerror=alert(1)>\"'&"


@contextmanager
def serving(folder: Path) -> Iterator[RunServer]:
    with RunServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            join(thread)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "a", steps=4, groups=40)
    write_run(folder / "b", steps=4, lr=2e-6)
    state = json.loads((folder / "b/run.json").read_text())
    del state["steps"], state["held_out"]  # as of an earlier version
    (folder / "b/run.json").write_text(json.dumps(state | {"started": 900.0}))
    return folder


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[RunServer]:
    with serving(runs) as server:
        yield server


class Answer:
    def __init__(self, server: RunServer, path: str, method: str = "GET", host: str | None = None) -> None:
        """Request ``path``, in which KEY stands for the key. An empty ``host`` sends none."""
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=LIMIT_S)
        connection.putrequest(method, path.replace("KEY", server.key), skip_host=host is not None)
        if host:
            connection.putheader("Host", host.replace("PORT", str(server.server_port)))
        connection.endheaders()
        answer = connection.getresponse()
        self.status, self.headers, self.text = answer.status, answer.headers, answer.read().decode()
        connection.close()


def test_a_list_a_page_and_its_pieces(server: RunServer, runs: Path) -> None:
    before = sorted(runs.rglob("*"))
    listed = Answer(server, "/KEY/")
    assert listed.status == 200 and re.findall(r'href="(.*?)"', listed.text) == ["report?run=a", "report?run=b"]
    assert listed.text.count("<td>4</td>") == 2 and "<td>accuracy 0.5 @0</td>" in listed.text
    assert "--trainer.lr 2e-06" in listed.text and "--steps" not in listed.text, "only settings that differ"
    page = Answer(server, "/KEY/report?run=a")
    assert page.status == 200 and "<title>a</title>" in page.text
    assert "<title>b, a</title>" in Answer(server, "/KEY/report?run=b&run=a").text
    pieces = list(server._pieces.items())
    assert [len(texts) for _, texts in pieces] == [1, 1]
    for number, texts in pieces:
        piece = Answer(server, f"/KEY/pieces/{number}/001.js")
        assert piece.text == texts[1] and piece.headers["Content-Type"].startswith("text/javascript")
    for answer in (listed, page, piece):
        assert answer.headers["Cache-Control"] == "no-store" and answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert sorted(runs.rglob("*")) == before, "nothing is written"


@pytest.mark.parametrize(
    "path", ["/", "", "/KEX/", "/KEY", "/KEYx/", "/report?run=a", "//KEY/x", "/favicon.ico", "/é/"]
)
def test_without_the_key_there_is_nothing(server: RunServer, path: str) -> None:
    answer = Answer(server, quote(path))
    assert answer.status in (400, 404) and "trainer" not in answer.text and server.key not in answer.text


@pytest.mark.parametrize("host", ["", "evil.example:PORT", "127.0.0.1", "127.0.0.1:1", "evil.example"])
def test_another_host_is_refused_even_with_the_key(server: RunServer, host: str) -> None:
    assert Answer(server, "/KEY/", host=host).status == 403


@pytest.mark.parametrize("host", ["127.0.0.1:PORT", "localhost:PORT", "LOCALHOST:PORT"])
def test_the_hosts_of_an_ssh_tunnel_are_served(server: RunServer, host: str) -> None:
    assert Answer(server, "/KEY/", host=host).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_only_get_is_served(server: RunServer, method: str) -> None:
    answer = Answer(server, "/KEY/", method)
    assert answer.status == 501 and "Runs" not in answer.text


def test_only_listed_names_are_runs(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    outside = write_run(tmp_path / "secret", steps=2)
    write_run(folder / "a", steps=2)
    write_run(folder / ".removed", steps=2)
    (folder / "link").symlink_to(outside)
    (folder / "notes").mkdir()
    names = [
        "../secret",
        "..%2Fsecret",
        "..%252Fsecret",
        str(outside),
        "link",
        ".removed",
        "notes",
        ".",
        "",
        "a/",
        "a%00",
    ]
    with serving(folder) as server:
        assert re.findall('report[?]run=([^"]*)', Answer(server, "/KEY/").text) == ["a"]
        for name in names:
            assert Answer(server, f"/KEY/report?run={name}").status in (400, 404), name
        for path in (
            "../secret/run.json",
            "%2e%2e/secret/run.json",
            "a/run.json",
            "report/../../secret",
            "pieces/0/../x",
        ):
            answer = Answer(server, f"/KEY/{path}")
            assert answer.status == 404 and "packages" not in answer.text
        assert Answer(server, f"/KEY/report?{'run=a&' * 30}").status == 400
        assert Answer(server, "/KEY/report").status == 400


def test_the_server_is_bound_to_loopback_and_says_how_to_reach_it(server: RunServer, runs: Path) -> None:
    host, port = server.socket.getsockname()
    assert host == "127.0.0.1"
    lines = opening_lines(server)
    assert f"http://127.0.0.1:{port}/{server.key}/\n" in lines
    assert f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}" in lines
    with RunServer(runs / "a") as other:
        assert f"/{other.key}/report?run=a\n" in opening_lines(other) and other.key != server.key
    with pytest.raises(SettingsError, match=f"--port {port} is not available"):
        RunServer(runs, port)
    with pytest.raises(SettingsError, match="none is no folder"):
        RunServer(runs / "none")


def test_text_of_a_run_stays_text(tmp_path: Path) -> None:
    name = HOSTILE.replace("/", "")
    for folder, lr in ((tmp_path / name, HOSTILE), (tmp_path / "b", 1.0)):
        write_run(folder, steps=2)
        state = json.loads((folder / "run.json").read_text())
        state |= {"state": HOSTILE, "started": 1e300, "steps": HOSTILE}
        state["held_out"] = {"metric": HOSTILE, "first": [HOSTILE, HOSTILE], "last": [1, "\ud800"]}
        (folder / "run.json").write_text(json.dumps(state))
        (folder / "settings.json").write_text(json.dumps({HOSTILE: lr}))
    with serving(tmp_path) as server:
        listed = Answer(server, "/KEY/")
        assert listed.status == 200 and "<img" not in listed.text and listed.text.count("&lt;img") >= 10
        assert not re.search(r"""(?:value|aria-label)="[^"]*"'""", listed.text)
        page = Answer(server, f"/KEY/report?run={quote(name)}")
        assert page.status == 200 and "<img" not in page.text
        wrong = Answer(server, f"/KEY/report?run={quote(HOSTILE + 'x')}")
        assert wrong.status == 404 and wrong.headers["Content-Type"].startswith("text/plain")


def test_a_run_that_is_going_on_is_shown_as_it_is_now(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=4, state="running")
    with serving(tmp_path) as server:
        listed = Answer(server, "/KEY/").text
        assert "<td>running</td>" in listed and "<td>4</td>" in listed and "accuracy 0.5 @0" in listed
        first = server.page(view.list_runs(tmp_path)).html
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "seconds": 5.0, "held_out/accuracy": 0.75}\n{"step": 6, "sec')
        listed = Answer(server, "/KEY/").text
        assert "<td>5</td>" in listed and "accuracy 0.5 @0 → 0.75 @5" in listed
        assert len(Answer(server, "/KEY/report?run=a").text) != len(first)


def test_what_was_read_is_held_of_running_runs_alone_and_the_oldest_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, state in (("a", "running"), ("b", "running"), ("c", "finished")):
        write_run(tmp_path / name, steps=4, state=state)
    with serving(tmp_path) as server:
        runs = sorted(view.list_runs(tmp_path), key=lambda run: run.name)
        server.page(runs)
        assert [folder.name for folder in server._readers] == ["a", "b"]
        first = server._readers[tmp_path / "a"]
        server.page([runs[0]])
        assert server._readers[tmp_path / "a"] is first and first.nbytes > 1_000
        monkeypatch.setattr(view, "READ_BYTES", 1)
        server.page([runs[0]])
        assert list(server._readers.values()) == [first]


def test_the_page_of_a_large_running_run_reloads_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "running", steps=4, state="running")
    with serving(tmp_path) as server:
        seconds = iter([100.0, 103.0])
        monkeypatch.setattr(view.time, "thread_time", lambda: next(seconds))  # reading takes 3 s of CPU time
        page = data_of(server.page(view.list_runs(tmp_path)).html)
        assert page["reload_s"] == pytest.approx(60.0)


def test_a_run_whose_process_was_killed_is_shown_so(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=4, state="running")
    state = json.loads((folder / "run.json").read_text())
    state["hosts"][0]["name"] = socket.gethostname()
    (folder / "run.json").write_text(json.dumps(state))
    with serving(tmp_path) as server:
        with holder(folder):
            assert "<td>running</td>" in Answer(server, "/KEY/").text
            assert data_of(server.page(view.list_runs(tmp_path)).html)["reload_s"] == view.RELOAD_S
        listed = Answer(server, "/KEY/").text
        assert "<td>killed</td>" in listed and "<td>4</td>" in listed
        page = data_of(server.page(view.list_runs(tmp_path)).html)
        assert not page["reload_s"] and page["runs"][0]["state"]["state"] == "killed"
        state["hosts"][0]["name"] = "another machine, whose locks are not seen here"
        (folder / "run.json").write_text(json.dumps(state))
        assert "<td>running</td>" in Answer(server, "/KEY/").text
    assert json.loads((folder / "run.json").read_text()) == state


def test_a_run_that_was_deleted_and_a_fault_of_ours_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_run(tmp_path / "a", steps=2)
    with serving(tmp_path) as server:
        listed = view.list_runs(tmp_path)
        for name in ("run.json", "settings.json", "metrics.jsonl"):
            (folder / name).unlink()
        assert "No runs yet" in Answer(server, "/KEY/").text
        monkeypatch.setattr(view, "list_runs", lambda _: listed)
        deleted = Answer(server, "/KEY/report?run=a")
        assert deleted.status == 404 and "holds no run" in deleted.text
        monkeypatch.setattr(view, "list_runs", lambda _: 1 / 0)
        assert Answer(server, "/KEY/").status == 500 and "ZeroDivisionError" in caplog.text


def test_older_pieces_are_forgotten_but_not_those_of_the_newest_page(
    server: RunServer, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "PIECE_BYTES", 1)
    run = next(run for run in view.list_runs(runs) if run.name == "a")
    server.page([run])
    assert [len(texts) for texts in server._pieces.values()] == [1]


def test_the_command_ends_quietly_on_ctrl_c(runs: Path) -> None:
    # Programs in the background of a shell script ignore Ctrl-C, and so do the programs that they start.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from monarch_rl.cli import main; main()"
    command = [sys.executable, "-c", code, "view", str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            address = urlsplit(process.stdout.readline())
            connection = http.client.HTTPConnection(address.netloc, timeout=LIMIT_S)
            connection.request("GET", address.path)
            assert connection.getresponse().status == 200
            connection.close()
            os.kill(process.pid, signal.SIGINT)
            assert exit_code(process) == 0 and process.stderr.read() == ""
        finally:
            process.kill()
    assert "view" in monarch_rl("--help").stdout
