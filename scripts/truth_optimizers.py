"""Optimizers, as a training case asks for them: every form of torch's, Lion, low-bit Adam, in backward or on the host."""

import functools
import gc


def make(parameters, setup, model, masters=None):
    """One, or of Muon two: AdamW has what is no matrix of a hidden layer. `masters` are parameters' fp32 copies."""
    import torch

    if "optimizer" in setup.get("offload", ()):
        import torchao.optim

        plain = kind(setup["optimizer"], setup)
        return [torchao.optim.CPUOffloadOptimizer(parameters, plain.func, **plain.keywords)]
    if setup["optimizer"] != "muon":
        return [kind(setup["optimizer"], setup)(parameters)]
    of_tokens = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    if hasattr(model, "get_output_embeddings"):
        of_tokens.add(model.get_output_embeddings().weight)
    of_tokens |= {master for parameter, master in (masters or {}).items() if parameter in of_tokens}
    matrices = [p for p in parameters if p.ndim == 2 and p not in of_tokens]
    others = [p for p in parameters if p.ndim != 2 or p in of_tokens]
    groups = {"muon": matrices, "adamw": others}
    return [kind(name, setup)(group) for name, group in groups.items() if group]


def kind(name, setup):
    """The class of an optimizer with its arguments."""
    import torch

    if setup.get("fp32_state"):
        import bitsandbytes

        made = {"adam": bitsandbytes.optim.Adam32bit, "adamw": bitsandbytes.optim.AdamW32bit}[name]
    elif name == "lion":
        import lion_pytorch

        made = lion_pytorch.Lion
    elif name.endswith("bit"):
        import torchao.optim

        made = getattr(torchao.optim, name.replace("adam", "Adam").replace("Adamw", "AdamW"))
    else:
        names = {"adamw": "AdamW", "sgd": "SGD", "rmsprop": "RMSprop"}
        made = getattr(torch.optim, names.get(name, name.capitalize()))
    arguments = {"lr": 1e-4}
    if setup["optimizer_impl"] is not None:
        arguments["foreach"] = setup["optimizer_impl"] == "foreach"
    if setup["optimizer_impl"] == "fused":
        arguments.update(fused=True, foreach=None)
    for argument in ("momentum", "nesterov", "weight_decay", "amsgrad", "capturable"):
        if setup.get(argument) is not None:
            arguments[argument] = setup[argument]
    return functools.partial(made, **arguments)


def step_in_backward(parameters, setup, model):
    """An optimizer for each parameter, which steps as soon as the gradient is there and lets go of it."""
    own = {parameter: make([parameter], setup, model)[0] for parameter in parameters}

    def update(parameter):
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(update)
    return own.values()


def compile_steps(model, setup):
    """Compiles the optimizer's step for every shape before the run: what a compiler allocates is none of it."""
    import torch

    shapes = dict.fromkeys((p.shape, p.dtype) for p in model.parameters() if p.requires_grad)
    parameters = [torch.nn.Parameter(torch.empty(s, dtype=d, device="cuda")) for s, d in shapes]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    kind(setup["optimizer"], setup)(parameters).step()
    del parameters, parameter
    gc.collect()
    torch.cuda.empty_cache()


def parts_of(value):
    """The tensors that a value of an optimizer's state is made of."""
    import torch

    if not torch.is_tensor(value):
        return []
    if hasattr(value, "__tensor_flatten__") and not hasattr(value, "to_local"):
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    return [value]


def states_of(optimizer):
    """The state of an optimizer, or of the part of one that is on the device."""
    while hasattr(optimizer, "d_opt"):
        optimizer = optimizer.d_opt
    return optimizer.state.values() if optimizer else ()
