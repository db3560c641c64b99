"""The table [training] of a scenario: what is learned, and how far it is to the goal."""

from poise.engine.adaptation import Adaptation
from poise.errors import InvalidSetting
from poise.numbers import is_number, is_whole
from poise.sim.scenario import Learning
from poise.sim.scenario_keys import LEAST, Keys, pair_of

_KEYS = ("noise_scale", "start_batch", "target_samples", "epoch_samples", "adapt", "stride")


def declared_learning(keys: Keys, global_batch: int) -> Learning | None:
    """Return what is learned; None: nothing is said of it."""
    toml = keys.toml
    table = toml.table("training")
    toml.check_keys(_KEYS, "training")
    start = keys.whole("start_batch", global_batch, "training", least=1)
    target = keys.number("target_samples", None, "training", least=1.0)
    if "noise_scale" not in table:
        for key in ("adapt", "start_batch"):
            if key in table:
                where = toml.where("training", key=key)
                raise InvalidSetting(f"{where} has {key} and no noise_scale; give both")
        if target is None:
            return None
    course = _noise_scale(keys, target)
    adapt = _adapt(keys, global_batch, start) if "adapt" in table else None
    return Learning(noise_scale=course, start_batch=start, target_samples=target, adapt=adapt)


def declared_epoch(keys: Keys, global_batch: int) -> int | None:
    """Return the samples of an epoch; None: it never ends."""
    found = keys.whole("epoch_samples", None, "training", least=1)
    if found is not None and found < global_batch:
        raise keys.toml.refused(
            "training", 0, "epoch_samples", f"at least global_batch={global_batch} samples"
        )
    return found


def _noise_scale(keys: Keys, target: float | None) -> tuple[tuple[float, float], ...]:
    found = keys.toml.table("training").get("noise_scale", 1.0)
    if is_number(found):
        return ((0.0, keys.number("noise_scale", 1.0, "training", least=1e-9)),)
    listed = found if isinstance(found, list) else []
    pairs = [pair for pair in map(pair_of, listed) if pair and pair[0] <= 1 and pair[1] >= LEAST]
    parts = [part for part, _ in pairs]
    if not pairs or len(pairs) < len(listed) or parts != sorted(set(parts)):
        raise keys.toml.refused(
            "training",
            0,
            "noise_scale",
            "samples above 0, or pairs of the part of the goal and samples that rise from 0",
        )
    if target is None:
        where = keys.toml.where("training", key="noise_scale")
        raise InvalidSetting(
            f"{where} changes on the way to a goal; give target_samples, the samples that it "
            "takes with start_batch"
        )
    return tuple(pairs)


def _adapt(keys: Keys, global_batch: int, start: int) -> Adaptation:
    found = keys.toml.table("training")["adapt"]
    pair = isinstance(found, list) and len(found) == 2  # noqa: PLR2004
    if not pair or not all(is_whole(each) for each in found):
        raise keys.toml.refused("training", 0, "adapt", "two global batches, lowest and highest")
    where = keys.toml.where("training", key="adapt")
    if start != global_batch:
        raise InvalidSetting(
            f"{where}: a global batch that moves starts at start_batch={start}, and "
            f"global_batch={global_batch}; give the same number"
        )
    try:
        adapt = Adaptation(lowest=found[0], highest=found[1])
        adapt.start(global_batch)
    except InvalidSetting as error:
        raise InvalidSetting(f"{where}: {error}") from None
    return adapt
