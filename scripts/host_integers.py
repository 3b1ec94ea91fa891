"""Runs small integer and boolean functions on the host's view of an emulated device's memory.

Kernels do nothing on an emulated device: comparisons, ranges and masks would stay zero, and a program that looks at
them would go another way than on a GPU. In this mode such a function is computed once more on the host, on the very
memory the device's tensors lie in. No device memory is allocated for it.

The mode sees the functions a program calls and not the operators they are made of: a dispatch mode would make PyTorch
take the paths it keeps for tensor subclasses, which allocate differently.
"""

import ctypes

import torch
from torch.overrides import TorchFunctionMode

# Larger tensors are left alone: nobody's control flow depends on them, and they would cost time.
LIMIT = 1 << 22
INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
# Functions that draw numbers would disturb the host's generator; `cuda` would go to the device again.
LEFT_ALONE = ("rand", "bernoulli", "multinomial", "dropout", "empty", "cuda")


def small_integer(tensor):
    return tensor.dtype in INTEGERS and type(tensor) is torch.Tensor and tensor.numel() <= LIMIT


def host_view(tensor):
    """The same bytes as a tensor of the host: the emulated device's memory is the process's own."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if not size:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    raw = (ctypes.c_char * size).from_address(storage.data_ptr())
    flat = torch.frombuffer(raw, dtype=tensor.dtype, count=size // tensor.element_size())
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class NotInteger(Exception):
    """An argument is a tensor that is not a small integer one."""


def on_host(value):
    """An argument as the host's computation takes it: views for tensors, the host for devices."""
    if isinstance(value, torch.Tensor):
        if not small_integer(value):
            raise NotInteger
        return host_view(value) if value.is_cuda else value
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(on_host(item) for item in value)
    if isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda")):
        return torch.device("cpu")
    return value


class HostIntegers(TorchFunctionMode):
    """While active, integer and boolean results on the device are what they would be on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = function.__name__
        if name == "__get__":
            return result
        target = args[0] if name == "__setitem__" else result
        targets = target if isinstance(target, (tuple, list)) else (target,)
        for tensor in targets:
            if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda or not small_integer(tensor):
                return result
        if targets and not any(part in name for part in LEFT_ALONE):
            self.compute(function, args, kwargs, targets)
        return result

    @staticmethod
    def compute(function, args, kwargs, targets):
        """Computes on the host what the device's kernel did not, into the memory of the results."""
        try:
            host_args = [on_host(value) for value in args]
            host_kwargs = {key: on_host(value) for key, value in kwargs.items()}
            if not any(isinstance(value, torch.Tensor) for value in args) and "device" not in kwargs:
                host_kwargs["device"] = "cpu"
            computed = function(*host_args, **host_kwargs)
        except (NotInteger, NotImplementedError, RuntimeError, TypeError):
            # Not computable on the host, or not a function of integers: the device's answer stays.
            return
        values = computed if isinstance(computed, (tuple, list)) else (computed,)
        for device, value in zip(targets, values):
            if isinstance(value, torch.Tensor) and value.shape == device.shape:
                view = host_view(device)
                if view.data_ptr() != value.data_ptr():
                    view.copy_(value)
