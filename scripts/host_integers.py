"""Runs small integer and boolean operators on the host's view of an emulated device's memory.

Kernels do nothing on an emulated device: comparisons, ranges and masks would stay zero, and a program that looks at
them would go another way than on a GPU. In this mode such an operator is computed once more on the host, on the very
memory the device's tensors lie in. No device memory is allocated for it.
"""

import ctypes

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

# Larger tensors are left alone: nobody's control flow depends on them, and they would cost time.
LIMIT = 1 << 22
INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def small_integer(tensor):
    return tensor.dtype in INTEGERS and tensor.numel() <= LIMIT and type(tensor) is torch.Tensor


def host_view(tensor):
    """The same bytes as a tensor of the host: the emulated device's memory is the process's own."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if not size:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    raw = (ctypes.c_char * size).from_address(storage.data_ptr())
    flat = torch.frombuffer(raw, dtype=tensor.dtype, count=size // tensor.element_size())
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class HostIntegers(TorchDispatchMode):
    """While active, integer and boolean results on the device are what they would be on a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in function.tags:
            return result
        results = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        if not results or not all(t.is_cuda and small_integer(t) for t in results):
            return result
        flat, form = tree_flatten((args, kwargs))
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        if not all(small_integer(t) for t in tensors):
            return result
        host = [self.on_host(value) for value in flat]
        with torch._C._DisableTorchDispatch():
            host_args, host_kwargs = tree_unflatten(host, form)
            computed = function(*host_args, **host_kwargs)
            for device, value in zip(results, tree_flatten(computed)[0], strict=True):
                view = host_view(device)
                if view.shape == value.shape and view.data_ptr() != value.data_ptr():
                    view.copy_(value)
        return result

    @staticmethod
    def on_host(value):
        if isinstance(value, torch.Tensor):
            return host_view(value) if value.is_cuda else value
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return value
