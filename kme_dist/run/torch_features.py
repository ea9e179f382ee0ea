"""PyTorch networks as feature maps: any `torch.nn.Module` can replace a map of `kme_dist.core.features`.

    phi = TorchFeatures.of(torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU()))
    Z = phi.forward(X)                        # NumPy in, NumPy out; CuPy stays on its device
    CENClassifier(network=module)             # the same, learned
    named("hnr_cnn", {"side": 28})            # an architecture of this module, by name

Rows and features are exchanged by DLPack, without a copy. The closed-form derivative of the objective by the features
is backpropagated by autograd, and the gradients are handled like all others. Torch computes on one thread here: several
add in another order, so that a model would have other bits on a machine with other cores. Weights are plain arrays
under the names of the module's state; stored are those arrays and how to build the module: a name and arguments from
`ARCHITECTURES`, or the name of your own class, which you pass to `kme_dist.load`. Only this module imports torch, and
it is imported only when a torch network is used.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
import torch.utils.dlpack
from torch import nn

from kme_dist.backend import Array, is_cupy, namespace_of, precision
from kme_dist.core.features import truncated_normal
from kme_dist.core.kernels.base import Gradients
from kme_dist.errors import ConfigError, DataError

_ROWS_AT_ONCE = 1_000  # activations of a convolution take a hundred times the memory of its features
_lock = threading.Lock()  # a module's weights are swapped in place; two threads must not share one


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread inside the block; the number is one of the calling thread, as in OpenMP."""
    before = torch.get_num_threads()
    if before == 1:  # setting it makes convolutions forget what they prepared
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- architectures by name --------------------------------------------------------------------------


def hnr_cnn(side: int = 28, channels: Sequence[int] = (32, 64), features: int = 1024) -> nn.Module:
    """Two 5 x 5 convolutions, each with ReLU and 2 x 2 pooling, then a dense layer with ReLU.   [HNR, section 5]"""
    first, second = channels
    return nn.Sequential(
        nn.Unflatten(1, (1, side, side)),
        nn.Conv2d(1, first, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear((side // 4) ** 2 * second, features),
        nn.ReLU(),
    )


def dense(inputs: int, hidden: Sequence[int] = (96, 32), activation: str = "relu") -> nn.Module:
    """Dense layers, each followed by the activation."""
    kinds: dict[str, Callable[[], nn.Module]] = {
        "relu": nn.ReLU,
        "tanh": nn.Tanh,
        "gelu": lambda: nn.GELU(approximate="tanh"),
    }
    if activation not in kinds:
        raise ConfigError(f"activation={activation!r} is unknown; choose one of {', '.join(kinds)}")
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.Linear(inputs, units), kinds[activation]()]
        inputs = units
    return nn.Sequential(*layers)


ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {"hnr_cnn": hnr_cnn, "dense": dense}


def published_start(module: nn.Module, seed: int) -> nn.Module:
    """Weights truncated normal with deviation 0.1, biases 0.1: the published initialisation."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, value in module.named_parameters():
            drawn = np.full(value.shape, 0.1) if name.endswith("bias") else truncated_normal(rng, value.shape, 0.1)
            value.copy_(torch.from_numpy(np.asarray(drawn)))
    return module


# --- the map ----------------------------------------------------------------------------------------


class TorchFeatures:
    """A module as an immutable feature map: its structure, and its weights as arrays.

    Parameters
    ----------
    module : gives the structure; its own weights are never touched
    arrays : every entry of its state by name, parameters and buffers
    config : how to rebuild it: {"name": "torch", "architecture": NAME, "arguments": {...}}
    """

    def __init__(self, module: nn.Module, arrays: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> None:
        self._module, self._config = module, dict(config)
        self.arrays = {name: np.asarray(value) for name, value in arrays.items()}
        self._learned = [name for name, value in module.named_parameters() if value.requires_grad]
        self._buffers = {name for name, _ in module.named_buffers()}
        self._key: tuple[int, ...] | None = None
        missing = set(module.state_dict()) ^ set(self.arrays)
        if missing:
            raise ConfigError(
                f"the arrays do not match {type(module).__name__}: {sorted(missing)[0]!r} is missing on one side"
            )

    @classmethod
    def of(cls, module: nn.Module, architecture: str | None = None, arguments: Mapping[str, Any] | None = None) -> Self:
        """The module in its current state. `arguments` are those of its class; needed only to load it again."""
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) or getattr(layer, "track_running_stats", False):
                raise ConfigError(
                    f"the network has a layer {type(layer).__name__}, by which the features of a row depend on the "
                    "other rows of its batch, or on the batches seen before; use LayerNorm, GroupNorm, or InstanceNorm "
                    "with track_running_stats=False"
                )
        own = copy.deepcopy(module).cpu()
        arrays = {name: value.detach().numpy().copy() for name, value in own.state_dict().items()}
        name = architecture or type(module).__name__
        return cls(own, arrays, {"name": "torch", "architecture": name, "arguments": dict(arguments or {})})

    # --- feature map interface -------------------------------------------------------------------

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        return {name: self.arrays[name] for name in self._learned}

    def replace(self, **values: Any) -> Self:
        unknown = sorted(set(values) - set(self._learned))
        if unknown:
            raise ConfigError(f"the network has no parameter {unknown[0]!r}; it has {self._learned}")
        new = {name: np.asarray(value, self.arrays[name].dtype) for name, value in values.items()}
        changed = type(self)(self._module, {**self.arrays, **new}, self._config)
        changed._key = self._key
        return changed

    def sampled(self, key: Sequence[int]) -> Self:
        """The map with the module's own dropout enabled, its masks determined by `key`."""
        changed = self.replace()
        changed._key = tuple(int(k) for k in key)
        return changed

    def forward(self, X: Array) -> Array:
        with _lock, _one_thread(), torch.no_grad():
            rows = _to_torch(X)
            if self._key is not None or len(rows) <= _ROWS_AT_ONCE:  # with a key, all rows share one dropout draw
                return _from_torch(self._run(rows, learn=False)[0], X)
            return _from_torch(torch.cat([self._run(few, learn=False)[0] for few in rows.split(_ROWS_AT_ONCE)]), X)

    def linearise(self, X: Array) -> tuple[Array, Callable[..., tuple[Gradients, Array]]]:
        with _lock, _one_thread(), torch.enable_grad():
            rows = _to_torch(X).detach().requires_grad_(True)
            Z, weights = self._run(rows, learn=True)

        def pull(Z_bar: Array, inputs: bool = False) -> tuple[Gradients, Array]:
            wanted = [*weights.values(), *([rows] if inputs else [])]
            bar = _to_torch(Z_bar).to(Z.dtype)
            with _one_thread():
                found = torch.autograd.grad(Z, wanted, bar, allow_unused=True, retain_graph=True)
            full = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)]
            gradients = {name: _from_torch(g, X) for name, g in zip(weights, full, strict=False)}
            return gradients, (_from_torch(full[-1], X) if inputs else None)

        return _from_torch(Z.detach(), X), pull

    def vjp(self, X: Array, Z_bar: Array) -> Gradients:
        return self.linearise(X)[1](Z_bar)[0]

    def input_vjp(self, X: Array, Z_bar: Array) -> Array:
        return self.linearise(X)[1](Z_bar, inputs=True)[1]

    def to_config(self) -> dict[str, Any]:
        return dict(self._config)

    def __repr__(self) -> str:
        return f"TorchFeatures({self._config['architecture']}, {sum(a.size for a in self.parameters.values())} weights)"

    def _run(self, rows: torch.Tensor, learn: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        state = {
            name: _tensor(value).to(device=rows.device, dtype=rows.dtype if value.dtype.kind == "f" else None)
            for name, value in self.arrays.items()
        }
        for name in self._buffers:  # a layer may change them in place, and they share the memory of the arrays
            state[name] = state[name].clone()
        weights = {name: state[name].detach().requires_grad_(learn) for name in self._learned}
        self._module.train(self._key is not None)
        with torch.random.fork_rng(devices=[rows.device] if rows.is_cuda else [], enabled=self._key is not None):
            if self._key is not None:
                torch.manual_seed(int(np.random.SeedSequence(self._key).generate_state(1, np.uint64)[0] >> 1))
            Z = torch.func.functional_call(self._module, {**state, **weights}, (rows,))
        if Z.ndim != 2 or Z.shape[0] != rows.shape[0]:
            raise DataError(
                f"the network gave shape {tuple(Z.shape)} for {rows.shape[0]} rows; expected one feature row each"
            )
        return Z, weights


def _tensor(array: np.ndarray) -> torch.Tensor:
    # torch warns about read-only memory it could write to; parameters are read-only on purpose and never written.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _to_torch(array: Array) -> torch.Tensor:
    """By DLPack: the same memory, on the host or on the device."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        array = array.copy()  # DLPack does not export read-only memory
    return torch.utils.dlpack.from_dlpack(array)


def _from_torch(tensor: torch.Tensor, reference: Array) -> Array:
    """Back to the library of `reference`, by DLPack."""
    xp = namespace_of(reference)
    tensor = tensor.detach().contiguous()
    if precision(reference) == "float64":
        tensor = tensor.to(torch.float64)
    return xp.from_dlpack(tensor) if isinstance(reference, np.ndarray) or is_cupy(reference) else tensor.numpy()


# --- building ---------------------------------------------------------------------------------------


def named(architecture: str, arguments: Mapping[str, Any] | None = None, seed: int = 0) -> TorchFeatures:
    """An architecture of this module with the published initialisation."""
    if architecture not in ARCHITECTURES:
        raise ConfigError(f"architecture {architecture!r} is unknown; known: {', '.join(ARCHITECTURES)}")
    try:
        module = ARCHITECTURES[architecture](**dict(arguments or {}))
    except TypeError as error:
        raise ConfigError(f"architecture {architecture!r} does not accept its arguments: {error}") from error
    return TorchFeatures.of(published_start(module, seed), architecture, arguments)


def as_features(network: Any, seed: int = 0) -> TorchFeatures:
    """A module with the weights it has, or {"name": "torch", "architecture": ..., "arguments": ...}, as a map."""
    if isinstance(network, nn.Module):
        return TorchFeatures.of(network)
    if isinstance(network, Mapping) and network.get("name") == "torch":
        return named(str(network.get("architecture")), network.get("arguments"), seed)
    raise ConfigError(f"network={network!r}: must be a torch.nn.Module, a feature map, or a config with a name")


def from_config(
    config: Mapping[str, Any], arrays: Mapping[str, np.ndarray], own: Mapping[str, Any] | None = None
) -> TorchFeatures:
    """A stored network: its class from the allow-list or from `own`, its weights from `arrays`."""
    name, arguments = str(config.get("architecture")), dict(config.get("arguments") or {})
    builders = {**ARCHITECTURES, **(own or {})}
    if name not in builders:
        raise ConfigError(
            f"the model's network is of class {name!r}, which is not part of this package; "
            f"pass it: load(path, networks={{{name!r}: {name}}})"
        )
    builder = builders[name]
    try:
        module = builder if isinstance(builder, nn.Module) else builder(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"the model's network is of class {name!r}, which cannot be built with the arguments {arguments}: {error}; "
            f"pass a function that builds it: load(path, networks={{{name!r}: lambda: {name}(...)}})"
        ) from error
    return TorchFeatures(module, arrays, {"name": "torch", "architecture": name, "arguments": arguments})
