"""What can be wrong in a training, as functions of plain facts."""

from poise.errors import InvalidSetting, OutOfOrder


def check_epoch(length: int, global_batch: int) -> None:
    """Raise if drop_last would leave no step in an epoch."""
    if length < global_batch:
        raise InvalidSetting(
            f"the data set has {length} samples, fewer than global_batch={global_batch}, and "
            "drop_last=True drops them all; use drop_last=False or a smaller global_batch"
        )


def check_range(length: int, highest: int) -> None:
    """Raise if a global batch could grow beyond an epoch."""
    if length < highest:
        raise InvalidSetting(
            f"adapt=(..., {highest}) lets a global batch have more samples than the data set, "
            f"which has {length}; give a highest one that an epoch holds several times"
        )


def check_models_fit(models: int, *, stateful_hook: bool, adapts: bool) -> None:
    """Raise if so many models do not go with a hook that has a state, or with adapt."""
    if stateful_hook and models > 1:
        raise InvalidSetting(
            "comm_hook has a state, which remembers buckets by their number, and would mix "
            "those of several models; use a hook without a state, or one model"
        )
    if adapts and models > 1:
        raise InvalidSetting(
            "adapt measures the noise of one gradient, and several models have several; "
            "leave adapt out, or train them as one module"
        )


def check_parts_ended(*, unfinished: bool) -> None:
    """Raise if an optimizer used the gradient of some parts of a batch only."""
    if unfinished:
        raise OutOfOrder(
            "the loop over balancer.micro_batches(batch) was left before its last part, so "
            "its gradient is not summed over the workers; take all parts"
        )


def check_parts_used(most_samples: int, *, used: bool) -> None:
    """Raise if a batch was not taken in parts although it should be."""
    if not used:
        raise OutOfOrder(
            f"micro_batch={most_samples} is set, but the batch did not go through "
            "`for part in balancer.micro_batches(batch):`; use it, or leave micro_batch out"
        )


def check_backwards(backwards: int, reduced: int) -> None:
    """Raise if a backward reached a model whose gradient was not summed over the workers."""
    if backwards > reduced:
        raise OutOfOrder(
            f"{backwards} backwards reached the model since the last batch, but "
            f"{reduced} of them were summed over the workers; run one backward "
            "for each call of the prepared model, model(x)"
        )
