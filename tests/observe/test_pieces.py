"""A log in pieces: its bound, and its return to a checkpoint."""

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from monarch_rl.observe.pieces import PieceLog, pieces_of, truncate_pieces

BOUND = 3200
PIECE = BOUND // 16


def read(folder: Path) -> list[int]:
    lines = [line for piece in pieces_of(folder, "rows") for line in piece.read_text().splitlines()]
    return [json.loads(line)["row"] for line in lines]


@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(st.integers(1, 150), min_size=1, max_size=120),
    reopen=st.sets(st.integers(0, 119), max_size=4),
    back=st.integers(0, 119),
)
def test_the_first_and_the_newest_lines_stay_within_the_bound(widths: list[int], reopen: set[int], back: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "log"
        log, position, at = PieceLog(folder, "rows", BOUND), ("", 0), None
        for row, width in enumerate(widths):
            if row in reopen:
                log.close()
                log = PieceLog(folder, "rows", BOUND)
            if row == back:
                position, at = log.position(), row
            assert log.append(json.dumps({"row": row, "text": "x" * width}))
            assert sum(piece.stat().st_size for piece in pieces_of(folder, "rows")) <= BOUND + 200
        log.close()
        rows, last = read(folder), len(widths) - 1
        assert rows == sorted(rows) and rows[0] == 0 and rows[-1] == last
        # What is missing is a gap behind the first piece.
        gaps = [(before, after) for before, after in zip(rows, rows[1:], strict=False) if after != before + 1]
        assert len(gaps) <= 1
        if not gaps:
            assert rows == list(range(last + 1))
        if at is not None and (folder / position[0]).exists():
            truncate_pieces(folder, *position)
            assert read(folder) == [row for row in rows if row < at]
            again = PieceLog(folder, "rows", BOUND)
            assert again.append(json.dumps({"row": at}))
            assert read(folder)[-1] == at
            again.close()


def test_other_files_in_the_folder_stay(tmp_path: Path) -> None:
    for name in ("rows-old.jsonl", "rows-000002.jsonl.tmp", "rows-more-000001.jsonl"):
        (tmp_path / name).write_text("mine\n")
    log = PieceLog(tmp_path, "rows", 160)
    for row in range(100):
        assert log.append(json.dumps({"row": row}))
    log.close()
    truncate_pieces(tmp_path, "rows-000001.jsonl", 0)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("rows-000001.jsonl", "rows-old.jsonl", "rows-000002.jsonl.tmp", "rows-more-000001.jsonl")
    }


def test_lines_that_no_piece_can_take_are_counted(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a file where the folder should be")
    log = PieceLog(tmp_path / "log", "rows", BOUND)
    assert not log.append("{}", "{}")
    assert log.lost == 2
