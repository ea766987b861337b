"""The global random number generators: python's, numpy's, torch's on the CPU and on the accelerator's devices.

DTensor's tracker has no numbers of its own: it draws from the device's generator.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

_MERSENNE_BYTES: Final = 4 * 625  # 624 words and the position


@dataclass(frozen=True, slots=True)
class Randomness:
    """The state of all of them. `numpy`: None when it is not imported; `devices`: by index, where the device is in use."""

    python: Any
    numpy: dict[str, Any] | None
    torch: Tensor
    devices: tuple[tuple[int, Tensor], ...]


class _NumpyState:
    """numpy builds its state word by word, which takes longer than everything else here; so only when it has changed."""

    def __init__(self) -> None:
        self._bits = b""
        self._state: dict[str, Any] | None = None
        self._address: tuple[object, int] = (None, 0)

    def get(self) -> dict[str, Any] | None:
        numpy = sys.modules.get("numpy.random")
        if numpy is None:
            return None
        bits = self._raw(numpy)
        # With a second normal number in store the next draw changes that alone, not the words.
        if not bits or bits != self._bits or not self._state or self._state["has_gauss"]:
            self._state = dict(numpy.get_state(legacy=False))
            self._bits = bits
        return self._state

    def set(self, state: dict[str, Any]) -> None:
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            numpy.set_state(state)
            self._bits = b""

    def _raw(self, numpy: Any) -> bytes:
        generator = numpy.mtrand._rand._bit_generator
        if type(generator) is not numpy.MT19937:
            return b""
        if self._address[0] is not generator:
            self._address = (generator, generator.ctypes.state_address)
        return ctypes.string_at(self._address[1], _MERSENNE_BYTES)


_NUMPY: Final = _NumpyState()


def capture() -> Randomness:
    """All states as they are now."""
    return Randomness(
        python=random.getstate(), numpy=_NUMPY.get(), torch=torch.get_rng_state(), devices=tuple(_device_states())
    )


def restore(saved: Randomness) -> None:
    """Set them all. A device that is used by this process only is left as it is."""
    random.setstate(saved.python)
    if saved.numpy is not None:
        _NUMPY.set(saved.numpy)
    torch.set_rng_state(saved.torch)
    device = _device_module()
    if device is not None:
        for index, state in saved.devices[: device.device_count()]:
            device.set_rng_state(state, index)


def fingerprints() -> Iterator[tuple[str, bytes]]:
    """The name of each generator and something that is equal exactly when its state is."""
    now = capture()
    yield "python's random", _digest(repr(now.python))
    if now.numpy is not None:
        yield "numpy's global generator", _digest(repr([(key, _listed(item)) for key, item in now.numpy.items()]))
    yield "torch's CPU generator", bytes(now.torch.tolist())
    for index, state in now.devices:
        yield f"torch's generator of device {index}", bytes(state.tolist())


def _device_states() -> Iterator[tuple[int, Tensor]]:
    device = _device_module()
    if device is not None:
        for index in range(device.device_count()):
            yield index, device.get_rng_state(index)


def _device_module() -> Any | None:
    """torch.cuda or its like, once this process has used it (to ask for a state would make a context)."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    initialized = getattr(module, "is_initialized", None)
    return module if initialized is None or initialized() else None


def _listed(item: Any) -> Any:
    return {key: _listed(value) for key, value in item.items()} if isinstance(item, dict) else _plain(item)


def _plain(item: Any) -> Any:
    return item.tolist() if hasattr(item, "tolist") else item


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
