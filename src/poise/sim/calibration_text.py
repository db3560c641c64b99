"""A scenario file from what a record says of its cluster."""

import json
from collections.abc import Sequence

import numpy as np

from poise.policy import Bounds
from poise.policy.bounds import NO_BOUNDS
from poise.sim.calibration import Calibration


def scenario_text(found: Calibration, source: str) -> str:
    """Return a scenario file for `poise simulate`."""
    lines = [
        f"# Calibrated from {found.steps} measured steps with {found.splits} different splits.",
        "",
        f"title = {_text(f'calibrated from {source}')}",
        "seed = 0",
        "steps = 1000",
        f"global_batch = {found.global_batch}",
        f"mode = {_text(found.mode)}",
        'policies = ["even", "proportional", "auto"]',
    ]
    if not np.isnan(found.error):
        lines += [
            "",
            f"[calibration]  # from {found.held_out} groups of steps that were held out",
            f"error = {found.error:.4f}",
        ]
    elif found.guessed:
        lines += ["", "[calibration]"]
    if found.guessed:
        lines.append(f"notes = [{', '.join(_text(each) for each in found.guessed)}]")
    noise = found.noise
    lines += ["", "[noise]", f"cv = {noise.cv:.4f}", f"correlation = {noise.correlation:.3f}"]
    if noise.spike_chance:
        lines += [f"spike_chance = {noise.spike_chance:.5f}", f"spike = {noise.spike:.2f}"]
    bucket_s = found.model.bucket_s.tolist()
    if found.mode == "sync":
        parts = [f"{part:.3f}" for part in np.linspace(0, 1, len(bucket_s) + 1)[1:-1]]
        lines += [
            "",
            "[network]",
            f"ready = [{', '.join([*parts, '1.0'])}]  # workers have lines of their own",
            f"bucket_s = {_numbers(bucket_s)}",
        ]
    else:
        lines += ["", "[server]", f"update_s = {found.update_s:.6f}"]
    for worker in range(found.model.workers):
        lines += ["", *_worker_lines(found, worker)]
    return "\n".join(lines) + "\n"


def _worker_lines(found: Calibration, worker: int) -> list[str]:
    model = found.model
    pairs = zip(model.per_sample_s[worker].tolist(), model.fixed_s[worker].tolist(), strict=True)
    lines = ["[[worker]]", f'name = "worker-{worker}"']
    lines.append(f"ready_s = [{', '.join(_numbers(pair) for pair in pairs)}]")
    lines += _bound_lines(found.bounds, worker)
    if model.input_s[worker] > 0:
        lines.append(f"input_s = {model.input_s[worker]:.6g}")
    each, fixed = found.memory.bytes_per_sample[worker], found.memory.fixed_bytes[worker]
    limit = found.memory_limit[worker]
    if not np.isnan([each, fixed, limit]).any() and each > 0:
        lines.append(f"memory_bytes = {limit:.6g}")
        lines.append(f"fixed_bytes = {max(fixed, 0.0):.6g}")
        lines.append(f"bytes_per_sample = {each:.6g}")
    return lines


def _bound_lines(bounds: Bounds, worker: int) -> list[str]:
    lines = []
    for name in ("min_batch", "max_batch", "multiple_of"):
        stated = getattr(bounds, name)
        value = stated[worker] if isinstance(stated, tuple) else stated
        if value != getattr(NO_BOUNDS, name):
            lines.append(f"{name} = {value}")
    return lines


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.6g}" for value in values) + "]"


def _text(words: str) -> str:
    return json.dumps(words, ensure_ascii=False)
