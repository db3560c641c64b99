"""A training on threads that imports no framework, for environments without one."""

import numpy as np

from poise.core.order import Order
from poise.policy import Fixed
from poise.runtime.threads import ThreadRendezvous
from tests.numpy_adapter import Linear, NumpyTraining, Team, checked, on_threads, settings_of


def train() -> str:
    """Train on three threads and in one; return whether the weights are the same."""
    draw = np.random.default_rng(0)
    data = draw.standard_normal((20, 3)), draw.standard_normal((20, 2))
    first = draw.standard_normal((3, 2))
    alone = Linear(first)
    order = Order(length=20, seed=0).at(0, 20)
    for start in range(0, 20, 6):
        batch = order[start : start + 6]
        alone.backward(data[0][batch], data[1][batch])
        alone.step()
    team, rendezvous = Team(3), ThreadRendezvous()

    def work(worker: int) -> bool:
        model = Linear(first)
        settings = settings_of(6, Fixed([1, 5, 0]))
        training = NumpyTraining(settings, team.generation(worker), rendezvous, model, data)
        for x, y, _ in training.batches():
            training.backward(x, y)
            training.step()
        training.session.close()
        return bool(np.allclose(model.weights, alone.weights, atol=1e-12, rtol=0))

    return "exact" if all(checked(on_threads(team, work))) else "different"
