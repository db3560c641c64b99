"""What Poise relies on in torch beyond its documentation, and that one file alone does."""

import ast
import re
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

from poise.torch import torch_private
from poise.torch.torch_private import (
    BUFFER_BROADCAST,
    BatchNormBase,
    DropoutBase,
    LoaderIterator,
    NormBase,
    changes_in_place,
    copy_all,
    gloo_pair,
    graphs_compiled,
    has_scheduler,
    is_compiled_itself,
    is_enabled,
    let_length_vary,
    loader_processes,
    mark_stepped,
    optimizer_of,
    queue_callback,
    with_batch_sampler,
)
from tests.cluster import Workers
from tests.leaks import group_threads

SOURCE = Path(torch_private.__file__).parents[1]
FOREIGN = {"_fields", "_replace"}
"""Underscored names that are public: those of named tuples."""


def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None and name not in FOREIGN


def own_names(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if ast.unparse(node.value) == "self":
                yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg


def used_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Private names that a file reads, sets or spells, each with the object that has it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield ast.unparse(node.value), node.attr
        elif isinstance(node, ast.Constant) and is_private(str(node.value)):
            yield "", str(node.value)


def torch_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Modules of torch and names in them that a file imports, and the names that it gives them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (
                (f"{node.module}.{each.name}", each.asname or each.name) for each in node.names
            )
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "torch":
                    yield each.name, each.asname or "torch"


def private_names_of_torch(tree: ast.AST, ours: set[str], known: set[str]) -> set[str]:
    """Return what a file uses of torch that is private, as far as its text tells."""
    imported = dict(torch_imports(tree))
    given = set(imported.values())
    found = {name for name in imported if re.search(r"\._[A-Za-z]", name)}
    for owner, name in used_names(tree):
        if owner == "os":  # os._exit has an underscore, and is public
            continue
        of_torch = owner.split(".")[0] in given
        of_another = owner != "self" and name in known
        if of_torch or of_another or name not in ours:
            found.add(f"{owner}.{name}")
    texts = (str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return found | {text for text in texts if text.startswith("torch._")}


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    parsed = trees()
    private = parsed.pop(Path(torch_private.__file__))
    known = {name for _, name in used_names(private)}
    ours = {name for tree in parsed.values() for name in own_names(tree)}
    found = {
        str(path.relative_to(SOURCE)): names
        for path, tree in parsed.items()
        if (names := private_names_of_torch(tree, ours, known))
    }
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "from torch.nn.modules.batchnorm import _NormBase",
        "from torch._dynamo import maybe_mark_dynamic",
        "import torch._dynamo",
        "import torch; torch._foreach_copy_([], [])",
        "from torch import nn; nn.Module._ours()",
        "sampler._num_samples",
        "options._timeout = 1",
        "hasattr(step, '_wrapped_by_lr_sched')",
        "sys.modules.get('torch._dynamo.utils')",
    ],
)
def test_a_private_name_of_torch_is_found(line: str) -> None:
    assert private_names_of_torch(ast.parse(line), ours={"_ours", "_timeout"}, known={"_timeout"})


@pytest.mark.parametrize(
    "line", ["self._ours", "engine._ours", "self._timeout", "row._replace(a=1)"]
)
def test_a_private_name_of_our_own_is_not(line: str) -> None:
    found = private_names_of_torch(ast.parse(line), ours={"_ours", "_timeout"}, known={"_timeout"})
    assert not found


def test_layers_are_told_by_their_base() -> None:
    by_batch = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)]
    by_instance = [nn.InstanceNorm1d(2), nn.InstanceNorm2d(2), nn.InstanceNorm3d(2)]
    by_sample = [nn.LayerNorm(2), nn.GroupNorm(1, 2)]
    assert all(isinstance(layer, BatchNormBase) for layer in by_batch)
    assert not any(isinstance(layer, BatchNormBase) for layer in [*by_instance, *by_sample])
    assert all(isinstance(layer, NormBase) for layer in [*by_batch, *by_instance])
    assert not any(isinstance(layer, NormBase) for layer in by_sample)
    dropping = [nn.Dropout(), nn.Dropout1d(), nn.Dropout2d(), nn.Dropout3d(), nn.AlphaDropout()]
    assert all(isinstance(layer, DropoutBase) for layer in dropping)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_a_layer_that_keeps_statistics_names_them_as_poise_does(kind: type[NormBase]) -> None:
    layer = kind(2, track_running_stats=True)
    layer(torch.randn(3, 2, 4) + 5)
    for found, at_first in ((layer.running_mean, 0.0), (layer.running_var, 1.0)):
        assert found is not None
        assert (found != at_first).all()
    assert layer.num_batches_tracked is not None


@pytest.mark.parametrize("processes", [0, 2])
def test_every_batch_of_a_loader_comes_through_its_iterator(
    monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    original, calls = LoaderIterator.__next__, []

    def counted(self: Any) -> Any:
        calls.append(loader_processes(self))
        return original(self)

    monkeypatch.setattr(LoaderIterator, "__next__", counted)
    loader: DataLoader[Any] = DataLoader(range(6), 2, num_workers=processes)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert calls == [processes] * 4  # the last finds the end
    assert loader_processes(loader) == processes


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


def test_a_loader_of_a_stream_takes_batches_of_changing_size() -> None:
    loader = with_batch_sampler(DataLoader(Counting(), 1), [[0] * 2, [0] * 3, [0]])
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3, 4], [5]]


@pytest.mark.parametrize("enabled", [True, False])
def test_an_autocast_says_whether_it_is_enabled(enabled: bool) -> None:
    context = torch.autocast("cpu", torch.bfloat16, enabled=enabled)
    with context:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert is_enabled(context) == enabled == (product.dtype == torch.bfloat16)


def test_a_queued_callback_comes_after_all_gradients_and_before_backward_returns() -> None:
    happened: list[str] = []
    first, second = (torch.ones(1, requires_grad=True) for _ in range(2))

    def ready(name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if not happened:
                queue_callback(lambda: happened.append("callback"))
            happened.append(name)

        return hook

    first.register_post_accumulate_grad_hook(ready("first"))
    second.register_post_accumulate_grad_hook(ready("second"))
    (first * 2 + (second * 3).exp()).backward()
    happened.append("returned")
    assert sorted(happened[:2]) == ["first", "second"]
    assert happened[2:] == ["callback", "returned"]


def test_changes_of_a_tensor_in_place_are_counted() -> None:
    tensor = torch.zeros(3)
    before = changes_in_place(tensor)
    _ = tensor + 1
    assert changes_in_place(tensor) == before
    tensor[0] += 1
    tensor.copy_(torch.ones(3))
    assert changes_in_place(tensor) > before


def test_tensors_of_several_types_are_copied_at_once() -> None:
    sources = [torch.arange(3.0), torch.tensor([4, 5]), torch.full((2, 2), 6.0)]
    targets: list[Tensor] = [nn.Parameter(torch.zeros(3)), torch.zeros(2, dtype=torch.long)]
    targets.append(torch.zeros(2, 2))
    copy_all(sources, targets)
    assert all(map(torch.equal, sources, targets))
    assert [target.dtype for target in targets] == [source.dtype for source in sources]


def test_a_compiled_module_is_known_as_one() -> None:
    assert not is_compiled_itself(nn.Linear(1, 1))
    made: Any = torch.compile(nn.Linear(1, 1), backend="eager")
    assert is_compiled_itself(made)
    in_place = nn.Linear(1, 1)
    in_place.compile(backend="eager")
    assert is_compiled_itself(in_place)


@pytest.mark.parametrize("told", [True, False])
def test_one_graph_serves_all_lengths_if_torch_compile_is_told(told: bool) -> None:
    torch.compiler.reset()
    before = graphs_compiled()
    model = torch.compile(nn.Linear(3, 2), backend="eager")
    for length in (4, 5, 7):
        inputs = torch.ones(length, 3)
        if told:
            let_length_vary(inputs)
        model(inputs)
    assert graphs_compiled() - before == (1 if told else 2)
    torch.compiler.reset()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=0.1)


def with_gradients() -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    for place, parameter in enumerate(parameters, start=1):
        parameter.grad = torch.full_like(parameter, float(place))
    return parameters


def test_optimizers_of_parts_do_together_what_the_whole_does() -> None:
    alone, cut = with_gradients(), with_gradients()
    whole, users = adamw(alone), adamw(cut)
    stepped = []
    users.register_step_pre_hook(lambda *_: stepped.append("hook"))
    StepLR(users, 1)  # wraps the step of the user's, which must not be that of a part
    parts = [optimizer_of(users, [parameter]) for parameter in cut]
    for _ in range(3):
        whole.step()
        for part, parameter in zip(parts, cut, strict=True):
            others = [other.clone() for other in cut if other is not parameter]
            part.step()
            assert all(map(torch.equal, others, (p for p in cut if p is not parameter)))
    assert all(map(torch.equal, alone, cut))
    assert stepped == ["hook"] * 6
    assert set(users.state) == set(cut)


@pytest.mark.parametrize("marked", [True, False])
def test_a_scheduler_is_content_with_an_optimizer_that_stepped_in_parts(marked: bool) -> None:
    optimizer = adamw(with_gradients())
    assert not has_scheduler(optimizer)
    scheduler = StepLR(optimizer, 1)
    assert has_scheduler(optimizer)
    if marked:
        mark_stepped(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler.step()
    assert any("optimizer.step()" in str(each.message) for each in caught) == (not marked)


class Noting(dist.Store):
    """A store that keeps what was set in it."""

    def __init__(self, inner: HashStore) -> None:
        super().__init__()
        self.inner = inner
        self.values: list[bytes] = []

    def set(self, key: str, value: Any) -> None:
        self.values.append(value.encode() if isinstance(value, str) else bytes(value))
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self.inner.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.inner.wait(keys)


def test_a_pair_listens_at_its_address_with_one_thread_and_ends_a_transfer_in_time() -> None:
    host, store = "127.0.0.2", HashStore()
    ends: list[Any] = [None, None]
    stores = [Noting(store), Noting(store)]

    def pair_up(place: int) -> None:
        ends[place] = gloo_pair(stores[place], place, host, timedelta(seconds=3))

    before = group_threads()
    other = threading.Thread(target=pair_up, args=(1,))
    other.start()
    pair_up(0)
    other.join()
    here, there = ends
    for noted in stores:
        assert any(socket.inet_aton(host) in value for value in noted.values)
    sent, received = torch.arange(4.0), torch.zeros(4)
    work = here.send([sent], 1, 0)
    there.recv([received], 0, 0).wait()
    work.wait()
    assert torch.equal(sent, received)
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):
        there.recv([received], 0, 0).wait()
    # Not earlier: a thread names itself when it first runs.
    assert len({name for name in group_threads() - before if "runloop" in name}) == len(ends)


def buffers_after_forward() -> list[float]:
    """Return what a worker has in its buffer after forward: with torch's own method, without it."""
    dist.init_process_group("gloo")
    try:
        model = nn.BatchNorm1d(1, momentum=0.0)
        ddp, found = DistributedDataParallel(model), []
        for method in (getattr(DistributedDataParallel, BUFFER_BROADCAST), lambda _: None):
            assert model.running_mean is not None
            model.running_mean.fill_(dist.get_rank() + 1.0)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(DistributedDataParallel, BUFFER_BROADCAST, method)
                ddp(torch.randn(4, 1)).sum().backward()
            found.append(model.running_mean.item())
        dist.barrier()  # leaving a group that the other worker still uses may hang
        return found
    finally:
        with suppress(ValueError):
            dist.destroy_process_group()


def test_buffers_are_sent_by_the_method_that_is_watched(workers: Workers) -> None:
    assert workers.run(buffers_after_forward, workers=2) == [[1.0, 1.0], [1.0, 2.0]]
