"""Programs that print into consoles which end, are full, or block: real processes, pipes and terminals."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import psutil
import pytest

from monarch_rl.observe import console_relay
from monarch_rl.observe.console_relay import LOG, Sink
from monarch_rl.runtime import process
from tests.patience import LIMIT_S, exit_code, run, wait_until

LINES = 4000
"""Lines of a program, of 1000 characters: more than a pipe, a terminal and the relay's queue hold."""
PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
from monarch_rl.observe.console_relay import end_relay, relay_output
folder, how, lines = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
relay = relay_output()
print("printed before the folder")
relay.log_to(folder)

def wait_for(file):
    while not (folder / file).exists():
        time.sleep(0.01)

if "wait" in how:
    (folder / "waits").touch()
    wait_for("continue")
for line in range(lines):
    print(f"line {line} ".ljust(1000, "."))
subprocess.run(["sh", "-c", "echo line of a child; echo error of a child >&2"], check=True, timeout=600)
if "kills itself" in how:
    os.kill(os.getpid(), 9)
if how == "ends the relay":
    end_relay()
    print("printed after the relay")
raise KeyError("the traceback at the exit")
"""


def entries(folder: Path) -> list[tuple[str, str]]:
    """Process and text of each line of the log, which also has a time."""
    path = folder / "console.log"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    found = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \| ([^|]+) \| (.*)", line) for line in lines]
    assert None not in found, lines
    return [(match[1], match[2]) for match in found if match]


class Program:
    """The program with its standard output and error at descriptor ``console``, which this process closes; or as
    redirections in ``shell`` say."""

    def __init__(
        self, folder: Path, console: int, how: str = "", lines: int = LINES, stderr: int | None = None, shell: str = ""
    ) -> None:
        self.folder = folder
        program = [sys.executable, "-c", PROGRAM, str(folder), how, str(lines)]
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *program]
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            command, stdout=console, stderr=console if stderr is None else stderr
        )
        os.close(console)

    def wait(self) -> int:
        return exit_code(self.process, lambda: f"the program's end\n{self.log()[-2000:]}")

    def wait_for(self, file: str) -> None:
        wait_until(lambda: (self.folder / file).exists() or self.process.poll() is not None, file)
        assert (self.folder / file).exists(), self.log()

    def log(self) -> str:
        """What the program printed, as the log has it."""
        return "".join(f"{text}\n" for process, text in entries(self.folder) if process != "console relay")

    def check_log(self, lines: int = LINES) -> None:
        """The log has all that was printed, in its order."""

        def complete() -> bool:  # the relay may end a moment after the program
            return "line of a child" in self.log() and ("KeyError" in self.log() or self.process.returncode < 0)

        wait_until(complete, lambda: f"the whole log\n{self.log()[-2000:]}")
        text = self.log()
        assert text.startswith("printed before the folder\n")
        assert [int(number) for number in re.findall(r"^line (\d+) ", text, re.MULTILINE)] == list(range(lines))
        assert "error of a child" in text

    def notes(self) -> list[str]:
        """What happened to the console, as the log says it."""
        notes = [text for process, text in entries(self.folder) if process == "console relay"]
        assert all(text.endswith("; the run continues") for text in notes), notes
        return [text.removesuffix("; the run continues") for text in notes]


def read_all(descriptor: int) -> str:
    chunks = []
    try:
        while chunk := os.read(descriptor, 2**16):
            chunks.append(chunk)
    except OSError:  # a terminal without programs
        pass
    os.close(descriptor)
    return b"".join(chunks).decode()


FEW = 20


def check_lost(program: Program, named: str) -> None:
    """It ends by its own exception, and its log names how its standard output was lost."""
    assert program.wait() == 1
    program.check_log(FEW)
    assert "KeyError: 'the traceback at the exit'" in program.log()
    # The relay writes to the log first, and notices the loss a moment later.
    wait_until(program.notes, lambda: f"a note that the console is lost\n{program.log()[-2000:]}")
    (note,) = program.notes()
    assert named in note and "standard output" in note


@pytest.mark.parametrize("console", ["closed pipe", "full disk", "closed terminal"])
def test_a_program_that_loses_its_console_continues_and_its_log_has_all_output(tmp_path: Path, console: str) -> None:
    if console == "full disk":
        check_lost(Program(tmp_path, os.open("/dev/full", os.O_WRONLY), lines=FEW), "No space left")
        return
    reader, writer = os.pipe() if console == "closed pipe" else pty.openpty()
    program = Program(tmp_path, writer, "waits", lines=FEW)
    program.wait_for("waits")
    os.close(reader)
    (tmp_path / "continue").touch()
    check_lost(program, "Broken pipe" if console == "closed pipe" else "Input/output error")


def test_a_stopped_terminal_does_not_block_the_program(tmp_path: Path) -> None:
    """After Ctrl-S, until Ctrl-Q, every write to a terminal blocks."""
    terminal, console = pty.openpty()
    program = Program(tmp_path, console, "waits", lines=FEW)
    program.wait_for("waits")
    os.write(terminal, b"\x13")
    (tmp_path / "continue").touch()
    assert program.wait() == 1
    program.check_log(FEW)
    os.write(terminal, b"\x11")
    assert "line of a child" in read_all(terminal)


def test_a_killed_program_loses_no_output_and_a_killed_relay_is_replaced(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    program = Program(tmp_path, writer, "kills itself after waiting", lines=FEW)
    program.wait_for("waits")
    wait_until(program.log, "the first line in the log")  # what a relay has read and not written ends with it
    (relay,) = psutil.Process(program.process.pid).children()
    relay.kill()
    wait_until(lambda: psutil.Process(program.process.pid).children() not in ([], [relay]), "another relay")
    (tmp_path / "continue").touch()
    assert program.wait() == -signal.SIGKILL
    program.check_log(FEW)
    assert "line of a child" in read_all(reader)


def test_output_is_relayed_in_its_order_and_streams_stay_apart(tmp_path: Path) -> None:
    """A program that ends the relay prints on the console itself, as does one that it starts then."""
    (stdout, output), (stderr, errors) = os.pipe(), os.pipe()
    program = Program(tmp_path, output, "ends the relay", lines=FEW, stderr=errors)
    os.close(errors)
    assert program.wait() == 1
    printed = read_all(stdout)
    assert re.findall(r"line (\d+) ", printed) == [str(line) for line in range(FEW)]
    assert printed.endswith("line of a child\nprinted after the relay\n")
    assert "KeyError" in (text := read_all(stderr)) and text.startswith("error of a child\n")
    assert "error of a child" in program.log() and "after the relay" not in program.log()


def test_a_log_that_cannot_be_written_costs_only_the_log(tmp_path: Path) -> None:
    (tmp_path / "console.log").symlink_to("/dev/full")
    reader, writer = os.pipe()
    assert Program(tmp_path, writer, lines=FEW).wait() == 1
    text = read_all(reader)
    assert re.findall(r"^line (\d+) ", text, re.MULTILINE) == [str(line) for line in range(FEW)]
    assert re.search(r"^\[.*console.log.*No space left", text, re.MULTILINE)


def test_a_pipe_that_nobody_reads_does_not_block_the_program(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    program = Program(tmp_path, writer)
    assert program.wait() == 1
    program.check_log()
    text = read_all(reader)
    assert text.startswith("printed before the folder\nline 0 ")
    # How often output is left out depends on the scheduler. What is shown and what is left out is all there was.
    shown, *gaps = re.split(r"\n\[([\d,]+) bytes were left out while standard \w+ accepted no output\]\n", text)
    left_out, rest = gaps[::2], gaps[1::2]
    assert left_out
    told = sum(len(part) for part in (shown, *rest)) + sum(int(number.replace(",", "")) for number in left_out)
    assert told == len(program.log()) > LINES * 1000


def test_closed_standard_streams_cost_only_what_is_closed(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    program = Program(tmp_path, writer, lines=FEW, shell="<&- 2>&-")
    assert program.wait() == 1
    program.check_log(FEW)
    assert "KeyError" in program.log()
    text = read_all(reader)
    assert "line of a child" in text and "error of a child" not in text


TABLE = """
import sys
from pathlib import Path
from monarch_rl.observe.console import console_of
from monarch_rl.observe.console_relay import relay_output
relay = relay_output()
relay.log_to(Path(sys.argv[1]))
with console_of(relay, 2) as console:
    console.note("a note")
    for step in (1, 2):
        print("a print of the recipe")
        console.show(step, {"reward/mean": step / 4})
print("the end")
"""


def test_a_terminal_shows_the_live_table_and_the_log_has_plain_lines(tmp_path: Path) -> None:
    terminal, console = pty.openpty()
    fcntl.ioctl(console, termios.TIOCSWINSZ, struct.pack("4H", 30, 111, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color"}
    command = [sys.executable, "-c", TABLE, str(tmp_path)]
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, env=environment)
    os.close(console)
    text = read_all(terminal)
    assert exit_code(program) == 0, text
    borders = re.findall("\u2570.*\u256f", text)
    assert borders and {len(border) for border in borders} == {111}  # the terminal's width, although stdin is none
    assert "a print of the recipe" in text and text.rstrip().endswith("the end")
    log = [text for _, text in entries(tmp_path)]
    shown = ["a print of the recipe", "step 1/2 | reward 0.250", "a print of the recipe", "step 2/2 | reward 0.500"]
    assert log == ["a note", *shown, "the end"]


LOST = """
import os, sys, time
from pathlib import Path
from monarch_rl.observe.console import console_of
from monarch_rl.observe.console_relay import relay_output
from monarch_rl.runtime.signals import interrupts
os.close(os.open(os.ttyname(1), os.O_RDWR))  # it becomes the session's terminal, whose end is SIGHUP
folder, relay = Path(sys.argv[1]), relay_output()
relay.log_to(folder)
with interrupts(), console_of(relay, 2) as console:
    console.show(1, {"reward/mean": 0.25})
    (folder / "waits").touch()
    while not (folder / "continue").exists():
        time.sleep(0.01)
    console.show(2, {"reward/mean": 0.5})
"""


def test_a_run_continues_when_its_session_is_lost(tmp_path: Path) -> None:
    """As an ssh session is: the terminal sends SIGHUP, and then refuses every write."""
    terminal, console = pty.openpty()
    command = [sys.executable, "-c", LOST, str(tmp_path)]
    program = subprocess.Popen(
        command,
        stdin=console,
        stdout=console,
        stderr=console,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the checks may run under nohup
    )
    os.close(console)
    wait_until(lambda: (tmp_path / "waits").exists() or program.poll() is not None, "the first step")
    os.close(terminal)
    log = tmp_path / "console.log"
    wait_until(lambda: "SIGHUP" in log.read_text(), lambda: f"the signal\n{log.read_text()}")
    (tmp_path / "continue").touch()
    assert exit_code(program) == 0
    text = log.read_text()
    assert "step 2/2 | reward 0.500" in text and "Input/output error" in text, text


EARLY = """
import os, subprocess, sys
from pathlib import Path
from monarch_rl.observe.console_relay import prepared_relay, relay_output
writers = prepared_relay().writers
child = "import sys; print('out of a child'); print('error of a child', file=sys.stderr)"
subprocess.run([sys.executable, "-c", child], stdout=writers[1], stderr=writers[2], check=True, timeout=600)
print("printed by the program", flush=True)
if "relays" in sys.argv[2]:
    relay_output().log_to(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("how", ["relays", "ends"])
def test_output_of_processes_that_are_started_before_the_relay_waits_for_it(how: str, tmp_path: Path) -> None:
    done = run([sys.executable, "-c", EARLY, tmp_path, how])
    assert done.returncode == 0, done.stderr
    relayed = how == "relays"
    assert done.stdout.splitlines() == ["printed by the program", *(["out of a child"] if relayed else [])]
    assert done.stderr.splitlines() == (["error of a child"] if relayed else [])
    assert (tmp_path / "console.log").exists() == relayed


NAMED = """
import os, signal, subprocess, sys, time
from pathlib import Path
from monarch_rl.observe.console_relay import relay_output
relay = relay_output(Path(sys.argv[1]) / "pipes")
relay.log_to(Path(sys.argv[1]))
reader, writer = os.pipe()
command = [sys.executable, "-c", sys.argv[2]]
children = {
    name: subprocess.Popen([*command, name, str(writer)], stdin=subprocess.PIPE, text=True, pass_fds=[writer])
    for name in ("worker 1", "trainer/2 \u00e4")
}
first, second = children.values()
def tell(child, part):
    print(part, file=child.stdin, flush=True)
    os.read(reader, 1)
    relay.sync()
for child, part in [(first, "one "), (second, "uno "), (first, "two/three"), (second, "dos/"), (first, "/")]:
    tell(child, part)
print("printed by the controller")
relay.sync()  # processes have no common order within a moment
tell(first, "!echo of a shell; echo its error >&2; echo opened > /dev/stdout; (echo elsewhere) > /dev/null")
while "opened" not in (Path(sys.argv[1]) / "console.log").read_text():
    time.sleep(0.01)
relay.drain()  # what the relay has read, but not written, is lost with it
killed = relay._process
os.kill(killed.pid, signal.SIGKILL)
while relay._process is killed:
    time.sleep(0.01)
for child in children.values():
    print("after the relay was killed/unfinished", file=child.stdin, flush=True)
    child.stdin.close()
    child.wait(600)
"""
"""A controller, and two processes whose partial lines reach the relay in turns."""
CHILD = """
import os, subprocess, sys
from monarch_rl.runtime.process import print_as
print_as(sys.argv[1])
print("Monarch internal logs are being written to /tmp/a.log", file=sys.stderr, flush=True)
for part in sys.stdin:
    if part.startswith("!"):
        subprocess.run(["sh", "-c", part[1:]], check=True, timeout=600)
    else:
        print(part.strip("\\n").replace("/", "\\n"), end="", flush=True)
    os.write(int(sys.argv[2]), b".")
"""


@pytest.mark.parametrize("streams", ["apart", "together"])
def test_the_log_names_the_process_of_each_line_and_the_console_shows_it_as_it_is(streams: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", NAMED, str(tmp_path), CHILD]
    together = streams == "together"
    console = subprocess.STDOUT if together else subprocess.PIPE
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=console)
    output, errors = program.communicate(timeout=600)
    assert program.returncode == 0, (output, errors)
    wait_until(lambda: not (tmp_path / "pipes").exists() or len([*(tmp_path / "pipes").iterdir()]) == 1, "the end")
    found = entries(tmp_path)
    shell = [("worker 1", text) for text in ("of a shell", "its error", "opened")]
    last = ["after the relay was killed", "unfinished"]
    monarch = "Monarch internal logs are being written to /tmp/a.log"
    assert [text for _, text in found].count(monarch) == 1
    by_process = {name: [text for n, text in found if n == name and text != monarch] for name, _ in found}
    assert by_process.pop("trainer/2 \u00e4") == ["uno dos", *last]
    assert by_process.pop("controller") == ["printed by the controller"]
    worker = by_process.pop("worker 1")
    assert worker[:2] == ["one two", "three"] and worker[-2:] == last and not by_process
    assert sorted(worker[2:-2]) == sorted(text for _, text in shell)
    assert b"one uno two\nthreedos\n\nprinted by the controller\nof a shell\n" in output.replace(b"its error\n", b"")
    assert b"Monarch" not in output and not any(b" | " in text for text in (output, errors or b""))
    assert (output if together else errors).count(b"its error\n") == 1


def test_a_process_keeps_its_output_where_it_was_redirected_and_without_a_relay(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "bell")  # nobody reads it
    for variable in (f"1:2:{tmp_path}", f"1:2:{tmp_path / 'gone'}", ""):
        program = "from monarch_rl.runtime.process import print_as; print_as('me'); print('printed')"
        done = run([sys.executable, "-c", program], env=os.environ | {"MONARCH_RL_CONSOLE": variable})
        assert (done.returncode, done.stdout) == (0, "printed\n"), done.stderr
        reader, writer = os.pipe()
        ours = variable.replace("1:2:", f"{os.fstat(writer).st_ino}::")
        environment = os.environ | {"MONARCH_RL_CONSOLE": ours}
        subprocess.run([sys.executable, "-c", program], stdout=writer, env=environment, check=True, timeout=600)
        os.close(writer)
        assert read_all(reader) == "printed\n"
    assert [path.name for path in tmp_path.iterdir()] == ["bell"]


SECRETS = r"""
import os, sys
from pathlib import Path
from monarch_rl.observe.console_relay import relay_output
relay_output().log_to(Path(sys.argv[1]))
print("refused:", os.environ["JUDGE_API_KEY"], flush=True)
print("api_key='sk-aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF'", flush=True)
print("-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg+/\nkqhkiG9w0BAQ==\n-----END PRIVATE KEY-----\nstep", flush=True)
os.write(1, b"bytes \xff\xfe of no text\n")
"""


def test_the_log_has_no_keys_and_the_console_shows_what_was_printed(tmp_path: Path) -> None:
    environment = {**os.environ, "JUDGE_API_KEY": "correct horse battery"}
    program = [sys.executable, "-c", SECRETS, str(tmp_path)]
    done = subprocess.run(program, env=environment, capture_output=True, timeout=LIMIT_S, check=True)
    assert b"refused: correct horse battery\n" in done.stdout and b"vW4yZ7bC0eF'\n" in done.stdout
    log = tmp_path / LOG
    wait_until(lambda: log.read_bytes().count(b"\n") == 8, lambda: f"eight lines in {log.read_bytes()!r}")
    texts = [line.split(b" | ", 2)[2] for line in log.read_bytes().splitlines()]
    private_key = [b"[redacted]"] * 4
    assert texts == [
        b"refused: [redacted]",
        b"api_key='[redacted]'",
        *private_key,
        b"step",
        b"bytes \xff\xfe of no text",
    ]


def test_a_long_log_keeps_its_beginning_and_its_newest_lines(tmp_path: Path) -> None:
    """Cut again and again, as it grows, and continued by another run of the program."""
    bound, lines = 4000, 1000

    def write(numbers: range) -> None:
        sink = Sink(LOG, None, 10**6, print, lambda text: f"now | console relay | {text}\n".encode(), bound)
        sink.open_later(str(tmp_path / LOG))
        for number in numbers:
            sink.put(f"now | controller | line {number}\n".encode())
            if number % 50 == 49:
                wait_until(lambda: not sink.busy, "the log is written")
                assert (tmp_path / LOG).stat().st_size <= bound

    write(range(lines // 2))
    write(range(lines // 2, lines))
    text = (tmp_path / LOG).read_text()
    found = re.fullmatch(
        r"((?:.*line \d+\n)+)now \| console relay \| ([\d,]+) lines are left out here\n((?:.*\n)+)", text
    )
    assert found, text
    head, tail = ([int(n) for n in re.findall(r"line (\d+)\n", part)] for part in (found[1], found[3]))
    assert head == list(range(len(head))) and tail == list(range(lines - len(tail), lines))
    assert len(head) + int(found[2].replace(",", "")) + len(tail) == lines
    assert len(found[1]) > bound * 0.45 and len(found[3]) > bound * 0.2
    assert [path.name for path in tmp_path.iterdir()] == [LOG]


def test_processes_and_the_relay_agree_on_names() -> None:
    """The relay's process imports the standard library alone, so it cannot import them."""
    for name in ("CONSOLE_VARIABLE", "BELL"):
        assert getattr(console_relay, name) == getattr(process, name)
