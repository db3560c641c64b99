"""Learning-rate schedules that count samples and not calls."""

from typing import Any

from poise.errors import InvalidSetting, StateMismatch
from poise.runtime.settings import is_number_of_samples
from poise.torch.balancer import Balancer


class BySamples:
    """Lets a scheduler of torch advance once for every so many samples of the training.

    A scheduler counts calls of `step()`, so what it does depends on how many samples a call
    stands for. Here the caller's number of calls does not matter: after n samples over all
    workers the scheduler has made n // samples_per_step steps, whatever the global batch was,
    and a call with nothing new to count changes nothing.

        scheduler = BySamples(CosineAnnealingLR(optimizer, T_max=10_000), balancer, 512)

    With effective=True a sample counts by what it teaches, `balancer.effective_samples`: where a
    larger global batch makes slower progress per sample, the schedule advances more slowly.
    """

    def __init__(
        self, scheduler: Any, balancer: Balancer, samples_per_step: int, *, effective: bool = False
    ) -> None:
        if not is_number_of_samples(samples_per_step):
            raise InvalidSetting(
                f"samples_per_step={samples_per_step!r} is not a number of samples; give the "
                "global batch that the schedule was written for"
            )
        if not callable(getattr(scheduler, "step", None)):
            raise InvalidSetting(
                f"BySamples got a {type(scheduler).__name__}; it takes a scheduler of torch, "
                "such as CosineAnnealingLR"
            )
        self.scheduler = scheduler
        self._balancer = balancer
        self._samples_per_step = samples_per_step
        self._effective = effective
        self._steps = self._due()
        """Steps that the scheduler has made, or that lie before its beginning."""
        self._served = balancer._training.follow(self)
        """Whether a server calls follow, and calls of step mean nothing."""

    def step(self) -> None:
        """Follow the samples consumed so far; call it after every optimizer.step().

        With a server, it is the server's schedule that counts, and follows by itself.
        """
        if not self._served:
            self.follow()

    def follow(self) -> None:
        """Make the steps that are due."""
        due = self._due()
        for _ in range(due - self._steps):
            self.scheduler.step()
        self._steps = max(self._steps, due)

    def _due(self) -> int:
        balancer = self._balancer
        samples = balancer.effective_samples if self._effective else balancer.samples
        return int(samples // self._samples_per_step)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates now in use."""
        if self._served:  # as the server said them
            return [float(group["lr"]) for group in self.scheduler.optimizer.param_groups]
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state and how far it has come."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "steps": self._steps,
            "samples_per_step": self._samples_per_step,
            "effective": self._effective,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        if state["samples_per_step"] != self._samples_per_step:
            raise StateMismatch(
                f"the schedule was saved with samples_per_step={state['samples_per_step']} and is "
                f"{self._samples_per_step} now, so it would jump; use the same number"
            )
        if state.get("effective", False) != self._effective:
            raise StateMismatch(
                f"the schedule was saved with effective={not self._effective} and is "
                f"effective={self._effective} now, so it would jump; use the same"
            )
        self.scheduler.load_state_dict(state["scheduler"])
        self._steps = state["steps"]
