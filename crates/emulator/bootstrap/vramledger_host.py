"""Computes small results on the host's view of an emulated device's memory.

Kernels do nothing on an emulated device: comparisons, ranges and masks would stay what the memory held before, and a
program that looks at them would go another way than on a GPU. In this mode a function of integers and booleans, or of a
handful of floats, is computed once more on the host, on the very memory the device's tensors lie in. A small result
that cannot be computed so, a loss for one, is zero. No device memory is allocated for any of it.

The mode sees the functions a program calls and not the operators they are made of: a dispatch mode would make PyTorch
take the paths it keeps for tensor subclasses, which allocate differently.
"""

import ctypes

import torch
from torch.overrides import TorchFunctionMode

# Larger tensors are left alone: nobody's control flow depends on them, and they would cost time.
INTEGERS_AT_MOST = 1 << 22
FLOATS_AT_MOST = 64
INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
PLAIN = (torch.Tensor, torch.nn.Parameter)
# Functions that draw numbers would disturb the host's generator; `cuda` would go to the device again.
LEFT_ALONE = ("rand", "normal", "uniform", "bernoulli", "multinomial", "exponential", "dropout", "empty", "cuda")


def emulated():
    """Whether the device is an emulated one, whose memory the host can read."""
    return hasattr(ctypes.CDLL(None), "vramledger_emulator")


def is_small(tensor):
    limit = INTEGERS_AT_MOST if tensor.dtype in INTEGERS else FLOATS_AT_MOST
    return type(tensor) in PLAIN and tensor.numel() <= limit


def host_view(tensor):
    """The same bytes as a tensor of the host: the emulated device's memory is the process's own."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if not size:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    raw = (ctypes.c_char * size).from_address(storage.data_ptr())
    flat = torch.frombuffer(raw, dtype=tensor.dtype, count=size // tensor.element_size())
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class NotSmall(Exception):
    """An argument is a tensor that is not computed on the host."""


def on_host(value):
    """An argument as the host's computation takes it: views for tensors, the host for devices."""
    if isinstance(value, torch.Tensor):
        if not is_small(value):
            raise NotSmall
        return host_view(value) if value.is_cuda else value
    if type(value) in (list, tuple):
        return type(value)(on_host(item) for item in value)
    if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")):
        return torch.device("cpu")
    return value


class HostValues(TorchFunctionMode):
    """While active, small results on the device are what they would be on a GPU, or zero."""

    active = True

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__get__" or torch.compiler.is_compiling() or not self.active:
            return function(*args, **kwargs)
        if name == "__getitem__":
            args = (args[0], with_places(args[1]))
        result = function(*args, **kwargs)
        target = args[0] if name == "__setitem__" else result
        targets = target if isinstance(target, (tuple, list)) else (target,)
        for tensor in targets:
            if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda or not is_small(tensor):
                return result
        if targets and not any(part in name for part in LEFT_ALONE):
            with torch.no_grad():
                return self.compute(function, args, kwargs, result, targets)
        return result

    @staticmethod
    def compute(function, args, kwargs, result, targets):
        """Computes on the host what the device's kernel did not, into the memory of the results."""
        try:
            host_args = [on_host(value) for value in args]
            host_kwargs = {key: on_host(value) for key, value in kwargs.items()}
            if not any(isinstance(value, torch.Tensor) for value in args) and "device" not in kwargs:
                host_kwargs["device"] = "cpu"
            computed = function(*host_args, **host_kwargs)
        except (NotSmall, NotImplementedError, RuntimeError, TypeError):
            # A function of large tensors, or one that the host does not have.
            zero(args, kwargs, targets)
            return result
        values = computed if isinstance(computed, (tuple, list)) else (computed,)
        if any(not isinstance(v, torch.Tensor) or v.shape != t.shape for v, t in zip(values, targets)):
            return resized(result, values)
        for device, value in zip(targets, values):
            view = host_view(device)
            if view.data_ptr() != value.data_ptr():
                view.copy_(value)
        return result


def on_device(value, device):
    """A host's result as a tensor of the device."""
    made = torch.empty(value.shape, dtype=value.dtype, device=device)
    host_view(made).copy_(value)
    return made


def resized(result, values):
    """Results whose size depends on values, of `nonzero` for one: the device saw none and has made them empty."""
    if isinstance(result, torch.Tensor) and isinstance(values[0], torch.Tensor):
        return on_device(values[0], result.device)
    if type(result) is tuple and all(isinstance(t, torch.Tensor) for t in (*result, *values)):
        return tuple(on_device(value, old.device) for old, value in zip(result, values))
    return result


def with_places(index):
    """An index with the places of a boolean mask's ones instead of the mask, which the device would find empty."""
    parts = []
    for part in index if isinstance(index, tuple) else (index,):
        is_mask = isinstance(part, torch.Tensor) and part.is_cuda and part.dtype is torch.bool and part.dim()
        if is_mask and is_small(part):
            places = on_device(host_view(part).nonzero(), part.device)
            parts.extend(places.unbind(1))
        else:
            parts.append(part)
    return tuple(parts) if isinstance(index, tuple) or len(parts) > 1 or parts[0] is not index else index


def zero(args, kwargs, targets):
    """Zeroes fresh results that nobody computed, so that a loss is 0 and not what the memory held before."""
    flat, given = [args, kwargs.values()], []
    while flat:
        for value in flat.pop():
            if isinstance(value, torch.Tensor):
                given.append(value)
            elif isinstance(value, (list, tuple)):
                flat.append(value)
    # A tensor of the host among the arguments was copied for real; a view shares memory that has an owner.
    if any(not tensor.is_cuda and tensor.dim() for tensor in given):
        return
    known = {tensor.untyped_storage().data_ptr() for tensor in given if type(tensor) in PLAIN}
    for tensor in targets:
        if tensor.untyped_storage().data_ptr() not in known:
            host_view(tensor).zero_()
