"""A disk that is full, gone or broken ends no training, damages nothing, and is talked about."""

import errno
import io
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from poise.core.observation import Change
from poise.engine.bsp import Engine
from poise.errors import InvalidSetting
from poise.lab.output import Output
from poise.policy import Auto
from poise.records import Recorder, lines, read_record, replay
from poise.records.rows import Lost
from poise.sim.calibration import calibrated
from poise.sim.scenes import CORES, by_cores
from poise.sim.simulate import observe
from poise.torch.asynchronous.save_file import SaveFile
from tests.cluster import Workers
from tests.machine import SmallDisk, needs_mounts, small_disk
from tests.training import Recipe, train_balanced

STEPS = 60
Doing = Mapping[int, Callable[[], object]]
"""What happens before a step."""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is tried again with the next row."""
    monkeypatch.setattr(lines, "_AGAIN_S", 0.0)


def record(path: Path, doing: Doing, **settings: Any) -> Path:
    """Drive an engine over virtual workers, and record it while things happen to the disk."""
    draw = np.random.default_rng(0)
    start = Engine(Auto(), 4, 240)
    timetable, engine = start.start()
    with Recorder(path, start, **settings) as recorder:
        for step in range(STEPS):
            doing.get(step, int)()
            split = timetable.at(step).split
            speeds = np.exp(0.05 * draw.standard_normal(4))
            seen = observe(by_cores(CORES[8]), step, step // 20, split, speeds)
            plan, engine = engine.update([seen], step + 2)
            recorder.write([seen], step + 2, plan)
            timetable = timetable if plan is None else timetable.announce(plan)
    return path


def steps_in(path: Path) -> list[int]:
    rows = read_record(path).rows
    return [row.observation.step for row in rows if row.observation is not None]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records]


@needs_mounts
@pytest.mark.usefixtures("impatient")
def test_rows_wait_for_room_and_none_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk.path / "run.jsonl"

        def look() -> None:
            text = path.read_text()
            assert text.endswith("}\n")  # no half a line, though the disk had room for one
            assert len(steps_in(path)) < 50

        doing = {10: disk.fill, 50: look, 51: disk.free}
        record(path, doing)
        found = read_record(path)
        assert steps_in(path) == list(range(STEPS))
        assert found.complete
        assert replay(found) is None
    assert said(caplog) == [
        f"{path} cannot be written: No space left on device; its lines wait in memory, and "
        "training goes on",
        f"{path} is written again",
    ]


@needs_mounts
def test_the_end_says_which_rows_are_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = record(disk.path / "run.jsonl", {10: disk.fill})
        there = steps_in(path)
        assert there == list(range(len(there)))
        assert replay(read_record(path)) is None
    assert 10 <= len(there) < STEPS
    missing = f"{STEPS - len(there)} rows (steps {len(there)} to {STEPS - 1})"
    assert said(caplog)[1:] == [f"{path} lacks {missing}: No space left on device"]


@needs_mounts
@pytest.mark.usefixtures("impatient")
def test_rows_that_are_too_many_leave_a_mark_that_readers_heed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk.path / "run.jsonl"
        record(path, {5: disk.fill, 40: disk.free}, held_bytes=2000)
        found = read_record(path)
    (lost,) = found.lost
    assert lost.first_step is not None
    assert (lost.last_step, lost.rows) == (39, 40 - lost.first_step)
    before, after = list(range(lost.first_step)), list(range(40, STEPS))
    assert [row.observation.step for row in found.rows if row.observation] == before + after
    with pytest.raises(InvalidSetting, match=r"\(steps \d+ to 39\) are missing in the record"):
        replay(found)
    assert len(found.before_loss.rows) == lost.first_step
    assert replay(found.before_loss) is None
    assert any("are missing in the record" in each for each in calibrated(found).guessed)
    assert said(caplog)[-1] == f"{path} lacks {lost}: No space left on device"


def test_a_change_of_workers_among_lost_rows_is_kept(tmp_path: Path) -> None:
    path = record(tmp_path / "run.jsonl", {})
    text = path.read_text().splitlines(keepends=True)
    change = '{"origin":[0,1,2],"global_batch":180}'
    mark = f'{{"start_step":40,"lost":{{"rows":3,"change":{change}}}}}\n'
    path.write_text("".join([*text[:41], mark, *text[41:]]))
    with pytest.raises(InvalidSetting, match="0 steps that all of its last 3 workers"):
        calibrated(read_record(path))


def test_what_is_lost_is_told_in_words() -> None:
    assert str(Lost(1)) == "1 row"
    assert str(Lost(1, 5, 5)) == "1 row (step 5)"
    assert str(Lost(1200, 5, 1204, Change.of(4, global_batch=8))) == "1,200 rows (steps 5 to 1204)"


class BadDisk:
    """A disk that refuses, perhaps after a few bytes, and perhaps to take these back."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int, taken: int, *, cuts: bool) -> None:
        self._number, self._taken, self._cuts = number, taken, cuts
        self._bad = False
        self._write, self._cut = os.pwrite, os.ftruncate
        patch.setattr(os, "pwrite", self.write)
        patch.setattr(os, "ftruncate", self.cut)

    def turn(self) -> None:
        self._bad = not self._bad

    def write(self, file: int, data: bytes, place: int) -> int:
        if self._bad and len(data) != 1 and self._taken:
            return self._write(file, data[: min(self._taken, len(data) - 1)], place)
        if self._bad:
            raise OSError(self._number, os.strerror(self._number))
        return self._write(file, data, place)

    def cut(self, file: int, length: int) -> None:
        if self._bad and not self._cuts:
            raise OSError(errno.EIO, "Input/output error")
        self._cut(file, length)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize(("taken", "cuts"), [(0, True), (100, True), (100, False)])
def test_whatever_the_disk_says_rows_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, taken: int, cuts: bool
) -> None:
    disk = BadDisk(monkeypatch, number, taken, cuts=cuts)
    path = record(tmp_path / "run.jsonl", {20: disk.turn, 40: disk.turn})
    assert steps_in(path) == list(range(STEPS))
    assert replay(read_record(path)) is None


@pytest.mark.usefixtures("impatient")
def test_a_device_that_is_always_full_takes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"
    kept: list[int] = []

    def descriptor() -> int:
        """The one by which this process writes the record."""
        for each in Path("/proc/self/fd").iterdir():
            if each.is_symlink() and each.resolve() == path:
                return int(each.name)
        raise AssertionError("the record is not open")

    def replace() -> None:
        place = descriptor()
        kept.extend((place, os.dup(place)))
        full = os.open("/dev/full", os.O_RDWR)
        os.dup2(full, place)
        os.close(full)

    def restore() -> None:
        place, real = kept
        os.dup2(real, place)
        os.close(real)

    record(path, {10: replace, 30: restore})
    assert steps_in(path) == list(range(STEPS))
    assert "No space left on device" in said(caplog)[0]


@pytest.mark.usefixtures("impatient")
def test_a_record_whose_directory_vanished_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    path = folder / "run.jsonl"
    record(path, {10: lambda: shutil.rmtree(folder), 30: folder.mkdir})
    assert steps_in(path) == list(range(STEPS))
    assert replay(read_record(path)) is None
    assert "No such file or directory" in said(caplog)[0]


@needs_mounts
@pytest.mark.usefixtures("impatient")
def test_a_training_can_begin_on_a_full_disk_and_leaves_no_empty_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        disk.fill()
        record(disk.path / "never.jsonl", {})
        assert os.listdir(disk.path) == ["ballast"]
        assert said(caplog)[-1].endswith(f"lacks {Lost(60, 0, 59)}: No space left on device")
        record(disk.path / "late.jsonl", {30: disk.free})
        assert steps_in(disk.path / "late.jsonl") == list(range(STEPS))


def test_what_a_disk_says_only_at_the_end_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", refuse)
    path = record(tmp_path / "run.jsonl", {})
    assert said(caplog) == [f"the last lines of {path} may be missing: Disk quota exceeded"]


def recorded_training(path: str, disk: SmallDisk) -> tuple[list[int], list[str]]:
    """Train with a disk that is full from step 5 to 25."""
    heard: list[str] = []

    class Hearing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    def after(_: Any, step: int) -> None:
        doing = {5: disk.fill, 25: disk.free}
        doing.get(step, int)()

    hearing = Hearing()
    logging.getLogger("poise").addHandler(hearing)
    try:
        recipe = Recipe(global_batch=12, samples=120, epochs=4, extra={"record": path})
        log = train_balanced(recipe, after_step=after)
    finally:
        logging.getLogger("poise").removeHandler(hearing)
    return [step for _, step, _ in log.seen], heard


@needs_mounts
def test_a_training_goes_on_while_its_record_has_no_room(workers: Workers, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk.path / "run.jsonl"
        ((steps, heard),) = workers.run(recorded_training, str(path), disk, workers=1)
        assert steps == list(range(40))
        assert steps_in(path) == steps
        assert replay(read_record(path)) is None
    assert heard[0].startswith(f"{path} cannot be written: No space left on device")
    assert heard[1:] == [f"{path} is written again"]


STATE = {"models": [{"weight": torch.zeros(4000)}], "balancer": {"epoch": 3}}


def epoch_in(path: Path) -> int:
    return int(torch.load(path)["balancer"]["epoch"])


def test_a_save_that_fails_leaves_the_good_one_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, beside = tmp_path / "run.pt", tmp_path / "run.pt.new"
    file = SaveFile(path)
    beside.symlink_to("/dev/full")
    file.write(STATE)
    assert os.listdir(tmp_path) == []
    assert "No space left on device" in said(caplog)[0]
    assert "there is no earlier save" in said(caplog)[0]
    file.write(STATE)
    beside.symlink_to("/dev/full")
    file.write({**STATE, "balancer": {"epoch": 4}})
    assert os.listdir(tmp_path) == ["run.pt"]
    assert epoch_in(path) == 3
    file.close()
    assert said(caplog)[1] == f"the training is saved to {path} again"
    assert said(caplog)[2].endswith("and what was saved 0 s ago is still there")
    assert said(caplog)[3].startswith(f"the last save to {path} failed: No space left on device; ")


@needs_mounts
def test_saves_are_tried_again_on_a_disk_that_was_full_read_only_or_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        (disk.path / "runs").mkdir()
        path = disk.path / "runs" / "run.pt"
        file = SaveFile(path)
        file.write(STATE)
        troubles: list[tuple[Callable[[], object], Callable[[], object], str]] = [
            (disk.fill, disk.free, "No space left on device"),
            (lambda: disk.remount("ro"), lambda: disk.remount("rw"), "Read-only file system"),
            (lambda: shutil.rmtree(path.parent), path.parent.mkdir, "No such file or directory"),
        ]
        for epoch, (break_it, mend, why) in enumerate(troubles, start=4):
            caplog.clear()
            break_it()
            file.write({**STATE, "balancer": {"epoch": epoch}})
            file.write({**STATE, "balancer": {"epoch": epoch}})
            assert len(said(caplog)) == 1
            assert why in said(caplog)[0]
            assert not path.exists() or epoch_in(path) == epoch - 1
            mend()
            file.write({**STATE, "balancer": {"epoch": epoch}})
            assert epoch_in(path) == epoch
            assert os.listdir(path.parent) == ["run.pt"]
        caplog.clear()
        file.close()
        assert said(caplog) == []


def test_an_error_of_the_state_is_no_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="pickle"):
        SaveFile(tmp_path / "run.pt").write({"schedules": [lambda: 1]})
    assert os.listdir(tmp_path) == []


def test_a_lab_reads_on_when_its_own_output_is_on_a_full_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its workers would wait for ever for somebody to take their lines."""
    output = Output()
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
    monkeypatch.setattr(sys, "stdout", full)
    output.pass_on(1, io.StringIO("one\ntwo\nthree\n"))
    output.finish()
    monkeypatch.undo()
    assert output.lost == 3
    assert not output.broken
