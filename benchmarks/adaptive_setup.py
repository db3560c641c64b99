"""What the adaptive benchmark needs and the machine may lack: two data sets, and AdaptDL.

All of it lands in one folder of the user's cache, made on first use.
"""

import gzip
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from adaptive_tasks import CHARACTERS, CONTEXT
from numpy.typing import NDArray

Say = Callable[[str], None]
Arrays = dict[str, NDArray[Any]]

_REQUIREMENTS = Path(__file__).parent / "adaptdl-requirements.txt"
_SYSTEM = Path("/")
_TEST_PART = 0.1
"""Of the text, at its end."""
_TEST_WINDOWS = 1000
_RANDOM_SAMPLES = 2000


class SetUpFailed(RuntimeError):
    """Something that the benchmark needs is missing and cannot be had."""


def cache() -> Path:
    """Return the folder for what is made once."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "poise" / "adaptive"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def data_file(task: str, say: Say) -> Path:
    """Return the file with a task's samples; make it if need be."""
    path = cache() / f"{task}.npz"
    if not path.exists():
        say(f"{task}: reading the data (once)")
        _write(path, {"images": _fashion, "text": _windows}[task](say))
    return path


def random_file(task: str) -> Path:
    """Return a file with samples of a task's form that mean nothing, and need no download."""
    path, draw = cache() / f"random-{task}.npz", np.random.default_rng(0)
    arrays: Arrays = {}
    for name, count in (("train", _RANDOM_SAMPLES), ("test", _TEST_WINDOWS)):
        if task == "images":
            inputs: NDArray[Any] = draw.random((count, 1, 28, 28), dtype=np.float32)
            targets = draw.integers(10, size=count)
        else:
            inputs = draw.integers(CHARACTERS, size=(count, CONTEXT))
            targets = draw.integers(CHARACTERS, size=(count, CONTEXT))
        arrays |= {f"{name}_inputs": inputs, f"{name}_targets": targets}
    _write(path, arrays)
    return path


def adaptdl_python(say: Say) -> Path:
    """Return the Python of AdaptDL's own environment; make it if need be."""
    folder = cache() / "adaptdl"
    python, ready = folder / "bin" / "python", folder / "ready"
    wanted = _REQUIREMENTS.read_text()
    if not ready.exists() or ready.read_text() != wanted:
        say("setting up AdaptDL's environment (once; about a minute)")
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([str(python), *install, "--requirement", str(_REQUIREMENTS)], "AdaptDL")
        ready.write_text(wanted)
    return python


def _write(path: Path, arrays: Arrays) -> None:
    """Write a file that is complete whenever it is there."""
    unfinished = path.with_suffix(f".{os.getpid()}.npz")
    np.savez(unfinished, **arrays)  # type: ignore[arg-type]  # none is an option
    unfinished.replace(path)


def _fashion(say: Say) -> Arrays:
    """Read Fashion-MNIST as Debian's package dataset-fashion-mnist holds it."""
    inside = Path("usr/share/datasets/fashion-mnist")
    folder = _installed_or_unpacked(inside, ["dataset-fashion-mnist"], say) / inside

    def read(name: str, header: int) -> NDArray[Any]:
        with gzip.open(folder / name) as file:
            return np.frombuffer(file.read(), dtype=np.uint8, offset=header)

    def images(name: str) -> NDArray[Any]:
        return (read(name, 16).reshape(-1, 1, 28, 28) / 255).astype(np.float32)

    return {
        "train_inputs": images("train-images-idx3-ubyte.gz"),
        "train_targets": read("train-labels-idx1-ubyte.gz", 8).astype(np.int64),
        "test_inputs": images("t10k-images-idx3-ubyte.gz"),
        "test_targets": read("t10k-labels-idx1-ubyte.gz", 8).astype(np.int64),
    }


def _windows(say: Say) -> Arrays:
    """Cut the King James text of Debian's package bible-kjv-text into windows of characters."""
    inside = Path("usr/lib/bible.data")
    packages = ["bible-kjv", "bible-kjv-text"]
    root = _installed_or_unpacked(inside, packages, say)
    reader = [str(root / "usr/bin/bible"), "-p", f"{root / 'usr/lib'}/"]
    verses = _run([*reader, "-f", "gen1:1-rev22:21"], " and ".join(packages))
    text = re.sub(r"^\S+ ", "", verses, flags=re.MULTILINE)  # without book, chapter and verse
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    if len(numbers) > CHARACTERS:
        raise SetUpFailed(f"the text has {len(numbers)} characters, more than {CHARACTERS}")
    codes = np.array([numbers[character] for character in text], dtype=np.int64)
    kept = round(len(codes) * (1 - _TEST_PART))
    train, test = _cut(codes[:kept]), _cut(codes[kept:])
    chosen = np.linspace(0, len(test[0]) - 1, _TEST_WINDOWS).astype(int)
    # The first ones are a fair sample too: quick runs test with fewer.
    chosen = np.random.default_rng(0).permutation(chosen)
    return {
        "train_inputs": train[0],
        "train_targets": train[1],
        "test_inputs": test[0][chosen],
        "test_targets": test[1][chosen],
    }


def _cut(codes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return windows that do not overlap, and the same one character later."""
    count = (len(codes) - 1) // CONTEXT
    end = count * CONTEXT
    return codes[:end].reshape(count, CONTEXT), codes[1 : end + 1].reshape(count, CONTEXT)


def _installed_or_unpacked(inside: Path, packages: Sequence[str], say: Say) -> Path:
    """Return the folder that holds some Debian packages' files as / would."""
    unpacked = cache() / "debian"
    for root in (_SYSTEM, unpacked):
        if (root / inside).exists():
            return root
    say(f"downloading {', '.join(packages)}")
    with TemporaryDirectory() as folder:
        _run(["apt-get", "download", *packages], " and ".join(packages), Path(folder))
        for package in Path(folder).glob("*.deb"):
            _run(["dpkg-deb", "-x", str(package), str(unpacked)], package.name)
    if not (unpacked / inside).exists():
        raise SetUpFailed(f"{' and '.join(packages)} hold no {inside}; install what does")
    return unpacked


def _run(command: Sequence[str], needed: str, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise SetUpFailed(f"{needed} is needed, and there is no {command[0]} to get it") from None
    except subprocess.CalledProcessError as error:
        sys.stderr.write(error.stderr)
        raise SetUpFailed(
            f"{needed} is needed, but {command[0]} ended with exit code {error.returncode}; "
            "its error is above. Install it by hand, and run this again"
        ) from None
    return done.stdout
