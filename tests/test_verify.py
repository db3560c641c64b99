"""`poise verify` against scripts that are broken in every way it knows, and some that are not."""

import contextlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from poise.cli.main import main
from poise.cli.verify_progress import Run, StandsStill
from poise.engine.adaptation import Adaptation
from poise.errors import InfeasibleSplit
from poise.policy import Auto
from poise.torch.settings import TorchSettings
from poise.verify.causes import Cause
from poise.verify.comparison import DOUBLE, HALF, SINGLE, distances, precision_of
from poise.verify.observation import Observation, Runs, StepSeen, Variant, kept, read, write
from poise.verify.observer import Observer
from poise.verify.reporting import place
from poise.verify.samples import same_sample, samples_of
from poise.verify.split import unequal_split
from poise.verify.verdict import Verdict, judge
from poise.verify.worker import observe
from tests.cluster import Workers

SCRIPTS = Path(__file__).parent / "scripts"
SPLIT = (10, 4, 2)


def run_all(
    workers: Workers, directory: Path, name: str, *, steps: int = 1, stilled: bool = False
) -> Runs:
    """Run a script as verify does, on workers that are already there."""
    script = [str(SCRIPTS / f"{name}.py")]

    def observed(variant: Variant, count: int) -> list[Observation]:
        workers.run(observe, directory, variant, steps, script, workers=count)
        return [read(directory, variant, worker) for worker in range(count)]

    (alone,) = observed(Variant("alone", stilled), 1)
    (reordered,) = observed(Variant("reordered", stilled), 1)
    return Runs(alone, reordered, tuple(observed(Variant("shared", stilled), len(SPLIT))))


@pytest.mark.parametrize("name", ["good_adamw", "token_mean_counted"])
def test_a_script_that_is_right_trains_the_same(
    workers: Workers, tmp_path: Path, name: str
) -> None:
    runs = run_all(workers, tmp_path, name, steps=3)
    verdict = judge(runs)
    assert verdict.difference is None
    assert verdict.extent.steps == 3
    assert [seen.split for seen in runs.shared] == [SPLIT] * 3
    assert verdict.extent.gradients < SINGLE.limit


BROKEN = {
    "loss_sum": ("loss denominator", "is a sum over the samples"),
    "token_mean": ("loss denominator", "mean over something else than samples, such as tokens"),
    "in_batch_negatives": ("in-batch negatives", "influence each other"),
    "private_augmentation": ("unseeded augmentation", "sample 0 of step 0 has other contents"),
    "data_by_worker": ("data that differs between workers", "sample 0 of worker 1 in step 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_cause_of_a_difference_is_named(workers: Workers, tmp_path: Path, name: str) -> None:
    verdict = judge(run_all(workers, tmp_path, name))
    assert verdict.difference is not None
    assert (verdict.difference.kind, verdict.difference.step) == ("gradient", 0)
    assert verdict.difference.name == "0.weight"
    (cause,) = verdict.causes
    assert cause.name == BROKEN[name][0]
    assert BROKEN[name][1] in cause.evidence


def test_weights_that_the_script_changes_by_itself_are_compared(
    workers: Workers, tmp_path: Path
) -> None:
    verdict = judge(run_all(workers, tmp_path, "own_update"))
    assert verdict.difference is not None
    assert verdict.difference.kind in ("update", "worker")
    assert verdict.difference.name == "0.weight"


NOISY = {
    "batch_norm": ("BatchNorm", "`1`"),
    "dropout_layer": ("dropout", "`2`"),
    "dropout_function": ("dropout", "the model's own code"),
}


@pytest.mark.parametrize("name", NOISY)
def test_batch_norm_and_dropout_are_named(workers: Workers, tmp_path: Path, name: str) -> None:
    verdict = judge(run_all(workers, tmp_path, name))
    (cause,) = verdict.causes
    assert cause.name == NOISY[name][0]
    assert NOISY[name][1] in cause.evidence
    assert cause.stillable


@pytest.mark.parametrize("name", ["batch_norm", "dropout_function"])
def test_without_batch_norm_and_dropout_it_is_the_same_training(
    workers: Workers, tmp_path: Path, name: str
) -> None:
    assert judge(run_all(workers, tmp_path, name, stilled=True)).difference is None


def test_a_script_is_run_without_traces(workers: Workers, tmp_path: Path) -> None:
    (pairs,) = workers.run(leave_no_trace, tmp_path, workers=1)
    for before, after in pairs:
        assert before == after


def leave_no_trace(directory: Path) -> list[tuple[Any, Any]]:
    """Return what a run could change in its process, before and after."""
    import random
    import sys

    import numpy as np
    from torch import nn

    from poise.torch.balancer import Balancer
    from poise.torch.module import SharedModule

    def belongings() -> list[Any]:
        calls = [Balancer.__init__, Balancer.prepare, SharedModule.forward, nn.functional.dropout]
        states = [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]
        return [sys.argv, sys.path, torch.get_num_threads(), *states, *(id(each) for each in calls)]

    before = belongings()
    script = [str(SCRIPTS / "dropout_layer.py")]
    observe(directory, Variant("reordered", stilled=True), 1, script)
    return list(zip(before, belongings(), strict=True))


def errors(text: str) -> str:
    """Return what is on stderr beside lines of progress, which come on a machine that is busy."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("poise verify: run "))


@pytest.mark.slow
def test_the_command_says_same_training(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(SCRIPTS / "good.py"), "--workers", "2", "--steps=2", "--", "--steps", "many"]
    assert main(["verify", *words]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("same training: 2 steps, 2 workers with 13, 3 of 16 samples;")
    assert errors(said.err) == ""


@pytest.mark.slow
def test_the_command_names_what_differs_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    script = str(SCRIPTS / "loss_sum.py")
    assert main(["verify", "--workers", "2", "--steps", "1", script]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("NOT the same training: the gradient of `0.weight` differs in step 0")
    assert second.startswith("likely cause: loss denominator. The gradient of one process is")
    assert third.startswith("what to do: use the mean")


def test_the_command_shows_why_a_script_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("def train():\n    raise ValueError('no such disk')\n\ntrain()")
    assert main(["verify", str(script)]) == 2
    said = capsys.readouterr()
    assert f"poise: {script} failed in one process" in said.err
    assert said.err.endswith("ValueError: no such disk\n")
    assert said.err.count("File ") == 2, "frames of Poise are left out"
    assert said.out == ""


@pytest.mark.slow
def test_the_command_shows_why_one_of_the_workers_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", "--workers", "2", str(SCRIPTS / "crash.py")]) == 2
    said = capsys.readouterr().err
    assert "crash.py failed on 2 workers (worker 1), so it could not be verified" in said
    assert said.endswith("ValueError: the disk is full\n")


@pytest.mark.slow
def test_the_command_gives_up_on_a_script_that_blocks_and_says_where(
    capsys: pytest.CaptureFixture[str],
) -> None:
    patient = ["--workers", "2", "--patience", "40"]
    assert main(["verify", *patient, str(SCRIPTS / "blocks.py"), "1"]) == 2
    said = capsys.readouterr().err
    assert "run 3 of 3, " in said
    assert "blocks.py on 2 workers: 2 of 4 steps done, " in said
    assert "on 2 workers made no progress for 40 s, so it could not be verified" in said
    assert "worker 0 is in step 2, at blocks.py line 26 in <module>" in said
    assert "worker 1 is in step 2, at blocks.py line 14 in wait_for_good\n" in said
    assert not [each for each in _command_lines() if "poise.verify.worker" in each]


def _command_lines() -> list[str]:
    """Return those of all processes that this one has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append((status.parent / "cmdline").read_text())
    return found


def test_a_run_that_stands_still_ends_the_patience() -> None:
    now_s = 0.0
    run = Run("run 1 of 3", workers=2, steps=4, patience_s=30, clock=lambda: now_s)
    assert (run.progress(), run.stage(1)) == (
        "not prepared yet",
        "before Balancer.prepare was done",
    )
    now_s = 29.0
    run.look()
    run.hear(0, {"prepared": True})
    run.hear(1, {"begun": 3})
    assert run.progress() == "0 of 4 steps done"
    assert (run.stage(0), run.stage(1)) == ("before its first step", "in step 2")
    run.hear(0, {"begun": 5})
    assert run.progress() == "2 of 4 steps done"
    now_s = 59.0
    run.look()
    now_s = 59.1
    with pytest.raises(StandsStill):
        run.look()


def test_where_a_script_stands_is_read_from_its_threads() -> None:
    stacks = (
        'Thread 0x7f01 (most recent call first):\n  File "/lib/threading.py", line 3 in wait\n'
        'Current thread 0x7f02 (most recent call first):\n  File "/me/train.py", line 4 in load\n'
    )
    assert place(stacks, "scripts/train.py") == "at train.py line 4 in load"
    assert place(stacks, "other.py") == "outside of the script's own lines"
    assert place("", "train.py") == "it does not say where"


def test_the_command_refuses_a_script_without_a_balancer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verify", str(SCRIPTS / "no_balancer.py")]) == 2
    said = capsys.readouterr()
    assert "no_balancer.py ended without calling Balancer.prepare" in said.err
    assert errors(said.err).count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [(["missing.py"], "there is no script missing.py"), ([], "verify needs a script")],
)
def test_the_command_refuses_a_missing_script(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["verify", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--workers", "1"], ["--steps", "0"]])
def test_the_command_refuses_numbers_that_compare_nothing(words: list[str]) -> None:
    for arguments in ([*words, "train.py"], ["train.py", *words]):
        with pytest.raises(SystemExit) as left:
            main(["verify", *arguments])
        assert left.value.code == 2


@given(st.integers(2, 40), st.integers(1, 500))
def test_shares_are_unequal_and_fall(workers: int, more: int) -> None:
    split = unequal_split(workers, workers + more)
    assert sum(split) == workers + more
    assert list(split) == sorted(split, reverse=True)
    assert split[0] > split[-1] >= 1
    assert more <= workers or split[-1] >= 2


def test_a_global_batch_that_gives_one_sample_each_is_refused() -> None:
    with pytest.raises(InfeasibleSplit, match="raise global_batch to at least 4"):
        unequal_split(3, 3)


def test_observations_travel_through_files(tmp_path: Path) -> None:
    leaf = ((1, 2), "a", "b", "c")
    step = StepSeen([[leaf]], weight=0.25, used={"w": torch.ones(2)}, settings={"lr": 0.1})
    written = Observation(worker=1, split=(3, 1), steps=[step])
    write(tmp_path, Variant("shared"), written)
    again = read(tmp_path, Variant("shared"), 1)
    assert torch.equal(again.steps[0].used["w"], torch.ones(2))
    again.steps[0].used = written.steps[0].used
    assert again == written


def test_a_large_tensor_is_kept_in_part() -> None:
    assert torch.equal(kept(torch.arange(6).view(2, 3)), torch.arange(6))
    assert torch.equal(kept(torch.arange(200_000)), torch.arange(0, 200_000, 4))


def fingerprints(batch: Any, samples: int) -> list[Any]:
    found = samples_of(batch, samples, None)
    assert found is not None
    return found


def test_samples_are_told_apart_in_any_form_of_batch() -> None:
    whole = {"x": torch.arange(12.0).view(4, 3), "name": ["a", "b", "c", "d"]}
    part = {"x": torch.arange(6.0, 12.0).view(2, 3), "name": ["c", "e"]}
    ones, others = fingerprints(whole, 4), fingerprints(part, 2)
    assert same_sample(ones[2], others[0])
    assert not same_sample(ones[3], others[1]), "one name is another"
    assert not same_sample(ones[2], others[1])


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_is_no_difference(side: str) -> None:
    def padded(*sequences: Sequence[int]) -> Tensor:
        parts = [torch.tensor(each) for each in sequences]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_side=side)

    long = fingerprints(padded([5, 6, 7], [1, 2, 3, 4, 4, 6]), 2)
    short = fingerprints(padded([5, 6, 7], [1, 8]), 2)
    alone = fingerprints(padded([5, 6, 7]), 1)
    assert same_sample(long[0], short[0])
    assert same_sample(long[0], alone[0])
    assert not same_sample(long[1], short[1])


def test_a_batch_of_unknown_form_is_not_compared() -> None:
    assert samples_of(object(), 4, None) is None
    assert samples_of((torch.zeros(4, 2), torch.zeros(3)), 4, None) is None


def values(numbers: Tensor) -> dict[str, Tensor]:
    """Give numbers to two parameters."""
    return {"a": numbers[:20].clone(), "b": numbers[20:].clone()}


def seen(
    worker: int,
    local: Tensor,
    used: Tensor,
    *,
    weight: float = 1.0,
    samples: Sequence[int] = (),
) -> Observation:
    """What a worker sees of one step of gradient descent from weights of 1."""
    before = torch.ones_like(used)
    step = StepSeen(
        [[((1,), str(sample), "", "")] for sample in samples],
        before=values(before),
        weight=weight,
        local=values(local),
        used=values(used),
        settings={"lr": 0.1},
        after=values(before - 0.1 * used),
        digests={"a": "same", "b": "same"},
    )
    return Observation(worker=worker, split=SPLIT, steps=[step])


def made_up(
    local: Any = lambda gradients: gradients.mean(0), used: Any = lambda summed, _: summed
) -> Runs:
    """Runs of a made-up model, with 60 weights and known gradients of its 16 samples.

    Args:
        local: the gradient of a local batch, from those of its samples.
        used: what the optimizer uses, from the sum over the workers and their number.
    """
    gradients = torch.randn(16, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = [share / 16 for share in SPLIT]
    parts = [local(part) for part in gradients.split(SPLIT)]
    summed = used(torch.stack(parts).T @ torch.tensor(weights, dtype=torch.float64), 3)
    whole, again = local(gradients), local(gradients.flip(0))
    numbers = torch.arange(16).split(SPLIT)
    return Runs(
        seen(0, whole, used(whole, 1), samples=range(16)),
        seen(0, again, used(again, 1), samples=range(15, -1, -1)),
        tuple(
            seen(worker, parts[worker], summed, weight=weights[worker], samples=part.tolist())
            for worker, part in enumerate(numbers)
        ),
    )


def only_cause(verdict: Verdict) -> Cause:
    assert verdict.difference is not None
    (cause,) = verdict.causes
    return cause


def test_weighted_means_are_the_same_training() -> None:
    verdict = judge(made_up())
    assert verdict.difference is None
    assert verdict.extent.gradients < 1e-15


def test_a_sum_is_recognized() -> None:
    cause = only_cause(judge(made_up(lambda gradients: gradients.sum(0))))
    assert cause.name == "loss denominator"
    assert "is a sum" in cause.evidence


def test_a_loss_divided_by_the_workers_is_recognized() -> None:
    runs = made_up(lambda gradients: gradients.mean(0) / (1 if len(gradients) == 16 else 3))
    assert "is 0.3333 times that of one process" in only_cause(judge(runs)).evidence


def by_tokens(gradients: Tensor) -> Tensor:
    """A mean over tokens, of which every sample has another number."""
    tokens = gradients[:, :1].abs() + 1
    return (gradients * tokens).sum(0) / tokens.sum()


def test_the_right_weights_of_a_mean_over_tokens_are_found() -> None:
    cause = only_cause(judge(made_up(by_tokens)))
    assert "were 0.625, 0.250, 0.125" in cause.evidence
    assert "count=function" in cause.advice


def test_a_wrong_count_function_is_recognized() -> None:
    runs = made_up(by_tokens)
    runs.alone.counted = True
    assert "something else than what count returns" in only_cause(judge(runs)).evidence


def test_samples_that_influence_each_other_are_recognized() -> None:
    runs = made_up(lambda gradients: gradients.mean(0) * gradients.std(0))
    assert only_cause(judge(runs)).name == "in-batch negatives"


def test_samples_of_other_shapes_hint_at_padding() -> None:
    runs = made_up(lambda gradients: gradients.mean(0) * gradients.std(0))
    samples = runs.shared[2].steps[0].samples
    assert samples is not None
    samples[-1] = [((1, 3, 3), "shorter", "", "")]
    whole = runs.alone.steps[0].samples, runs.reordered.steps[0].samples
    assert whole[0] is not None
    assert whole[1] is not None
    whole[0][-1] = whole[1][0] = [((1, 5, 5), "longer", "", "")]
    assert [cause.name for cause in judge(runs).causes] == ["padding", "in-batch negatives"]


def test_a_gradient_that_depends_on_the_order_is_recognized() -> None:
    def masked(gradients: Tensor) -> Tensor:
        mask = torch.rand(gradients.shape, generator=torch.Generator().manual_seed(2)) > 0.5
        return (gradients * mask).mean(0)

    runs = made_up(masked)
    assert only_cause(judge(runs)).name == "order of samples"
    runs.alone.draws_in_loop = True
    assert only_cause(judge(runs)).name == "random numbers in the training loop"
    runs.alone.draws_in_model = True
    assert only_cause(judge(runs)).name == "dropout"
    runs.alone.batch_norms.append("1")
    assert [cause.name for cause in judge(runs).causes] == ["dropout", "BatchNorm"]


def test_a_gradient_that_is_changed_after_the_sum_is_recognized() -> None:
    runs = made_up(used=lambda summed, workers: summed * workers)
    assert only_cause(judge(runs)).name == "gradient changed after backward"


def test_clipping_is_no_change() -> None:
    assert judge(made_up(used=lambda summed, _: summed / summed.norm())).difference is None


def test_other_samples_are_found_with_their_worker() -> None:
    runs = made_up(lambda gradients: gradients.sum(0))
    samples = runs.shared[1].steps[0].samples
    assert samples is not None
    samples[2] = [((1,), "other", "", "")]
    assert "sample 2 of worker 1 in step 0" in only_cause(judge(runs)).evidence


def test_other_initial_weights_are_found_first() -> None:
    runs = made_up(lambda gradients: gradients.sum(0))
    runs.reordered.steps[0].before["b"] += 0.1
    verdict = judge(runs)
    assert only_cause(verdict).name == "initial weights"
    assert verdict.difference is not None
    assert verdict.difference.name == "b"


def test_a_learning_rate_that_depends_on_the_workers_is_found() -> None:
    runs = made_up()
    runs.shared[0].steps[0].settings["lr"] = 0.3
    verdict = judge(runs)
    assert verdict.difference is not None
    assert (verdict.difference.kind, verdict.difference.name) == ("setting", "lr")
    assert "lr is 0.3 on worker 0, and 0.1 in one process" in only_cause(verdict).evidence


def test_other_updates_are_found() -> None:
    runs = made_up()
    runs.shared[0].steps[0].after["b"] -= 0.1
    verdict = judge(runs)
    assert verdict.difference is not None
    assert (verdict.difference.kind, verdict.difference.name) == ("update", "b")
    assert only_cause(verdict).name == "updates"


def test_a_worker_with_other_weights_is_found() -> None:
    runs = made_up()
    runs.shared[2].steps[0].digests["a"] = "other"
    verdict = judge(runs)
    assert verdict.difference is not None
    assert (verdict.difference.kind, verdict.difference.worker) == ("worker", 2)


def test_a_step_that_a_worker_does_not_take_is_found() -> None:
    runs = made_up()
    runs.alone.steps *= 2
    runs.reordered.steps *= 2
    verdict = judge(runs)
    assert verdict.difference is not None
    assert (verdict.difference.kind, verdict.difference.step) == ("steps", 1)
    assert "takes 1 steps on worker 0, and 2 in one process" in only_cause(verdict).evidence


def test_what_may_be_rounding_counts_only_with_a_cause() -> None:
    def nudged(amount: float) -> Runs:
        runs = made_up()
        for values_of in (runs.shared[0].steps[0].used, runs.shared[0].steps[0].local):
            values_of["a"][3] += amount
        return runs

    assert judge(nudged(1e-11)).difference is None
    assert judge(nudged(1e-6)).difference is not None
    runs = nudged(1e-11)
    runs.alone.batch_norms.append("1")
    assert only_cause(judge(runs)).name == "BatchNorm"


def test_measured_rounding_is_a_measure_only_while_it_is_small() -> None:
    assert SINGLE.limit_for(1e-8) == 1e-6
    assert SINGLE.limit_for(1e-5) == pytest.approx(3e-5)
    assert SINGLE.limit_for(0.2) == 1e-6


def test_the_precision_is_that_of_the_coarsest_numbers() -> None:
    runs = made_up()
    assert precision_of(runs) == DOUBLE
    runs.alone.steps[0].used["a"] = runs.alone.steps[0].used["a"].float()
    assert precision_of(runs) == SINGLE
    runs.alone.autocast = True
    assert precision_of(runs) == HALF


def test_distances_are_parts_of_the_largest_value() -> None:
    one = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([math.nan, 1.0])}
    assert distances(one, one) == {"a": 0.0, "b": 0.0}
    other = {"a": torch.tensor([2.0, -4.0]), "b": torch.tensor([0.0, 1.0])}
    assert distances(one, other) == {"a": 0.25, "b": math.inf}
    assert distances(one, {"a": one["a"]}) == {"a": 0.0, "b": 0.25}
    assert distances({}, {}) == {}


def test_a_global_batch_that_may_move_stays_while_it_is_verified() -> None:
    observer = Observer(1, Variant("alone"), mock.Mock())
    adapt = Adaptation(lowest=16, highest=64)
    stated = TorchSettings(global_batch=32, policy=Auto(), adapt=adapt, rule="linear", seed=3)
    settings = observer.settings(stated)
    assert (settings.adapt, settings.rule, settings.seed) == (None, None, 3)
