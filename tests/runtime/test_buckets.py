"""All iterations of a DDP model reduce in one order, from the first one on, in every run."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Final

import interrupted
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from phoenix_runtime.buckets import fix_bucket_order

RANKS: Final = 3  # two add up to the same bits in any order
DEADLINE: Final = 100.0  # fresh processes load torch, on a machine that may be busy


class Odd(nn.Module):
    """Uses its layers in another order than it names them; one weight is tied, one is frozen."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first, self.middle = (nn.Linear(width, width) for _ in range(3))
        self.embedding = nn.Embedding(31, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in (self.first, self.middle, self.frozen, self.last):
            hidden = torch.tanh(layer(hidden))
        return torch.as_tensor(hidden @ self.embedding.weight.t())


def gradients(rank: int, wrap: Callable[[nn.Module], nn.Module], fix: bool, iterations: int = 3) -> list[Any]:
    """The bits of the gradients of some iterations from the same parameters with the same batch."""
    net = Odd()
    model = wrap(net)
    if fix:
        assert fix_bucket_order([nn.Sequential(model)]) == []
        assert all(parameter.grad is None for parameter in net.parameters())
        assert fix_bucket_order([model, model]) == []  # nothing is done twice
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randint(0, 31, (8, 16), generator=generator) for _ in range(2)]
    found = []
    for _ in range(iterations):
        net.zero_grad()
        nn.functional.cross_entropy(model(batches[0]).flatten(0, 1), batches[1].flatten()).backward()  # type: ignore[no-untyped-call]
        found.append(repr(interrupted.bits({name: parameter.grad for name, parameter in net.named_parameters()})))
    return found


def plain(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, bucket_cap_mb=0.02)


def in_views(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, bucket_cap_mb=0.02, gradient_as_bucket_view=True)


def with_unused(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, bucket_cap_mb=0.02, find_unused_parameters=True)


def with_static_graph(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net, static_graph=True)


class Counted:
    """The state of a communication hook."""

    def __init__(self) -> None:
        self.calls, self.sizes = 0, [0]


def counting(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants annotations that are no strings, or none
    state.calls += 1
    state.sizes.append(bucket.buffer().numel())
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / RANKS)


# --- on forked ranks -----------------------------------------------------------------------------------------------------


def equal_from_the_first(rank: int) -> object:
    runs = [gradients(rank, wrap, fix=True) for wrap in (plain, in_views, plain)]
    return [len({bits for run in runs for bits in run}), len(set(gradients(rank, plain, fix=False)))]


def unused_parameters_have_one_order(rank: int) -> object:
    return [len(set(gradients(rank, with_unused, fix=fix))) for fix in (True, False)]


def what_cannot_be_fixed(rank: int) -> object:
    hooked = Odd()
    hooked.first.weight.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]
    return fix_bucket_order([with_static_graph(Odd()), plain(hooked)])


def a_model_that_trained_keeps_its_order(rank: int) -> object:
    model = plain(Odd())
    batch = torch.zeros(2, 2, dtype=torch.int64)
    model(batch).sum().backward()
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    bits = repr(interrupted.bits(before))
    remarks = fix_bucket_order([model])
    after = {name: parameter.grad for name, parameter in model.named_parameters()}
    return [remarks, all(after[name] is before[name] for name in before), bits == repr(interrupted.bits(after))]


def allocated_gradients_are_the_same_afterwards(rank: int) -> object:
    model = in_views(Odd())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, -0.0)
    before = {name: parameter.grad for name, parameter in model.named_parameters()}
    fix_bucket_order([model])
    same = all(parameter.grad is before[name] for name, parameter in model.named_parameters())
    return [same, all(grad is None or bool(torch.signbit(grad).all()) for grad in before.values())]


def hooks_of_communication_forget_it(rank: int) -> object:
    state = Counted()
    model = DistributedDataParallel(Odd(), bucket_cap_mb=0.02)
    model.register_comm_hook(state, counting)
    fix_bucket_order([model])
    before = [state.calls, [*state.sizes]]
    model(torch.zeros(2, 2, dtype=torch.int64)).sum().backward()
    return [before, state.calls > 1]


def sparse_gradients_are_fixed_too(rank: int) -> object:
    def build() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(31, 8, sparse=True), nn.Linear(8, 8))
        return net, DistributedDataParallel(net)

    found = []
    for _ in range(2):
        net, model = build()
        fix_bucket_order([model])
        for _ in range(2):
            net.zero_grad()
            model(torch.arange(rank, 8 + rank)).square().sum().backward()
            dense = [torch.as_tensor(parameter.grad).to_dense() for parameter in net.parameters()]
            found.append(repr(interrupted.bits(dense)))
    return len(set(found))


CASES: Final[dict[str, Callable[[int], object]]] = {
    body.__name__: body
    for body in (
        equal_from_the_first,
        unused_parameters_have_one_order,
        what_cannot_be_fixed,
        a_model_that_trained_keeps_its_order,
        allocated_gradients_are_the_same_afterwards,
        hooks_of_communication_forget_it,
        sparse_gradients_are_fixed_too,
    )
}


def _serve(rank: int, store: Path, answer: Any) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(DEADLINE - 5)
    files = dist.FileStore(str(store), RANKS)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=RANKS, timeout=timedelta(seconds=DEADLINE))
    for name, body in CASES.items():
        try:
            answer.send((name, body(rank)))
        except Exception:
            answer.send((name, traceback.format_exc()))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank said to each case. The ranks are started afresh: a fork after torch has used its threads hangs."""
    folder = tmp_path_factory.mktemp("buckets")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    lines, processes = [], []
    for rank in range(RANKS):
        ours, theirs = Pipe(duplex=False)
        command = [sys.executable, __file__, str(rank), str(folder / "store"), str(theirs.fileno())]
        processes.append(subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]))
        theirs.close()
        lines.append(ours)
    found: dict[str, list[Any]] = {}
    try:
        for rank, line in enumerate(lines):
            for _ in CASES:
                if not wait([line], DEADLINE):
                    pytest.fail(f"rank {rank} hung after {list(found)}")
                name, value = line.recv()
                found.setdefault(name, []).append(value)
        for process in processes:
            assert process.wait(DEADLINE) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for line in lines:
            line.close()
    return found


def test_gradients_of_all_iterations_and_runs_are_equal(answers: dict[str, list[Any]]) -> None:
    assert answers["equal_from_the_first"] == [[1, 2]] * RANKS  # without it the first one differs


def test_with_unused_parameters_there_is_one_order_anyway(answers: dict[str, list[Any]]) -> None:
    assert answers["unused_parameters_have_one_order"] == [[1, 1]] * RANKS


def test_what_cannot_be_fixed_is_said(answers: dict[str, list[Any]]) -> None:
    for said in answers["what_cannot_be_fixed"]:
        static, hooked = said
        assert static.startswith("DDP of Odd has a static graph") and "has hooks that run when" in hooked


def test_a_model_that_has_trained_keeps_its_order_and_its_gradients(answers: dict[str, list[Any]]) -> None:
    assert answers["a_model_that_trained_keeps_its_order"] == [[[], True, True]] * RANKS


def test_gradients_that_were_there_are_untouched(answers: dict[str, list[Any]]) -> None:
    assert answers["allocated_gradients_are_the_same_afterwards"] == [[True, True]] * RANKS


def test_the_state_of_a_communication_hook_is_as_before(answers: dict[str, list[Any]]) -> None:
    assert answers["hooks_of_communication_forget_it"] == [[[0, [0]], True]] * RANKS


def test_sparse_gradients_are_equal_too(answers: dict[str, list[Any]]) -> None:
    assert answers["sparse_gradients_are_fixed_too"] == [1] * RANKS


def test_modules_without_ddp_are_left_alone() -> None:
    assert fix_bucket_order([nn.Linear(1, 1)]) == []


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Path(sys.argv[2]), Connection(int(sys.argv[3])))
