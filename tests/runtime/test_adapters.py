"""Every kind of object is captured and put back in place, bit for bit, and what cannot be is refused by name."""

from __future__ import annotations

import collections
import copy
import datetime
import enum
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interrupted import bits
from torch import Tensor, nn

from phoenix_runtime import randomness
from phoenix_runtime.adapters import adapt
from phoenix_runtime.adapters.modules import ModulePart
from phoenix_runtime.adapters.values import copied
from phoenix_runtime.errors import ScriptError
from phoenix_runtime.state import TrainState


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Progress:
    tokens: int
    history: list[Any]


@dataclass(slots=True)
class Slotted:
    tensor: Tensor
    best: float


# --- containers and plain values -----------------------------------------------------------------------------------------

ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
LEAVES = (
    ATOMS
    | st.lists(st.floats(width=32), max_size=3).map(torch.tensor)
    | st.sets(st.integers(), max_size=3)
    | st.sampled_from([Color.RED, datetime.date(2020, 1, 1), frozenset({1}), bytearray(b"ab")]).map(copy.deepcopy)
)
KEYS = st.text(max_size=2) | st.integers(0, 3)


def _wrapped(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    return (
        lists
        | lists.map(tuple)
        | lists.map(lambda items: collections.deque(items, maxlen=5))
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict)
        | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
        | lists.map(lambda items: Progress(len(items), items))
    )


NESTED = st.recursive(LEAVES, _wrapped, max_leaves=12)


def _spoil(value: Any) -> None:
    """Change everything in it that can be changed."""
    if isinstance(value, Tensor):
        value.add_(1)
    elif isinstance(value, set | bytearray):
        value.clear()
    elif isinstance(value, dict):
        for item in list(value.values()):
            _spoil(item)
        value[9] = "new"
        if len(value) > 1:
            del value[next(iter(value))]
    elif isinstance(value, list | tuple | collections.deque):
        for item in value:
            _spoil(item)
        if not isinstance(value, tuple):
            value.append("new")
            value.reverse()
    elif isinstance(value, Progress):
        _spoil(value.history)
        value.tokens, value.history = -1, ["other"]


def _objects(value: Any) -> list[int]:
    """The identities of all that can be changed in it, in order."""
    found = (
        [id(value)] if isinstance(value, Tensor | set | bytearray | dict | list | collections.deque | Progress) else []
    )
    if isinstance(value, Progress):
        return found + _objects(value.history)
    items = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple | collections.deque)
        else ()
    )
    return found + [identity for item in items for identity in _objects(item)]


def _exact(value: Any) -> Any:
    """bits() of a tree, with the order of keys, and sets by content."""
    if isinstance(value, dict):
        return [type(value).__name__, *((key, _exact(item)) for key, item in value.items())]
    if isinstance(value, list | tuple | collections.deque):
        return [type(value).__name__, *map(_exact, value)]
    if isinstance(value, Progress):
        return ["Progress", value.tokens, _exact(value.history)]
    return sorted(value) if isinstance(value, set) else bits(value)


@given(NESTED)
def test_nested_containers_come_back_as_the_same_objects_with_the_same_bits(value: Any) -> None:
    state = TrainState(value=value)
    exact, objects = _exact(value), _objects(value)
    entry = state.capture()
    for _ in range(2):
        _spoil(value)
        state.restore(entry)
        assert _exact(state.value) == exact
        assert _objects(state.value) == objects


@given(NESTED, NESTED)
def test_another_process_gets_the_same_bits_whatever_stood_there(value: Any, other: Any) -> None:
    captured = pickle.loads(pickle.dumps(TrainState(value=value).capture()))
    state = TrainState(value=other)
    state.restore(captured)
    assert _exact(state.value) == _exact(value)


def test_tuples_stay_the_same_object_when_nothing_in_them_was_replaced() -> None:
    pair = Pair(torch.zeros(1), [1])
    state = TrainState(pair=pair)
    entry = state.capture()
    pair.left.add_(1)
    pair.right.append(2)
    state.restore(entry)
    assert state.pair is pair and pair.left.item() == 0 and pair.right == [1]


def test_dataclasses_with_slots_and_default_dicts_are_containers() -> None:
    slotted, counts = Slotted(torch.zeros(2), 1.0), collections.defaultdict(int, a=1)
    state = TrainState(slotted=slotted, counts=counts)
    entry = state.capture()
    slotted.best, slotted.tensor = 2.0, torch.ones(1)
    counts["b"] += 1
    state.restore(entry)
    assert slotted.best == 1.0 and slotted.tensor.tolist() == [0, 0]
    assert counts == {"a": 1} and counts["new"] == 0


def test_numpy_arrays_are_restored_in_place() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(4.0)
    state = TrainState(array=array, scalar=numpy.float32(2))
    entry = state.capture()
    array *= 2
    state.restore(entry)
    assert state.array is array and array.tolist() == [0, 1, 2, 3]
    state.array = numpy.zeros(2)  # a plain value: may be assigned at any time


@pytest.mark.parametrize("value", [object(), lambda: 0, open, nn.Linear, random.SystemRandom(), iter([1])])
def test_what_cannot_be_captured_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"state\.outer\.1 is a .*which cannot be captured.*with state_dict\(\)"):
        TrainState(outer=[1, value])


# --- tensors and modules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([0.0, -0.0, float("nan"), float("inf")]),
        torch.arange(6, dtype=torch.int32).view(2, 3).t(),
        torch.tensor(3.0, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.ones(3, 1).expand(3, 4),
        torch.zeros(0, 2),
        torch.tensor([1 + 2j]),
        torch.tensor([1.0, 2.0]).to(torch.float8_e5m2),
        torch.tensor([[0.0, 2.0]]).to_sparse(),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}",
)
def test_buffers_of_every_kind_come_back(tensor: Tensor) -> None:
    module = nn.Module()
    module.register_buffer("given", tensor)
    part = ModulePart(module, "model")
    before = bits(tensor.to_dense() if tensor.is_sparse else tensor)
    captured = part.capture()
    if tensor.is_sparse:
        tensor.mul_(2)
    else:
        tensor[:1].zero_() if tensor.dim() else tensor.zero_()
    part.restore(captured)
    assert module.given is tensor
    assert bits(tensor.to_dense() if tensor.is_sparse else tensor) == before


def test_a_buffer_that_was_resized_or_belongs_to_two_modules_comes_back() -> None:
    module, shared = nn.Module(), torch.ones(2)
    module.inner = nn.Module()
    module.register_buffer("one", shared)
    module.inner.register_buffer("two", shared)
    module.register_buffer("grows", torch.zeros(1))
    part = ModulePart(module, "model")
    part.capture()
    module.grows.resize_(3).fill_(4)
    captured = part.capture()
    shared.zero_()
    module.grows.resize_(5)
    part.restore(captured)
    assert module.one is shared and module.inner.two is shared and shared.tolist() == [1, 1]
    assert module.grows.tolist() == [4, 4, 4]


def test_a_hidden_state_with_a_graph_is_put_back() -> None:
    """Recurrent models that keep their last output as a buffer."""
    module = nn.Linear(2, 2)
    module.register_buffer("hidden", torch.zeros(1, 2), persistent=False)
    part = ModulePart(module, "model")
    captured = part.capture()
    module.hidden = module(module.hidden + 1)
    part.restore(captured)
    assert not module.hidden.requires_grad and module.hidden.tolist() == [[0, 0]]
    module.hidden = module(module.hidden + 1)
    captured, value = part.capture(), module.hidden
    module.hidden = module(module.hidden)
    part.restore(captured)
    assert module.hidden is value


def test_extra_state_is_part_of_a_module() -> None:
    class Counting(nn.Module):
        count = [0]

        def get_extra_state(self) -> list[int]:
            return self.count

        def set_extra_state(self, state: list[int]) -> None:
            self.count = state

    module = nn.Sequential(Counting())
    part = ModulePart(module, "model")
    captured = part.capture()
    module[0].count[0] = 5
    part.restore(captured)
    part.restore(captured)
    assert module[0].count == [0] and captured.extra["0"] is not module[0].count


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_lazy_modules_are_refused_before_they_know_their_shapes() -> None:
    state = TrainState(model=nn.Sequential(nn.LazyLinear(2)))
    with pytest.raises(ScriptError, match=r"model\.0\.weight has no shape yet"):
        state.capture()


# --- optimizers, scalers, schedulers -------------------------------------------------------------------------------------


def test_param_groups_are_the_same_dicts_and_lists() -> None:
    weight, other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([{"params": [weight]}, {"params": [other], "lr": 0.5}], betas=(0.1, 0.2))
    groups = list(optimizer.param_groups)
    part = adapt("optimizer", optimizer)
    captured = part.capture()
    optimizer.load_state_dict(optimizer.state_dict())  # makes them anew
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    optimizer.param_groups[1]["params"].append(nn.Parameter(torch.ones(1)))
    part.restore(captured)
    assert all(one is two for one, two in zip(optimizer.param_groups, groups, strict=True))
    assert groups[0]["betas"] == (0.1, 0.2) and groups[1]["lr"] == 0.5
    assert [group["params"] for group in groups] == [[weight], [other]]


def test_fewer_param_groups_in_another_process_are_an_error() -> None:
    captured = adapt("o", torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)])).capture()
    with pytest.raises(ScriptError, match="2 param_groups were captured, but SGD has 1"):
        adapt("o", torch.optim.SGD([nn.Parameter(torch.ones(1))])).restore(captured)


def test_a_scaler_that_was_interrupted_after_unscale_can_unscale_again() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    part = adapt("scaler", scaler)
    captured = part.capture()
    for _ in range(2):
        scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
        part.restore(captured)
    assert scaler._scale is None
    scaler.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    captured, scale = part.capture(), scaler._scale
    scaler.step(optimizer)
    scaler.update(2.0)
    part.restore(captured)
    assert scaler._scale is scale and scaler.get_scale() == 8.0
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


def test_a_disabled_scaler_has_nothing_to_put_back() -> None:
    state = TrainState(scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert not state.scales_gradients
    state.restore(state.capture())


def test_state_dicts_are_copied_both_ways() -> None:
    class Own:
        def __init__(self) -> None:
            self.values: dict[str, Any] = {"list": [1], "tensor": torch.zeros(1)}

        def state_dict(self) -> dict[str, Any]:
            return self.values

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.values = state

    own = Own()
    part = adapt("own", own)
    captured = part.capture()
    for _ in range(2):
        own.values["list"].append(2)
        own.values["tensor"].add_(1)
        part.restore(captured)
        assert own.values["list"] == [1] and own.values["tensor"].item() == 0


def test_copies_know_no_graph() -> None:
    weight = nn.Parameter(torch.ones(1))
    copy_ = copied({"a": [(weight * 2, {1})]})
    assert not copy_["a"][0][0].requires_grad and copy_["a"][0][1] == {1}


# --- generators ----------------------------------------------------------------------------------------------------------


def _numpy_generators() -> list[Any]:
    if "numpy" not in sys.modules:
        return []
    from numpy import random as numpy_random

    bit_generators = [numpy_random.PCG64(1), numpy_random.MT19937(1), numpy_random.Philox(1)]
    return [*map(numpy_random.Generator, bit_generators), numpy_random.RandomState(1), numpy_random.SFC64(1)]


@pytest.mark.parametrize(
    "generator",
    [torch.Generator(), random.Random(1), *_numpy_generators()],
    ids=lambda generator: type(generator).__name__,
)
def test_generators_go_back_to_where_they_were(generator: Any) -> None:
    part = adapt("generator", generator)
    if isinstance(generator, torch.Generator):
        draw: Callable[[], Any] = lambda: torch.randn(3, generator=generator).tolist()  # noqa: E731
    else:
        names = ("normal", "gauss", "random_raw")
        draw = next(getattr(generator, name) for name in names if hasattr(generator, name))
    draw()  # an odd number of normal numbers leaves one in store
    captured = pickle.loads(pickle.dumps(part.capture()))
    first = [draw(), draw(), draw()]
    part.restore(captured)
    assert [draw(), draw(), draw()] == first


def test_the_global_generators_go_back_to_where_they_were() -> None:
    draws: list[Any] = [random.random, random.gauss, lambda: torch.rand(1).item()]
    if "numpy" in sys.modules:
        import numpy

        draws += [numpy.random.random, numpy.random.normal]
    for odd in range(3):
        [draw() for draw in draws[:odd] + draws[-1:]]
        before = randomness.capture()
        fingerprints = dict(randomness.fingerprints())
        first = [draw() for draw in draws * 3]
        assert all(fingerprints[name] != bits_now for name, bits_now in randomness.fingerprints())
        randomness.restore(before)
        assert dict(randomness.fingerprints()) == fingerprints
        assert [draw() for draw in draws * 3] == first


def test_numpys_second_normal_number_is_not_overlooked() -> None:
    """It comes from store: the words of the generator are the same before and after."""
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(1)
    states, drawn = [], []
    for _ in range(6):
        states.append(randomness.capture())
        drawn.append(numpy.random.normal())
    for index, state in enumerate(states):
        randomness.restore(state)
        assert [numpy.random.normal() for _ in range(6 - index)] == drawn[index:]
